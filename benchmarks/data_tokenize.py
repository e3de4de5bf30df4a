"""Tokenise and pack 50 MB of text: Drillyard's `prepare` against `datasets.map` in its best
setting, on the same cores.

Both read the same documents with the same tokenizer, a byte-level BPE of 8,192 entries, and both
give sequences of 1,024 tokens. `datasets.map` tokenises and groups in one batched pass (concatenate
and cut, no document boundaries kept, no loss mask), with every core as a process and with the
tokenizer's own threads; the faster of the two is compared. Its data set is in Arrow already and
that conversion is not counted; `prepare` starts from the JSON Lines file and makes a verified
cache. Runs alternate; medians of --repeats.

    python benchmarks/data_tokenize.py [--megabytes 50] [--repeats 5]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drillyard.config.run import RunConfig
from drillyard.data import builtin
from drillyard.data.encoding_pool import available_cores
from drillyard.data.prepared_data import prepare

SEQUENCE_LENGTH = 1024


def documents(num_bytes: int) -> Iterator[str]:
    """Source files of the standard library, cut into documents of some kilobytes, each time with
    different cuts."""
    texts = [row["text"] for row in builtin.documents("python-stdlib", {}, part="train")]
    size = 0
    for turn in itertools.count():
        step = 2000 + 531 * turn
        for text in texts:
            for begin in range(0, len(text), step):
                document = text[begin : begin + step]
                size += len(document)
                yield document
                if size >= num_bytes:
                    return


def run_config(source: Path, tokenizer: Any, cache: Path) -> RunConfig:
    """A run config of which only the data matter."""
    data = {
        "source": str(source),
        "sequence_length": SEQUENCE_LENGTH,
        "tokenizer": tokenizer,
        "cache_directory": str(cache),
    }
    return RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": data,
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
        }
    )


def drillyard_seconds(source: Path, tokenizer: Path, scratch: Path) -> tuple[float, int]:
    """Seconds of a cold `prepare`, and the tokens in its sequences."""
    cache = scratch / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    begin = time.perf_counter()
    prepared = prepare(run_config(source, str(tokenizer), cache))
    return time.perf_counter() - begin, sum(
        part["tokens"] for part in prepared.report.parts.values()
    )


def datasets_map(
    dataset: Any, tokenizer: Any, num_proc: int | None, scratch: Path
) -> tuple[float, int]:
    """Seconds of one `datasets.map` that tokenises and groups, and the tokens in its sequences."""
    end = tokenizer.eos_token_id

    def tokenise_and_group(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
        flat = list(itertools.chain.from_iterable([end, *document, end] for document in ids))
        return {
            "input_ids": [
                flat[i : i + SEQUENCE_LENGTH] for i in range(0, len(flat), SEQUENCE_LENGTH)
            ]
        }

    target = scratch / "map"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if num_proc else "true"
    begin = time.perf_counter()
    mapped = dataset.map(
        tokenise_and_group,
        batched=True,
        batch_size=1000,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        load_from_cache_file=False,
        cache_file_name=str(target / "mapped.arrow"),
    )
    seconds = time.perf_counter() - begin
    return seconds, sum(
        len(ids) for ids in mapped.with_format("numpy").iter(1) for ids in ids["input_ids"]
    )


def main() -> None:
    """Run and print one line per run, then the medians."""
    import datasets

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    cores = available_cores()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        source = scratch / "text.jsonl"
        with source.open("w") as stream:
            stream.writelines(
                json.dumps({"text": text}) + "\n"
                for text in documents(int(arguments.megabytes * 1e6))
            )
        trained = prepare(
            run_config(source, {"train": "bpe", "vocab_size": 8192}, scratch / "first")
        ).tokenizer
        trained.save_pretrained(str(scratch / "tokenizer"))
        dataset = datasets.load_dataset(
            "json", data_files=str(source), split="train", cache_dir=str(scratch / "arrow")
        )
        settings = {f"{cores} processes": cores, "threads of the tokenizer": None}
        trial = {
            name: datasets_map(dataset, trained, num_proc, scratch)[0]
            for name, num_proc in settings.items()
        }
        best = min(trial, key=lambda name: trial[name])
        print(
            f"{source.stat().st_size / 1e6:.0f} MB, {cores} cores; datasets.map: {trial}; opponent:"
            f" {best}"
        )
        ours, theirs = [], []
        for number in range(arguments.repeats):
            seconds, tokens = drillyard_seconds(source, scratch / "tokenizer", scratch)
            ours.append(tokens / seconds)
            seconds, tokens = datasets_map(dataset, trained, settings[best], scratch)
            theirs.append(tokens / seconds)
            print(
                f"run {number + 1}: drillyard {ours[-1]:,.0f} tokens/s, datasets.map"
                f" {theirs[-1]:,.0f} tokens/s"
            )
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(
            f"medians: drillyard {statistics.median(ours):,.0f}, datasets.map"
            f" {statistics.median(theirs):,.0f} tokens/s"
        )
        print(f"ratio of medians: {ratio:.2f} (wanted: at least 1.2)")


if __name__ == "__main__":
    main()
