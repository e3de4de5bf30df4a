"""How fast logs are read, and in how much memory: generated logs of every kind, one core each.

    taskset -c 0 .venv/bin/python benchmarks/measure_speed.py --megabytes 1000 --steps 1000000

Each kind is read in a process of its own. Printed are MB/s and steps/s of processor time (so that a
busy machine disturbs less; reading is single-threaded, and the log is in the kernel's cache), and
the resident memory at its peak. Goals: 100 MB/s for a realistic log (one line in 20 is a step,
behind a prefix); 100,000 steps/s for logs of only step lines, DLLogger and metrics.jsonl among
them; 60 MB/s for trainer_state.json; under 200 MB to a million steps.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

_START = datetime(2026, 1, 1, tzinfo=UTC)


def _stamp(second: float) -> str:
    return (_START + timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%S.%f")


def _perflogger(step: int, draw: random.Random) -> str:
    seconds = 0.5 + draw.random() / 100
    rates = f"TFLOPs/s/GPU: {500 / seconds:.1f} | Tokens/s/GPU: {9000 / seconds:.0f}"
    return f"Step: {step} | Time: {seconds:.4f}s | {rates} | Loss: {2 + draw.random():.4f}"


def _maxtext(step: int, draw: random.Random) -> str:
    return (
        f"completed step: {step}, seconds: {0.5 + draw.random() / 100:.3f}, TFLOP/s/device:"
        f" {draw.random() * 500:.3f}, Tokens/s/device: {draw.random() * 9000:.3f}, total_weights:"
        f" 4194304, loss: {2 + draw.random():.3f}"
    )


def _torchtitan(step: int, draw: random.Random) -> str:
    stamp = _stamp(step * 0.5)[:23].replace("T", " ").replace(".", ",")
    return (
        f"[titan] {stamp} - root - INFO - step: {step:2}  loss: {2 + draw.random():8.5f} "
        f" grad_norm: {draw.random():7.4f}  memory: {45 + draw.random():5.2f}GiB(57.01%)  tps:"
        f" {5000 + draw.randrange(999):,}  tflops: {draw.random() * 400:,.2f}  mfu:"
        f" {draw.random() * 50:.2f}%"
    )


def _megatron(step: int, draw: random.Random) -> str:
    return (
        f" [{_stamp(step * 0.5).replace('T', ' ')}] iteration {step:8}/ 9000000 | consumed samples:"
        f" {step * 128:12} | elapsed time per iteration (ms): {500 + draw.random() * 5:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {draw.random() * 900:.1f} | learning rate:"
        f" {draw.random():.6E} | global batch size: {128:5} | lm loss: {2 + draw.random():.6E} |"
        f" loss scale: 1.0 | grad norm: {draw.random():.3f} | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def _nemo2(step: int, draw: random.Random) -> str:
    return (
        f"Training epoch 0, iteration {step}/9000000 | lr: {draw.random():.3e} | global_batch_size:"
        f" 512 | global_step: {step} | reduced_train_loss: {2 + draw.random():.4g} |"
        f" train_step_timing in s: {0.5 + draw.random():.4g} | consumed_samples: {step * 512}"
    )


def _nemo1(step: int, draw: random.Random) -> str:
    clock = f"{step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}"
    return (
        f"Epoch 0: : 7%|#6        | {step}/9000000 [{clock}<00:00,"
        f" reduced_train_loss={2 + draw.random():.3g}, global_step={step - 1.0:.3g},"
        f" consumed_samples={step * 512.0:.3g}, train_step_timing in s={0.5 + draw.random():.3g}]"
    )


def _dllogger(step: int, draw: random.Random) -> str:
    moment = _START + timedelta(seconds=step * 0.5)
    data = {
        "reduced_train_loss": 2 + draw.random(),
        "lr": draw.random(),
        "global_step": step,
        "consumed_samples": step * 512,
        "train_backward_timing in s": draw.random() / 1e5,
        "grad_norm": draw.random(),
        "train_step_timing in s": 0.5 + draw.random(),
        "epoch": 0,
    }
    return "DLLL " + json.dumps(
        {
            "timestamp": f"{moment.timestamp():.6f}",
            "datetime": str(moment),
            "elapsedtime": f"{step * 0.5:.6f}",
            "type": "LOG",
            "step": step,
            "data": data,
        }
    )


def _metrics(step: int, draw: random.Random) -> str:
    seconds = 0.5 + draw.random() / 100
    record = {
        "time": _stamp(step * 0.5) + "Z",
        "round": 0,
        "step": step,
        "loss": 2 + draw.random(),
        "learning_rate": draw.random(),
        "grad_norm": draw.random(),
        "step_seconds": seconds,
        "tokens": 524288,
        "valid_tokens": 524288,
        "num_gpus": 16,
        "data_seconds": draw.random() / 1e3,
        "compile_seconds": None,
        "memory_gib": 45.5,
        "skipped_steps": 0,
        "window_steps": 1,
        "tokens_per_second_per_gpu": 32768 / seconds,
        "tflops_per_gpu": 400 / seconds,
        "mfu": 0.2 / seconds,
        "formula": "6N",
    }
    return json.dumps(record)


def _hf(step: int, draw: random.Random) -> str:
    return str(
        {
            "loss": 2 + draw.random(),
            "grad_norm": draw.random(),
            "learning_rate": draw.random(),
            "epoch": step / 1e6,
        }
    )


LINES: dict[str, Callable[[int, random.Random], str]] = {
    "perflogger": _perflogger,
    "maxtext": _maxtext,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "nemo2": _nemo2,
    "nemo1": _nemo1,
    "dllogger": _dllogger,
    "metrics.jsonl": _metrics,
    "hf": _hf,
}
_NOISE = [
    (
        "NCCL INFO Channel 07/0 : 3[3] -> 2[2] via P2P/CUMEM/read comm 0x55d0c6d3b0a0 nRanks 16"
        " busId 1a0"
    ),
    (
        "WARNING:root:the dataset index 17 was rebuilt; took 0.25 s, 1024 documents, epoch 3,"
        " shuffle seed 1234"
    ),
    (
        "/usr/lib/python3/site-packages/torch/utils/checkpoint.py:85: UserWarning: None of the"
        " inputs needs a gradient"
    ),
    (
        "INFO loader: prefetched shard 00017-of-01024 (128 MiB) in 1.23 s; queue depth 4; waiting"
        " for the next batch"
    ),
]


def _only(make: Callable[[int, random.Random], str], steps: int) -> Iterator[str]:
    draw = random.Random(0)
    for step in range(1, steps + 1):
        yield make(step, draw) + "\n"


def _redrawn(make: Callable[[int, random.Random], str], steps: int) -> Iterator[str]:
    """A progress bar, redrawn for each step, forty to a line."""
    draw = random.Random(0)
    for step in range(1, steps + 1):
        yield make(step, draw) + ("\r" if step % 40 else "\n")


def _pods(make: Callable[[int, random.Random], str], steps: int) -> Iterator[str]:
    """Lines of four pods behind kubectl's prefix and time stamps."""
    draw = random.Random(0)
    for step in range(1, steps + 1):
        yield f"[pod/job-0-{step % 4}/main] {_stamp(step * 0.5)}123Z {make(step, draw)}\n"


def _realistic(make: Callable[[int, random.Random], str], steps: int) -> Iterator[str]:
    """A step line behind kubectl's time stamps and srun's label, then 19 other lines of 4 tasks."""
    draw = random.Random(0)
    for step in range(1, steps + 1):
        yield f"{_stamp(step * 0.5)}123Z 0: {make(step, draw)}\n"
        for index in range(19):
            yield f"{_stamp(step * 0.5 + index / 100)}123Z {index % 4}: {draw.choice(_NOISE)}\n"


def _trainer_state(steps: int) -> Iterator[str]:
    draw = random.Random(0)
    yield f'{{\n  "best_metric": null,\n  "global_step": {steps},\n  "log_history": [\n'
    for step in range(1, steps + 1):
        entry = {
            "epoch": step / 1e6,
            "grad_norm": draw.random(),
            "learning_rate": draw.random(),
            "loss": 2 + draw.random(),
            "step": step,
        }
        yield (
            "    "
            + json.dumps(entry, indent=2).replace("\n", "\n    ")
            + (",\n" if step < steps else "\n")
        )
    yield f'  ],\n  "logging_steps": 1,\n  "max_steps": {steps}\n}}\n'


_READ = """
import resource, sys, time
from drillyard.measurement.read_logs import read_logs
with open(sys.argv[1], "rb") as file:
    while file.read(1 << 20):
        pass  # From the disk into the kernel's cache, which costs processor time too.
begin = time.process_time()
log = read_logs([sys.argv[1]])
took = time.process_time() - begin
print(took, len(log.steps), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, log.folding_error)
"""  # noqa: E501


def main() -> None:
    """Generate, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=float, default=50, help="size of the realistic log and of the JSON ones"
    )
    parser.add_argument(
        "--steps", type=int, default=100_000, help="lines of the logs of only step lines"
    )
    parser.add_argument("--kind", default="", help="only kinds whose name contains this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name, lines in _kinds(arguments.megabytes, arguments.steps):
            if arguments.kind not in name:
                continue
            path = Path(directory) / (
                "trainer_state.json" if name == "trainer_state" else "run.log"
            )
            with path.open("w") as file:
                file.writelines(lines)
            command = [sys.executable, "-c", _READ, str(path)]
            took, steps, memory, error = map(
                float, subprocess.check_output(command, text=True).split()
            )
            size = path.stat().st_size / 1e6
            print(
                f"{name:<28}{size:9.1f} MB {took:8.2f} s {size / took:8.1f} MB/s"
                f" {steps / took:12,.0f} steps/s{memory:8.0f} MB resident"
                + (f"  folded, within {error:.2%}" if error else ""),
                flush=True,
            )
            path.unlink()


def _kinds(megabytes: float, steps: int) -> Iterator[tuple[str, Iterator[str]]]:
    for name in ("perflogger", "megatron", "torchtitan"):
        yield f"realistic {name}", _realistic(LINES[name], round(megabytes * 1e6 / 2950))
    for name in ("dllogger", "metrics.jsonl"):
        yield name, _only(LINES[name], round(megabytes * 1e6 / 450))
    yield "trainer_state", _trainer_state(round(megabytes * 1e6 / 210))
    for name in ("perflogger", "maxtext", "torchtitan", "megatron", "nemo2", "hf"):
        yield f"only steps {name}", _only(LINES[name], steps)
    yield "only steps megatron, 4 pods", _pods(LINES["megatron"], steps)
    yield "only steps nemo1, redrawn", _redrawn(LINES["nemo1"], steps)


if __name__ == "__main__":
    main()
