"""First light on a GPU: what only a GPU can show, as rows of one table, each a process with its own
time limit.

    python3 benchmarks/gpu/run_all.py --minutes 9 --out DIR

Nothing is installed and no network is needed: `src` is put on the path, and wheels.txt lists what a
plain PyTorch image lacks. Rows run in the order of ROWS: correctness before speed. A row that
fails, hangs or runs out of memory is a line of the table and stops no other. DIR/results.json and
DIR/table.md are written after every row, and a later call with the same DIR continues: rows without
a result come first, then those that did not pass, until the minutes are over. DIR/logs has each
row's output. Exit code 0: every row has passed; 1: some have not, yet; 2: nothing can run.

`--device cpu --tiny` runs the same lines in smoke-test sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHORTEST_SECONDS = 20
"""A row is not started with less than this left."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a function of a module in this directory, its arguments, and its time
    limit."""

    name: str
    function: str
    limit_seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)


def _architecture_rows() -> list[Row]:
    names = (
        ("llama", "qwen3", "gemma3_text", "gpt2"),
        ("qwen2", "mistral", "smollm3", "phi3"),
        ("gemma2", "olmo2", "olmo3", "granite"),
        ("cohere", "cohere2", "mixtral", "qwen3_moe"),
    )
    return [
        Row(
            f"3 compiled steps: {', '.join(four)}",
            "training:architectures",
            150,
            {"names": list(four)},
        )
        for four in names
    ]


def _speed_rows(shape: str, sequence_length: int, micro_batch: int, recompute: str) -> list[Row]:
    what = f"{shape} at {sequence_length:,}"
    common = {
        "shape": shape,
        "sequence_length": sequence_length,
        "micro_batch": micro_batch,
    }
    equal = common | {"recompute": recompute}
    rows = [
        Row(f"{what}: trainer, checkpointing {recompute}", "speed:ours", 240, equal),
        Row(
            f"{what}: trainer with FSDP2, checkpointing {recompute}",
            "speed:ours",
            240,
            equal | {"fsdp2": True},
        ),
        Row(f"{what}: bare loop", "speed:bare_loop", 240, equal),
        Row(f"{what}: HF Trainer, Liger", "speed:hf_trainer", 240, equal | {"compiled": False}),
        Row(
            f"{what}: HF Trainer, Liger, compiled",
            "speed:hf_trainer",
            300,
            equal | {"compiled": True},
        ),
        Row(f"{what}: torchtitan", "torchtitan_step:torchtitan", 300, equal),
        Row(
            f"{what}: trainer, checkpointing auto",
            "speed:ours",
            240,
            common | {"recompute": "auto"},
        ),
    ]
    if recompute != "none":
        # The setting that `auto` is compared with.
        name = f"{what}: HF Trainer, Liger, no checkpointing"
        kept = common | {"recompute": "none"}
        rows.append(Row(name, "speed:hf_trainer", 240, kept | {"compiled": False}))
        rows.append(Row(f"{name}, compiled", "speed:hf_trainer", 300, kept | {"compiled": True}))
        name = f"{what}: torchtitan, no checkpointing"
        rows.append(Row(name, "torchtitan_step:torchtitan", 300, kept))
    return rows


def _adapter_rows() -> list[Row]:
    what = "8B at 4,096, LoRA"
    lora = {"rank": 64, "alpha": 128.0, "target_modules": "all-linear"}
    common = {"shape": "8B", "sequence_length": 4096, "micro_batch": 2, "lora": lora}
    equal, nf4 = common | {"recompute": "full"}, {"quantization": "nf4"}
    return [
        Row(f"{what}: trainer, checkpointing full", "speed:ours", 240, equal),
        Row(
            f"{what}: trainer with FSDP2, checkpointing full",
            "speed:ours",
            240,
            equal | {"fsdp2": True},
        ),
        Row(
            f"{what}: HF Trainer, peft, Liger", "speed:hf_trainer", 240, equal | {"compiled": False}
        ),
        Row(
            f"{what}: trainer, checkpointing auto",
            "speed:ours",
            240,
            common | {"recompute": "auto"},
        ),
        Row(f"{what} on nf4: trainer, checkpointing full", "speed:ours", 240, equal | nf4),
        Row(
            f"{what} on nf4: HF Trainer, peft, bitsandbytes, Liger",
            "speed:hf_trainer",
            240,
            equal | nf4 | {"compiled": False},
        ),
        Row(
            f"{what} on nf4: trainer, checkpointing auto",
            "speed:ours",
            240,
            common | nf4 | {"recompute": "auto"},
        ),
    ]


def _technique_rows() -> list[Row]:
    """Each technique on and off beside its neighbour, and lengths and ranks that others publish."""
    three = {"shape": "3B", "sequence_length": 4096, "micro_batch": 2}
    eight = {"shape": "8B", "micro_batch": 2, "recompute": "auto"}
    rank_16 = {"rank": 16, "alpha": 32.0, "target_modules": "all-linear"}
    return [
        Row(
            "3B at 4,096: bare loop, no checkpointing",
            "speed:bare_loop",
            240,
            three | {"recompute": "none"},
        ),
        Row(
            "3B at 4,096: trainer, not compiled",
            "speed:ours",
            240,
            three | {"recompute": "auto", "compiled": False},
        ),
        *(
            Row(
                f"3B at 4,096: trainer, checkpointing {mode}",
                "speed:ours",
                240,
                three | {"recompute": mode, "compiled": True},
            )
            for mode in ("memory-budget", "selective")
        ),
        Row(
            "3B at 4,096: trainer, torch's AdamW",
            "speed:ours",
            240,
            three | {"recompute": "auto", "without": "one-pass optimizer"},
        ),
        Row(
            "3B at 4,096: trainer, moments in 8 bits",
            "speed:ours",
            240,
            three | {"recompute": "auto", "optimizer": "adamw-8bit"},
        ),
        *(
            Row(
                f"3B at 4,096: trainer, fp8, {scaling}",
                "speed:ours",
                240,
                three | {"recompute": "auto", "fp8_scaling": scaling},
            )
            for scaling in ("tensorwise", "rowwise")
        ),
        Row(
            "8B at 4,096, LoRA r=16: trainer, fp8",
            "speed:ours",
            240,
            eight | {"sequence_length": 4096, "lora": rank_16, "fp8_scaling": "tensorwise"},
        ),
        Row(
            "3B at 4,096: trainer, gradients widened",
            "speed:ours",
            240,
            three | {"recompute": "auto", "without": "narrow gradients"},
        ),
        Row(
            "3B at 4,096: trainer, head's gradient summed by autograd",
            "speed:ours",
            240,
            three | {"recompute": "auto", "without": "summed head gradient"},
        ),
        Row(
            "8B at 4,096, LoRA r=16: trainer, checkpointing auto",
            "speed:ours",
            240,
            eight | {"sequence_length": 4096, "lora": rank_16},
        ),
        Row(
            "8B at 4,096, LoRA r=16: trainer, adapters as peft computes them",
            "speed:ours",
            240,
            eight
            | {"sequence_length": 4096, "lora": rank_16, "without": "shared adapter products"},
        ),
        Row(
            "8B at 32,768, LoRA r=16: trainer, checkpointing auto",
            "speed:ours",
            300,
            eight | {"sequence_length": 32768, "micro_batch": 1, "lora": rank_16},
        ),
    ]


def _real_data_rows() -> list[Row]:
    sources = (("python-stdlib", "text"), ("text-to-sql", "text-to-sql"))
    small = {"shape": "1B", "sequence_length": 2048, "micro_batch": 8}
    return [
        *(
            Row(
                f"1B at 2,048: {name}, packed over padded",
                "real_data:packed_over_padded",
                300,
                small | {"source": f"builtin:{name}", "format": format},
            )
            for name, format in sources
        ),
        Row(
            "3B at 4,096: stall by an asynchronous save",
            "real_data:stall_of_a_save",
            300,
            {"shape": "3B", "sequence_length": 4096, "micro_batch": 2},
        ),
    ]


def _memory_rows() -> list[Row]:
    setups = (
        "sdpa",
        "varlen",
        "varlen, full checkpointing",
        "varlen, selective checkpointing",
        "varlen, compiled",
        "varlen, compiled, full checkpointing",
        "varlen, accumulation",
        "sdpa, fp32",
        "varlen, LoRA",
        "varlen, LoRA, full checkpointing",
        "varlen, LoRA, compiled",
        "varlen, LoRA on nf4",
        "varlen, LoRA on nf4, full checkpointing",
        "varlen, LoRA on nf4, compiled",
        "varlen, wide vocabulary",
    )
    return [
        Row(f"memory: {setup}", "memory:against_estimate", 90, {"setup": setup}) for setup in setups
    ]


ROWS = [
    Row("versions, bf16 product, copy", "machine:rates", 60),
    Row("acceptance of one node", "acceptance:one_node", 240),
    Row("varlen attention against fp64", "attention_op:against_fp64", 90),
    Row("head's gradient against fp64", "head_gradient:against_fp64", 60),
    Row("fp32 losses as on the CPU", "training:as_on_the_cpu", 90),
    *(
        Row(
            f"kernel {kernel}: compiled or not, each checkpointing",
            "training:kernel",
            200,
            {"attention": kernel},
        )
        for kernel in ("varlen", "sdpa", "flex", "eager")
    ),
    *(
        Row(
            f"adapters {variant}: compiled or not, each checkpointing",
            "training:kernel",
            200,
            {"attention": "varlen", "variant": variant},
        )
        for variant in ("lora", "dora")
    ),
    Row("nf4: unpacked as on the CPU, and how fast", "nf4_weights:unpacked", 90),
    Row(
        "adapters on nf4: compiled or not, each checkpointing",
        "training:kernel",
        200,
        {"attention": "varlen", "variant": "lora", "quantization": "nf4"},
    ),
    *_architecture_rows(),
    Row("steps without waiting for the device", "training:without_waiting", 120),
    Row("the same bits twice; save, kill, resume", "resuming:same_bits", 240),
    *_speed_rows("3B", 4096, 2, "full"),
    *_speed_rows("1B", 2048, 8, "none"),
    *_adapter_rows(),
    *_technique_rows(),
    *_real_data_rows(),
    *_memory_rows(),
]


def main(rows: list[Row] = ROWS) -> int:
    """Run the rows that the arguments select; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start no row and end the running one after this"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="directory of the results; a run continues from the rows that it has",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that show only that the rows run"
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="rows whose name has this in it; repeatable"
    )
    arguments = parser.parse_args()
    chosen = [row for row in rows if any(text in row.name for text in arguments.only or [""])]
    sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(HERE)]
    if not chosen:
        print(
            "--only: no row has this in its name; the rows:",
            *(row.name for row in rows),
            sep="\n  ",
        )
        return 2
    if not say_what_is_missing():
        return 2
    try:
        results = Results(arguments.out, device=arguments.device, tiny=arguments.tiny)
    except ValueError as error:
        print(error)
        return 2
    prepare_environment(tiny=arguments.tiny)
    run_rows(chosen, results, time.monotonic() + 60 * arguments.minutes)
    passed = [row for row in chosen if results.status(row) == "passed"]
    print(f"{len(passed)} of {len(chosen)} rows have passed: {results.table_path}")
    return 0 if len(passed) == len(chosen) else 1


def say_what_is_missing() -> bool:
    """Print the missing packages of wheels.txt; False when a row needs one for more than a
    comparison."""
    required, optional = [], []
    for line in (HERE / "wheels.txt").read_text().splitlines():
        pin, _, comment = line.partition("#")
        name = pin.strip().partition("==")[0]
        try:
            if name:
                metadata.version(name)
        except metadata.PackageNotFoundError:
            (optional if comment else required).append(pin.strip())
    for pins, consequence in (
        (required, "nothing can run"),
        (optional, "the rows that need them will fail"),
    ):
        if pins:
            print(
                f"not installed: {', '.join(pins)}: {consequence}; benchmarks/gpu/wheels.txt says"
                " how to bring them"
            )
    return not required


def prepare_environment(*, tiny: bool) -> None:
    """Set the environment that rows and their commands inherit."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*sys.path[:3], os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # HF Trainer splits batches over all the GPUs that it sees.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if tiny:
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run_rows(rows: list[Row], results: Results, end: float) -> None:
    """Run the rows that have not passed, those without a result first, until the clock is at
    `end`."""
    # A forked process cannot use CUDA if an import of its parent has looked for it; on a CPU forks
    # save the imports.
    context: Any = multiprocessing.get_context("forkserver" if results.device == "cpu" else "spawn")
    context.set_forkserver_preload(["preloaded"])
    to_run = [row for row in rows if results.status(row) != "passed"]
    for row in sorted(to_run, key=lambda row: results.status(row) is not None):
        left = end - time.monotonic()
        if left < SHORTEST_SECONDS:
            print("the minutes are over; call again with the same --out to go on")
            return
        print(f"{row.name} ...", end=" ", flush=True)
        result = run_row(context, row, results, left)
        if result is None:
            print("not finished: the minutes are over; call again with the same --out to go on")
            return
        results.keep(row, result)
        print(
            f"{result['status']} ({result['seconds']:.0f}"
            f" s){': ' + result['error'] if 'error' in result else ''}"
        )


def run_row(context: Any, row: Row, results: Results, left: float) -> dict[str, Any] | None:
    """The result of a row, in a process of its own; None where `left` seconds end before its limit
    does."""
    log = results.directory / "logs" / (file_name(row.name) + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    limit = min(row.limit_seconds, left)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = (results.device, results.tiny, folder)
        process = context.Process(
            target=in_its_process, args=(row.function, row.arguments, place, str(log))
        )
        process.start()
        process.join(limit)
        ended_itself = not process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        written = Path(folder, "result.json")
        found: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {}
    found["seconds"] = time.monotonic() - started
    found["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    if "status" in found:
        return found
    if ended_itself:
        return {
            **found,
            "status": "failed",
            "error": f"the process ended with code {process.exitcode}: {log}",
        }
    if limit < row.limit_seconds:
        return None
    return {**found, "status": "timed out", "error": f"not done after {limit:.0f} s: {log}"}


def in_its_process(
    function: str, arguments: dict[str, Any], place: tuple[str, bool, str], log: str
) -> None:
    """Call a row's function and write its figures, or the error, into its directory."""
    os.setpgrp()  # kill the process group, children included
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    device, tiny, folder = place
    try:
        setting = importlib.import_module("setups").Setting(device, tiny, Path(folder))
        module, _, name = function.partition(":")
        figures = getattr(importlib.import_module(module), name)(setting, **arguments)
        result = {"status": "passed", "figures": figures}
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        result = {"status": "failed", "error": f"{type(error).__name__}: {lines[0]}"[:1000]}
    Path(folder, "result.json").write_text(json.dumps(result, default=float))


def file_name(name: str) -> str:
    """A row's name as a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


class Results:
    """Results by row, kept in DIR/results.json and shown in DIR/table.md."""

    def __init__(self, directory: Path, *, device: str, tiny: bool) -> None:
        """Open `directory` with the results of earlier calls.

        ValueError if it cannot be made, or has other results than those of this program and device.
        """
        self.directory, self.device, self.tiny = directory, device, tiny
        self.path, self.table_path = directory / "results.json", directory / "table.md"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                older = json.loads(self.path.read_text())
                of_device = (older["device"], older["tiny"])
                self.rows = dict(older["rows"])
            except (OSError, ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path} has no results of this program: give another --out"
                ) from None
            if of_device != (device, tiny):
                was = f"--device {older['device']}{' --tiny' if older['tiny'] else ''}"
                raise ValueError(f"{self.path} has results of {was}: give another --out")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{directory}: no directory can be made there ({error.strerror}): give another"
                " --out"
            ) from None

    def status(self, row: Row) -> str | None:
        """`passed`, `failed` or `timed out`; None for a row that has not run."""
        return self.rows.get(row.name, {}).get("status")

    def keep(self, row: Row, result: dict[str, Any]) -> None:
        """Add a row's result and write both files."""
        self.rows[row.name] = result
        order = {other.name: number for number, other in enumerate(ROWS)}
        self.rows = dict(sorted(self.rows.items(), key=lambda item: order.get(item[0], len(order))))
        document = {"device": self.device, "tiny": self.tiny, "rows": self.rows}
        self._write(self.path, json.dumps(document, indent=1) + "\n")
        self._write(self.table_path, self.table())

    def table(self) -> str:
        """All results as a Markdown table."""
        lines = [
            (
                name,
                result["status"],
                f"{result['seconds']:.0f}",
                result.get("error") or in_words(result["figures"]),
            )
            for name, result in self.rows.items()
        ]
        head = [("row", "result", "seconds", "figures"), ("---",) * 4]
        cells = [
            [cell.replace("|", "/").replace("\n", " ") for cell in line] for line in (*head, *lines)
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(path.name + ".new")
        draft.write_text(text)
        draft.replace(path)


def in_words(figures: dict[str, Any]) -> str:
    """Figures as `name value; name value`."""
    return "; ".join(
        f"{name.replace('_', ' ')} {_figure(value)}" for name, value in figures.items()
    )


def _figure(value: Any) -> str:
    if isinstance(value, bool | str | None):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
