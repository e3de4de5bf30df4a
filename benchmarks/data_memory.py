"""Private memory while 500 MB are tokenised: a JSON Lines file, and a Parquet file that is a single
row group.

The sum over all processes of Private_Clean and Private_Dirty in /proc/PID/smaps_rollup is sampled
every 50 ms; the highest counts. Pages that processes share (libraries, the page cache) are not
private and are not counted. Wanted: under 1.5 GB.

    python benchmarks/data_memory.py [--megabytes 500]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import sys
from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
source, tokenizer, cache = sys.argv[1:]
prepared = prepare(RunConfig.model_validate({
    "name": "benchmark", "model": {"config": {"architecture": "llama"}, "init": "random"},
    "data": {"source": source, "sequence_length": 2048, "tokenizer": tokenizer, "cache_directory": cache},
    "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
}))
print(*prepared.report.lines())
"""  # noqa: E501


def write_sources(directory: Path, num_bytes: int) -> tuple[Path, Path]:
    """The same documents as JSON Lines and as one Parquet row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(20_000)]
    texts, size = [], 0
    while size < num_bytes:
        texts.append(" ".join(draw.choices(words, k=draw.randint(100, 600))))
        size += len(texts[-1])
    lines, parquet = directory / "text.jsonl", directory / "text.parquet"
    with lines.open("w") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    pq.write_table(
        pa.table({"text": texts}), parquet, row_group_size=len(texts), use_dictionary=False
    )
    assert pq.ParquetFile(parquet).metadata.num_row_groups == 1
    return lines, parquet


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
        for task in threads:
            children += (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def private_mib(pids: list[int]) -> float:
    """Private memory of these processes together; those that have ended count nothing."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(
            int(line.split()[1])
            for line in lines
            if line.startswith(("Private_Clean", "Private_Dirty"))
        )
    return total / 1024


def main() -> None:
    """Measure both files and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=500)
    arguments = parser.parse_args()
    from drillyard.data.tokenizer import _as_pretrained, _train

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sources = write_sources(directory, int(arguments.megabytes * 1e6))
        with sources[0].open() as stream:
            texts = [json.loads(line)["text"] for line, _ in zip(stream, range(500), strict=False)]
        _as_pretrained(_train(8192, iter(texts))).save_pretrained(str(directory / "tokenizer"))
        for source in sources:
            command = [
                sys.executable,
                "-c",
                RUN,
                str(source),
                str(directory / "tokenizer"),
                str(directory / "cache"),
            ]
            begin, peak, most = time.perf_counter(), 0.0, 0
            process = subprocess.Popen(command)
            while process.poll() is None:
                members = family(process.pid)
                peak, most = max(peak, private_mib(members)), max(most, len(members))
                time.sleep(0.05)
            assert process.returncode == 0, process.returncode
            print(
                f"{source.name}: {source.stat().st_size / 1e6:.0f} MB,"
                f" {time.perf_counter() - begin:.0f} s, peak of private memory over {most}"
                f" processes: {peak:.0f} MiB (wanted: under 1,430 MiB = 1.5 GB)"
            )


if __name__ == "__main__":
    main()
