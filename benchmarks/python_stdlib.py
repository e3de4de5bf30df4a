"""Bits per byte on held-out Python source against what `xz -9e` needs for the same files as one
archive.

    python benchmarks/python_stdlib.py [--output runs] [--set training.steps=...]

Trains recipes/python-stdlib.yaml on two ranks, reads bits per byte from its summary (summed nats /
ln 2 / UTF-8 bytes, every held-out byte once), packs the held-out files into one tar and compresses
that with xz at preset 9e.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from drillyard.data.builtin import documents

ROOT = Path(__file__).resolve().parents[1]


def archive_bits_per_byte() -> tuple[float, int]:
    """Bits of the xz archive per byte of the held-out text, and the bytes of that text."""
    buffer, text_bytes = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for row in documents("python-stdlib", {}, "files"):
            data = row["text"].encode("utf-8")
            member = tarfile.TarInfo(row["path"])
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            text_bytes += len(data)
    packed = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    return 8 * len(packed) / text_bytes, text_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "drillyard", "train", str(ROOT / "recipes/python-stdlib.yaml")]
    command += ["--nproc-per-node", "2", "--console", "text", "--set", f"output={arguments.output}"]
    for override in arguments.overrides:
        command += ["--set", override]
    started = time.monotonic()
    subprocess.run(command, check=True)
    minutes = (time.monotonic() - started) / 60
    events = (Path(arguments.output) / "python-stdlib" / "events.jsonl").read_text().splitlines()
    results = [event for event in map(json.loads, events) if event["event"] == "evaluation"][-1][
        "results"
    ]
    model = next(iter(results.values()))["bits_per_byte"]
    archive, text_bytes = archive_bits_per_byte()
    print(f"held-out text: {text_bytes:,} bytes; training took {minutes:.1f} minutes on two ranks")
    print(
        f"model {model:.4f} bits per byte, xz -9e {archive:.4f}: ratio {model / archive:.3f}"
        " (required 0.85, aim 0.75)"
    )


if __name__ == "__main__":
    main()
