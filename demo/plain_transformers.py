"""Proof that `final/` needs nothing of Drillyard: plain transformers generates the same text for
every question.

Usage: plain_transformers.py FINAL_DIRECTORY PREDICTIONS.jsonl...   (exit code 0 when every text is the same)
Importing drillyard is made impossible before anything else is imported.
"""  # noqa: E501

import json
import sys
from pathlib import Path


class NoDrillyard:
    """An import hook that refuses drillyard."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "drillyard":
            raise ImportError("drillyard cannot be imported in this process")


sys.meta_path.insert(0, NoDrillyard())

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

BATCH_SIZE = 100


def main(final: Path, files: list[Path]) -> int:
    """Generate for every recorded prompt and compare; prints the count of equal texts."""
    try:
        import drillyard  # noqa: F401
    except ImportError:
        pass
    else:
        raise SystemExit("drillyard could be imported: this proves nothing")
    tokenizer = AutoTokenizer.from_pretrained(final, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(final).eval()
    rows = [
        json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()
    ]
    rows.sort(key=lambda row: len(row["prompt"]))
    equal = 0
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        equal += sum(
            text == row["predicted"]
            for text, row in zip(generate(model, tokenizer, batch), batch, strict=True)
        )
    print(f"{equal} of {len(rows)} texts are the same")
    return 0 if equal == len(rows) else 1


@torch.no_grad()
def generate(model, tokenizer, rows):
    """Greedy answers of plain transformers to the prompts of `rows`."""
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    limit = max(row["max_new_tokens"] for row in rows)
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
    new = outputs[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]]))
