"""glaiveai/glaive-function-calling-v2 as rows with `messages`, which data.format `chat` reads: `convert.py OUT.jsonl`.

The data set holds each conversation as one text. A turn is a line that begins with USER:, ASSISTANT: or FUNCTION
RESPONSE: and what follows; the assistant's end with <|endoftext|>, for which the model's own chat template has
another token. Calls stay in the assistant's text as they are, `<functioncall> {"name": ..., "arguments": ...}`: the
model learns them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = "glaiveai/glaive-function-calling-v2"
_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_END = "<|endoftext|>"


def messages_of(system: str, chat: str) -> list[dict[str, str]]:
    """The turns of one conversation; empty where the assistant never answers."""
    before, *parts = _TURN.split(chat)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    if before.strip() or "ASSISTANT" not in [who for who, _ in turns]:
        return []
    instructions = system.removeprefix("SYSTEM:").strip()
    opening = [{"role": "system", "content": instructions}] if instructions else []
    messages = [{"role": _ROLES[who], "content": text.replace(_END, "").strip()} for who, text in turns]
    return [*opening, *(message for message in messages if message["content"])]


def rows() -> Iterator[dict[str, str]]:
    """The data set's rows, from the Hugging Face hub."""
    from datasets import load_dataset

    yield from load_dataset(SOURCE, split="train", streaming=True)


def main() -> None:
    """Write the file, completely or not at all."""
    if len(sys.argv) != 2:
        sys.exit("usage: convert.py OUT.jsonl")
    target = Path(sys.argv[1])
    partial = target.with_name(f"{target.name}.partial")
    written = left_out = 0
    with partial.open("w", encoding="utf-8") as file:
        for row in rows():
            messages = messages_of(row["system"], row["chat"])
            if messages:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                written += 1
            else:
                left_out += 1
    partial.rename(target)
    print(f"{target}: {written} conversations; {left_out} without an answer were left out")


if __name__ == "__main__":
    main()
