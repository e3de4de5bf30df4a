"""What another version of transformers makes of exported models: run as a program, with that
version in PYTHONPATH and nothing of this project.

Reads lines of JSON on standard input, {directory, base}: of an adapter `base` is its base model.
Writes the version, then a line for each: the logits of TOKENS, the token ids of TEXTS, and the
rendered CHAT, or the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOKENS = [[(7 * place + row) % 48 for place in range(24)] for row in range(2)]
TEXTS = ["plain text", " two  spaces\n", "<|im_start|>user", "naïve — 数"]
CHAT = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": " What?\n"},
    {"role": "assistant", "content": "This."},
]


def logits_of(model: Any) -> list[Any]:
    """The logits of TOKENS, which a tiny model computes within a millisecond."""
    import torch

    with torch.no_grad():
        found: list[Any] = model.eval()(input_ids=torch.tensor(TOKENS)).logits.tolist()
    return found


def readings(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer makes of TEXTS and of CHAT."""
    return {
        "tokens": [tokenizer(text)["input_ids"] for text in TEXTS],
        "text": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS],
        "without_special": [
            tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
            for text in TEXTS
        ],
        "chat": tokenizer.apply_chat_template(CHAT, tokenize=False),
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }


def read(directory: str, base: str | None) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        base or directory, dtype=torch.float32, attn_implementation="eager"
    )
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory)
    found = {"logits": logits_of(model), **readings(AutoTokenizer.from_pretrained(directory))}
    if base is None:
        settings = GenerationConfig.from_pretrained(directory)
        found["generation"] = [
            settings.eos_token_id,
            settings.do_sample,
            settings.temperature,
            settings.top_p,
        ]
    return found


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    print(json.dumps(transformers.__version__))
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            found = read(**wanted)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
