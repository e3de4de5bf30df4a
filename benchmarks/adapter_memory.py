"""Memory of a rank that trains adapters on a base of 1 GB, and of the merge: anonymous resident
memory at its highest.

    python benchmarks/adapter_memory.py

Makes a Llama of 500 million parameters in bf16 with random weights, trains LoRA of rank 16 on all
linear layers on two ranks for four steps, and merges. Printed for each command: the highest RssAnon
of a process (/proc/PID/status), next to its shard of the base + 16 bytes per adapter parameter +
0.3 GB (the goal). A process that only imports torch, peft and transformers is printed too.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}
RANKS = 2
SAMPLE_SECONDS = 0.02
IMPORTS = (
    "import torch, peft, transformers, transformers.models.llama.modeling_llama, time;"
    " time.sleep(1)"
)
MAKE_BASE = """
import json, sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "row": 2, "words": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(sys.argv[2])
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**json.loads(sys.argv[1])), dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2], max_shard_size="200MB")
print(sum(p.numel() for p in model.parameters()))
"""  # noqa: E501


def highest(argv: list[str], mark: str) -> float:
    """Run a command; the highest RssAnon of its processes whose command line has `mark`, in GB."""
    found = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, ValueError):
                    if mark.encode() in (process / "cmdline").read_bytes():
                        # A process that has ended has no such line.
                        lines = (process / "status").read_text().splitlines()
                        found.extend(
                            int(line.split()[1]) for line in lines if line.startswith("RssAnon")
                        )
            time.sleep(SAMPLE_SECONDS)

    thread = threading.Thread(target=watch)
    thread.start()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    ended.set()
    thread.join()
    if done.returncode:
        sys.exit(f"{' '.join(argv[:4])}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return max(found) * 1024 / 1e9


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        base = directory / "base"
        made = subprocess.run(
            [sys.executable, "-c", MAKE_BASE, json.dumps(SIZES), str(base)],
            check=True,
            capture_output=True,
            text=True,
        )
        parameters = int(made.stdout)
        rows = directory / "rows.jsonl"
        rows.write_text(
            "".join(json.dumps({"text": f"row {n} of some words " * 20}) + "\n" for n in range(200))
        )
        settings: dict[str, Any] = {
            "name": "adapters",
            "output": str(directory / "runs"),
            "model": {"id": str(base), "lora": {"rank": 16, "target_modules": "all-linear"}},
            "data": {
                "source": str(rows),
                "sequence_length": 64,
                "cache_directory": str(directory / "cache"),
            },
            "training": {
                "steps": 4,
                "micro_batch_size": 1,
                "precision": "bf16",
                "optimizer": {"learning_rate": 1e-3},
                "activation_checkpointing": "full",
            },
            "logging": {"tensorboard": False},
        }
        config = directory / "run.yaml"
        config.write_text(json.dumps(settings))
        drillyard = [sys.executable, "-m", "drillyard"]
        imported = highest([sys.executable, "-c", IMPORTS], "modeling_llama, time")
        trained = highest(
            [*drillyard, "train", str(config), "--nproc-per-node", str(RANKS)],
            f"{directory}/runs/adapters/run.yaml",
        )
        checkpoint = max((directory / "runs/adapters/checkpoints").glob("step-*"))
        merged = highest(
            [*drillyard, "export", str(checkpoint), str(directory / "merged"), "--merge"], "--merge"
        )
        rank, layers, width, inner = (
            16,
            SIZES["num_hidden_layers"],
            SIZES["hidden_size"],
            SIZES["intermediate_size"],
        )
        adapters = layers * rank * (4 * 2 * width + 3 * (width + inner))
        for name, gigabytes, shards in (
            ("train, a rank", trained, RANKS),
            ("export --merge", merged, 1),
        ):
            bound = (2 * parameters / shards + 16 * adapters) / 1e9 + 0.3
            print(f"{name:15} {gigabytes:.3f} GB of {bound:.3f} GB")
        print(
            f"imports alone   {imported:.3f} GB; base {2 * parameters / 1e9:.3f} GB; {adapters:,}"
            " adapter parameters"
        )


if __name__ == "__main__":
    main()
