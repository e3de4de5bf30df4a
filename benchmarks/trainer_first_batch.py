"""The first batch of a TRL config, by TRL itself and by the run config that `drillyard init
--from-trl` makes of it: tokens and which of them are learnt.

    python benchmarks/trainer_first_batch.py --trl-python VENV/bin/python

`VENV` has trl 1.x and torch; nothing is downloaded. A tiny model with random weights and a trained
tokenizer are made. Each case has as many rows as a batch, because the two draw rows in another
order; the rows of the batches are compared as a set, without padding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Row = tuple[tuple[int, ...], tuple[bool, ...]]
TURNS = [
    [
        {"role": "user", "content": f"what is {n} plus {n}? " * (1 + n)},
        {"role": "assistant", "content": f"it is {2 * n}. " * (1 + n)},
        {"role": "user", "content": "and one more?"},
        {"role": "assistant", "content": f"then {2 * n + 1}."},
    ]
    for n in range(8)
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|role|>assistant\\n' }}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|role|>' + m['role'] + '\\n' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|role|>assistant\\n' }}{% endif %}"
)
CHATS = [{"messages": turns} for turns in TURNS]
PAIRS = [{"prompt": t[0]["content"], "completion": " " + t[1]["content"]} for t in TURNS]
TEXTS = [{"text": t[0]["content"]} for t in TURNS]
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "chat": (CHATS, {}),
    "chat, answers alone": (CHATS, {"assistant_only_loss": True}),
    "chat, cut at 32": (CHATS, {"max_length": 32, "assistant_only_loss": True}),
    "chat, packed": (CHATS, {"max_length": 256, "packing": True, "assistant_only_loss": True}),
    "prompt and completion": (PAIRS, {"completion_only_loss": True}),
    "prompt and completion, all": (PAIRS, {"completion_only_loss": False}),
    "text": (TEXTS, {"dataset_text_field": "text"}),
    "text, cut at 16": (TEXTS, {"dataset_text_field": "text", "max_length": 16}),
}
TRL_SIDE = """
import json, sys
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script, training, model = parser.parse_args_and_config(["--config", sys.argv[1]])
rows = load_dataset(script.dataset_name, split=script.dataset_train_split)
trainer = SFTTrainer(model.model_name_or_path, args=training, train_dataset=rows)
batch = next(iter(trainer.get_train_dataloader()))
tensors = {key: value.tolist() for key, value in batch.items() if hasattr(value, "tolist")}
print("BATCH", json.dumps(tensors))
"""


def main() -> int:
    """Print each case; 0 where all are equal."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trl-python", required=True)
    python = arguments.parse_args().trl_python
    different = 0
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model")
        for number, (name, (rows, settings)) in enumerate(CASES.items()):
            config = write_case(Path(directory) / str(number), model, rows, settings)
            theirs, ours = batch_of_trl(python, config), batch_of_drillyard(config)
            equal = sorted(theirs) == sorted(ours)
            different += not equal
            learnt = sum(sum(mask) for _, mask in ours)
            print(
                f"{name}: {len(ours)} documents, {learnt} learnt: {'equal' if equal else 'OTHER'}"
            )
            if not equal:
                print(f"  TRL   {min(theirs)}\n  here  {min(ours)}")
    return int(different > 0)


def write_model(directory: Path) -> Path:
    """A Llama of two layers of width 16 with random weights, and a tokenizer with its template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|pad|>", "<|role|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([turn["content"] for turns in TURNS for turn in turns], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(directory)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(fast), intermediate_size=32, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_case(
    directory: Path, model: Path, rows: list[dict[str, Any]], settings: dict[str, Any]
) -> Path:
    """The rows and the TRL config of a case; the path of the config."""
    (directory / "rows").mkdir(parents=True)
    (directory / "rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model_name_or_path": str(model),
        "dataset_name": str(directory / "rows"),
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": len(rows),
        "max_steps": 1,
        "max_length": 512,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        **settings,
    }
    path = directory / "trl.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def batch_of_trl(python: str, config: Path) -> list[Row]:
    """Documents of TRL's first batch, without padding: tokens, and which are learnt."""
    done = subprocess.run([python, "-c", TRL_SIDE, config], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("BATCH ")]
    if not lines:
        sys.exit(f"{config}: TRL failed:\n{done.stderr[-3000:]}")
    batch = json.loads(lines[-1].removeprefix("BATCH "))
    found: list[Row] = []
    for row, (tokens, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        # Padded rows have a mask; packed ones are one row whose positions begin again.
        positions = batch.get("position_ids", [list(range(len(tokens)))] * (row + 1))[row]
        inside = batch.get("attention_mask", [[1] * len(tokens)] * (row + 1))[row]
        starts = [at for at, position in enumerate(positions) if position == 0] + [len(tokens)]
        for start, end in pairwise(starts):
            kept = [at for at in range(start, end) if inside[at]]
            mask = tuple(labels[at] != -100 and at > start for at in kept)
            found.append((tuple(tokens[at] for at in kept), mask))
    return found


def batch_of_drillyard(config: Path) -> list[Row]:
    """Documents of the first batch of the converted config."""
    from drillyard.config.load import load_run_config
    from drillyard.config.other_trainers import convert
    from drillyard.config.starter import completed, starter, write_starters
    from drillyard.data.mapped_sequences import IGNORED
    from drillyard.data.prepared_data import prepare

    settings = completed(convert("trl", config))
    settings["data"]["cache_directory"] = str(config.parent / "cache")
    run, _ = write_starters(config.parent / "run", starter("run", settings))
    sequences = prepare(load_run_config(run)).train.sources[0]
    batch = sequences.read(range(len(sequences)))
    found: list[Row] = []
    for tokens, labels, documents in zip(
        batch.input_ids, batch.labels, batch.document_ids, strict=True
    ):
        for document in sorted({int(each) for each in documents if each >= 0}):
            at = [place for place, each in enumerate(documents) if each == document]
            learnt = [False] + [bool(labels[place] != IGNORED) for place in at[:-1]]
            found.append((tuple(int(tokens[place]) for place in at), tuple(learnt)))
    return found


if __name__ == "__main__":
    sys.exit(main())
