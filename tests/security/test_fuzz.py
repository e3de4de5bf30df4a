"""Text of anybody, made by hypothesis: whatever a file or a line holds, the answer is a result or a
UserError.

`make unit` tries the same few dozen inputs each time; `make fuzz` tries EXAMPLES (2,000) new ones
of each kind. Damage to good configs is in tests/unit/config/test_fuzz.py, predicted SQL in
tests/unit/evaluation/test_sql_scoring.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drillyard.cli.main import main
from drillyard.config.load import load_cluster_config, load_launch_config, load_run_config
from drillyard.errors import UserError
from drillyard.launch.agent.exit_report import attempt_failure
from drillyard.launch.agent.protocol import Connection, ConnectionLost, seal
from drillyard.launch.agent.state_file import last_state
from drillyard.launch.run_status import failure_of
from drillyard.measurement.formats import BUILT_IN
from drillyard.measurement.formats.log_format import TextFormat
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.reporting.log_content import measured_content
from drillyard.reporting.page import render
from drillyard.training.checkpoint import manifest

TEXT_FORMATS = [kind for kind in BUILT_IN if issubclass(kind, TextFormat)]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def fuzz(examples: int) -> Callable[[Any], Any]:
    """`examples` inputs, always the same ones; or as many new ones as FUZZ_EXAMPLES says."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 10**6, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320]
)
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    ODD_NUMBERS,
    st.sampled_from(
        [
            "",
            "x",
            "nan",
            "-Infinity",
            "2025-01-01T00:00:00.000000Z",
            "2025-13-45T99:00:00Z",
            "\udcff",
            "\0",
        ]
    ),
    st.sampled_from([[], [[]], {}, [1, "a", None], {"a": {"b": 1}}, {"loss": 1.0}]),
)

# Logs: fragments of every format's lines, put together in any order.

PREFIXES = [
    b"",
    b"0: ",
    b"[rank1]: ",
    b"[default0]:",
    b"[1,0]<stdout>:",
    b"(w, rank=1, pid=2) ",
    b"[pod/a-0/b] ",
    b"a/0 ",
]
STAMPS = [
    b"",
    b"2025-01-01T12:00:00.1Z ",
    b"[2025-13-01 12:00:00,123] ",
    b"I0230 12:00:00.1 ",
    b"1735732800.1 ",
]
LINES = [
    (
        b"[2026-08-01 12:00:00.123456] iteration       10/     100 | consumed samples:         1280"
        b" | elapsed time per iteration (ms): 14530.1 | throughput per GPU (TFLOP/s/GPU): 954.0 |"
        b" learning rate: 1.5E-06 | global batch size: 128 | lm loss: 1.103E+01 | number of nan"
        b" iterations:   0 |"
    ),
    (
        b"step: 3  loss: 1.2  grad_norm: 0.1  memory: 1.00GiB(1.00%)  tps: 1,000  tflops: 9.1  mfu:"
        b" 1.00%"
    ),
    (
        b"Step 2 | loss:1.8745 lr:2e-05 tokens_per_second_per_gpu:405.04 peak_memory_alloc:11.2"
        b" grad_norm:3.1"
    ),
    b"1|2|Loss: 1.8745:   3%|3 | 2/65 [00:05<02:40,  2.5s/it]",
    (
        b"completed step: 11, seconds: 28.294, TFLOP/s/device: 1520.276, Tokens/s/device: 579.059,"
        b" loss: 13.652"
    ),
    b"Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620",
    (
        b"Training epoch 1, iteration 10/999 | lr: 4.498e-06 | global_batch_size: 512 |"
        b" global_step: 29 | reduced_train_loss: 11.03 | train_step_timing in s: 46.84 |"
        b" consumed_samples: 15360"
    ),
    (
        b"Epoch 0: : 100%|##| 2000/2000 [43:24:54<00:00, reduced_train_loss=0.139,"
        b" global_step=2e+3, consumed_samples=2.56e+5, train_step_timing in s=68.70]"
    ),
    (
        b" 10%|#| 6/60 [00:36<05:28, 6.07s/it]{'loss': '0.6647', 'grad_norm': '0.8371', 'epoch':"
        b" '0.09'}"
    ),
    (
        b'DLLL {"timestamp": "1711000000.1", "elapsedtime": "12.3", "type": "LOG", "step": 5,'
        b' "data": {"reduced_train_loss": 11.0, "train_step_timing in s": 25.7, "consumed_samples":'
        b" 6144}}"
    ),
    (
        b'DLLL {"type": "METADATA", "step": "PARAMETER", "data": {"global_batch_size": 512,'
        b' "world_size": 8}}'
    ),
    (
        b'{"time": "2025-01-01T12:00:00Z", "event": "step", "step": 3, "step_seconds": 0.5, "loss":'
        b' 2.0, "tokens": 10}'
    ),
    (
        b'{"time": "2025-01-01T12:00:00Z", "event": "evaluation", "step": 3, "results": {"loss":'
        b' 1.0}, "round": 1}'
    ),
    (
        b'{"log_history": [{"step": 1, "loss": 2.0, "epoch": 0.1}, {"train_runtime": 3.0}],'
        b' "max_steps": 3}'
    ),
    b"failed (exitcode: 1) local_rank: 3 (pid: 1)",
    *(note.literal + b" 3" for kind in TEXT_FORMATS for note in kind.rules),
]
NUMBERS_IN_TEXT = st.sampled_from(
    [
        b"0",
        b"-1",
        b"nan",
        b"inf",
        b"1e999",
        b"1" * 19,
        b"9" * 400,
        b"9" * 5000,
        b"1_0",
        b"+",
        b"",
        b"\xff",
        b"1e-400",
        b"0x1",
    ]
)


@st.composite
def log_lines(draw: st.DrawFn) -> bytes:
    line = draw(st.sampled_from(LINES))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(line)))
        kind = draw(st.sampled_from(["number", "cut", "drop", "insert"]))
        if kind == "number":
            digits = [place for place, byte in enumerate(line) if chr(byte).isdigit()]
            at = draw(st.sampled_from(digits)) if digits else at
            line = line[:at] + draw(NUMBERS_IN_TEXT) + line[at + 1 :]
        elif kind == "cut":
            line = line[:at]
        elif kind == "drop":
            line = line[:at] + line[at + 1 :]
        else:
            line = (
                line[:at]
                + draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\r", b"|", b"{", b" "])))
                + line[at:]
            )
    prefix = b"".join(draw(st.lists(st.sampled_from([*PREFIXES, *STAMPS]), max_size=3)))
    return prefix + line


@fuzz(150)
@given(st.lists(log_lines(), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_any_log_is_read_measured_and_reported(
    lines: list[bytes], times: int, stamped: bool
) -> None:
    text = b"\n".join(lines * times) + b"\n"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.log")
        path.write_bytes(text)
        with contextlib.suppress(UserError):
            result = measure(read_logs([path], timezone="UTC" if stamped else None))
            json.dumps(result.as_json())
            render(measured_content(result))


# Configs.

YAML_TEXT = (
    "model: id: path: training: steps: data: source: sources: cluster: platform: slurm hosts nodes:"
    " machine: workload: ${env:HOME} ${env: ${env:NOT_SET} &a *a << !!python/object:os.system"
    " !!binary | > - ? [ ] { } , : # ' \" --- ... 1e400 0x1 010 .inf ~ yes 2025-13-45 %YAML \\ \t"
    " \x85 \ufeff \U0001f600"
)
YAML_WORDS = YAML_TEXT.split(" ")
YAML_SOUP = st.lists(st.sampled_from([*YAML_WORDS, "\n", "\n  ", "\n    ", " "]), max_size=40).map(
    " ".join
)


@fuzz(150)
@given(
    st.one_of(
        YAML_SOUP.map(str.encode),
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")),
    )
)
def test_any_bytes_are_no_config_or_one(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.yaml")
        path.write_bytes(content)
        for load in (load_run_config, load_launch_config, load_cluster_config):
            with contextlib.suppress(UserError):
                load(path)


# Run directories.

EVENTS = [
    {"event": "run_start", "world_size": 2, "version": "1.0", "device": "cpu"},
    {"event": "round_start", "world_size": 2, "round": 1},
    {
        "event": "parameters",
        "count": 1000,
        "trainable": 10,
        "flops_per_token": 6000,
        "accelerator": "h100",
    },
    {"event": "estimate", "memory_gib": [1, 2], "step_seconds": [1, 2]},
    {"event": "checkpoint", "step": 2, "seconds": 1.0, "bytes": 100},
    {"event": "evaluation", "step": 2, "results": {"held_out": {"loss": 2.0}}},
    {"event": "failure", "round": 1, "rank": 0, "reason": "exit code 1"},
    {"event": "restart", "round": 2},
    {"event": "run_end", "status": "completed"},
]
STEP = {
    "event": "step",
    "step": 1,
    "step_seconds": 0.5,
    "loss": 2.0,
    "tokens": 10,
    "learning_rate": 1e-3,
    "round": 1,
}


@st.composite
def odd_records(draw: st.DrawFn, templates: list[dict[str, Any]]) -> str:
    record = {"time": "2025-01-01T12:00:00.000000Z", **draw(st.sampled_from(templates))}
    for name in draw(st.lists(st.sampled_from(sorted(record)), max_size=2)):
        record[name] = draw(ODD_VALUES)
    return json.dumps(record)


@fuzz(25)
@given(
    st.lists(odd_records(EVENTS), max_size=8), st.lists(odd_records([STEP]), max_size=5), ODD_VALUES
)
def test_any_run_directory_is_reported_measured_and_compared(
    events: list[str], steps: list[str], summary: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "events.jsonl").write_text("".join(f"{line}\n" for line in events))
        (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in steps))
        (directory / "summary.json").write_text(json.dumps(summary))
        for command in (["report", name], ["metrics", name], ["diff", name, name]):
            assert exit_code(command) in (0, 1, 2), command


def exit_code(command: list[str]) -> int:
    """The code of a command of this program; 70 where it says that it made a mistake itself."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            main(command)
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            assert "Traceback" not in said.getvalue(), said.getvalue()
            return ended.code
    return 0


STATE = {
    "state": "running",
    "epoch": 1,
    "round": 2,
    "restarts": 0,
    "failure": {"node": 0, "rank": 1, "reason": "x"},
}
EXIT = {
    "node": 0,
    "rank": 1,
    "status": 1,
    "asked": False,
    "lost_peer": False,
    "ended_at": 1.5,
    "lines": ["error"],
}


@st.composite
def odd_state(draw: st.DrawFn, template: dict[str, Any]) -> Any:
    state = dict(template)
    for name in draw(st.lists(st.sampled_from(sorted(state)), max_size=3)):
        state[name] = draw(ODD_VALUES)
    return draw(st.one_of(st.just(state), st.just(state), ODD_VALUES))


@fuzz(100)
@given(odd_state(STATE), odd_state(EXIT))
def test_any_state_of_a_launch_is_read(state: Any, report: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "exits").mkdir()
        (directory / "state.json").write_text(json.dumps(state))
        (directory / "exits" / "0001-0002.node-0.json").write_text(json.dumps(report))
        known = last_state(directory)
        failure_of(known)
        attempt_failure(directory, known)


# Manifests of checkpoints, with a checksum that fits.

FILES = {"a": manifest.FileRecord(1, "0" * 32)}
MANIFEST = manifest.Manifest(
    step=1, world_size=1, torch_version="2.11", created="2025", files=FILES, identity={"a": 1}
)
GOOD_MANIFEST = json.loads(manifest.encode(MANIFEST))


@fuzz(150)
@given(odd_state(GOOD_MANIFEST), st.integers(0, 2000), st.integers(0, 255), st.booleans())
def test_any_manifest_is_refused_or_read(body: Any, at: int, byte: int, damaged: bool) -> None:
    if isinstance(body, dict):
        body["checksum"] = "0" * 32
    raw = (json.dumps(body, indent=1) + "\n").encode()
    raw = (
        manifest._with_checksum(raw, manifest.checksum(raw).encode())
        if raw.endswith(b"}\n") and len(raw) > 64
        else raw
    )
    if damaged:
        raw = raw[:at] + bytes([byte]) + raw[at + 1 :]
    with contextlib.suppress(manifest.ManifestError, manifest.LaterFormat):
        manifest.decode(raw)


# Messages between agents.

KEY = b"k" * 32


@fuzz(150)
@given(st.lists(st.one_of(st.binary(max_size=40), ODD_VALUES, st.just(b"\n")), max_size=5))
def test_a_connection_gives_messages_or_is_lost(pieces: list[Any]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        number = 0
        for piece in pieces:
            if isinstance(piece, bytes):
                theirs.sendall(piece)
            else:
                theirs.sendall(seal(KEY, number, piece) + b"\n")
                number += 1
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(ours, 5.0, KEY, KEY)
        try:
            for _ in range(len(pieces) + 1):
                assert all(isinstance(message, dict) for message in connection.receive())
        except ConnectionLost:
            pass
        finally:
            connection.close()
