"""A pipe, a device, a socket, a directory, a huge sparse file or an endless line in the place of
each file that a command reads: named, exit code 2, at once and in little memory.

The files are those of two real runs, so a file that a run writes from now on fails here until its
readers are in the table, and so does a new command.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.integration.forked_start import COMPUTING, forked
from tests.security.forked_commands import Ended, ForkedCommands
from tests.security.test_received_config import all_commands
from tests.unit.reporting.runs import CLUSTER

from drillyard.telemetry.jsonlines import read_records

SECONDS = 2.0
BYTES = 200e6

RUN = """
name: trial
model: {id: model, init: pretrained}
data:
  source: rows.jsonl
  format: text
  sequence_length: 64
  cache_directory: cache
  tokenizer: model
  held_out: {fraction: 0.2}
training:
  steps: 2
  device: cpu
  precision: fp32
  micro_batch_size: 2
  optimizer: {learning_rate: 0.001}
checkpoint: {every_steps: 1}
output: runs
"""
ADAPTED = RUN.replace("name: trial", "name: adapted").replace(
    "init: pretrained", "init: pretrained, lora: {rank: 2, target_modules: [c_attn]}"
)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_a_terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def listening_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"/proc/self/fd/{here}/{path.name}")
    server.close()
    os.close(here)


def directory(path: Path) -> None:
    path.mkdir()


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def endless_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"time": "2026-01-31T12:00:00Z", "event": "')
        file.truncate(1 << 30)


ODD = (pipe, device, listening_socket, directory, sparse_file, endless_line)

METRICS = "metrics runs/trial"
REPORT = "report runs/trial --overwrite"
WATCH = "watch runs/trial"
DIFF = "diff runs/trial runs/trial"
CALIBRATE = "estimate run.yaml --accelerator h100 --num-gpus 1 --calibrate runs/trial"
PRUNE = "checkpoint prune runs/trial --keep 1"
SHOW = "data show runs/trial --step 1"
PREVIEW = "data preview run.yaml"
BUILD = "data build run.yaml"
EVAL = "eval runs/trial/final"
EVAL_ROWS = "eval runs/trial/final --data rows.jsonl"
EVAL_STEP = "eval runs/trial/checkpoints/step-00000002"
EXPORT = "export runs/trial/checkpoints/step-00000002 exported"
GENERATE = "generate runs/trial/final --prompt a --max-new-tokens 1"
CHAT = "chat runs/trial/final --prompt a --max-new-tokens 1"
ASK_STEP = "generate runs/trial/checkpoints/step-00000002 --prompt a"
EVAL_ADAPTER = "eval runs/adapted/final"
MERGE = "export runs/adapted/checkpoints/step-00000002 exported --merge"
TRAIN = "train run.yaml --set training.steps=3"
REPLAY = "train run.yaml --replay 2"
BENCH = "bench run.yaml --steps 1 --warmup 0"
CHAOS = "chaos run.yaml --faults kill --count 1 --directory chaos"
LAUNCH = "launch run.yaml --cluster cluster.yaml --dry-run"
ACCEPT = "accept cluster.yaml --dry-run"
STEP = "checkpoints/step-00000002"
IMAGE = "image build --builder docker --tag r.io/x/y --file image/Dockerfile --dry-run"
PUSH = "image push --builder docker --tag r.io/x/y:1 --write cluster.yaml --dry-run"

READERS: dict[str, tuple[str, ...]] = {
    "runs/trial/events.jsonl": (METRICS, REPORT, WATCH, SHOW, TRAIN, REPLAY, CALIBRATE),
    "runs/trial/metrics.jsonl": (METRICS, REPORT, WATCH, DIFF, TRAIN, REPLAY, CALIBRATE),
    "runs/trial/dllogger.json": (TRAIN,),
    "runs/trial/run.yaml": (REPORT, METRICS, PRUNE, SHOW, EVAL, EVAL_ROWS, EXPORT, TRAIN, REPLAY),
    "runs/trial/cluster.yaml": (REPORT, WATCH),
    "runs/trial/data.json": (SHOW, EVAL, TRAIN),
    "runs/trial/resolved.json": (TRAIN,),
    "runs/trial/summary.json": (TRAIN,),
    "runs/trial/logs/rank-0.log": (TRAIN,),
    "runs/trial/base/base.json": (EVAL_STEP, EXPORT),
    "runs/trial/base/config.json": (EVAL_STEP, EXPORT, ASK_STEP),
    "runs/trial/base/generation_config.json": (EVAL_STEP, EXPORT),
    f"runs/trial/{STEP}/manifest.json": (EXPORT, EVAL_STEP),
    f"runs/trial/{STEP}/.metadata": (EXPORT, EVAL_STEP),
    f"runs/trial/{STEP}/__0_0.distcp": (EXPORT, EVAL_STEP),
    f"runs/trial/{STEP}/held_out.json": (PRUNE, EXPORT),
    "runs/trial/final/.drillyard-export.json": (TRAIN,),
    "runs/trial/final/config.json": (EVAL, GENERATE, CHAT),
    "runs/trial/final/generation_config.json": (EVAL, GENERATE),
    "runs/trial/final/model.safetensors": (EVAL, GENERATE),
    "runs/trial/final/tokenizer.json": (EVAL, EVAL_ROWS, GENERATE),
    "runs/trial/final/tokenizer_config.json": (EVAL,),
    "runs/trial/final/chat_template.jinja": (EVAL,),
    "runs/trial/tokenizer/tokenizer.json": (EXPORT, EVAL_STEP),
    "runs/trial/tokenizer/tokenizer_config.json": (EXPORT,),
    "runs/trial/tokenizer/chat_template.jinja": (EXPORT,),
    "runs/adapted/final/adapter_config.json": (EVAL_ADAPTER,),
    "runs/adapted/final/adapter_model.safetensors": (EVAL_ADAPTER,),
    "runs/adapted/base/base.json": (MERGE,),
    "model/config.json": (TRAIN, BENCH, LAUNCH, CHAOS, EVAL_ADAPTER, MERGE),
    "model/generation_config.json": (TRAIN, MERGE),
    "model/model.safetensors": (EVAL_ADAPTER, MERGE),
    "model/tokenizer.json": (PREVIEW, BUILD, SHOW, TRAIN),
    "model/tokenizer_config.json": (PREVIEW,),
    "model/chat_template.jinja": (PREVIEW,),
    "run.yaml": (
        TRAIN,
        BENCH,
        PREVIEW,
        BUILD,
        LAUNCH,
        CHAOS,
        CALIBRATE,
        f"{ACCEPT} --run run.yaml",
    ),
    "cluster.yaml": (
        LAUNCH,
        ACCEPT,
        "runs list --cluster cluster.yaml",
        "cluster plan cluster.yaml",
        f"{IMAGE} --cluster cluster.yaml",
        PUSH,
    ),
    "image/Dockerfile": (IMAGE,),
    "hardware.yaml": (
        "hardware h100 --hardware hardware.yaml",
        "estimate run.yaml --accelerator h100 --num-gpus 1 --hardware hardware.yaml",
        f"{METRICS} --hardware hardware.yaml",
        "cluster plan cluster.yaml --hardware hardware.yaml",
        f"{ACCEPT} --hardware hardware.yaml",
    ),
    "config.json": (
        f"{METRICS} --config config.json",
        "estimate run.yaml --accelerator h100 --num-gpus 1 --config config.json",
    ),
    "acceptance.json": (f"{ACCEPT} --baseline acceptance.json",),
    "other.log": ("metrics other.log", "report other.log --overwrite", "watch other.log"),
    "other.json": (
        "init new --from-deepspeed other.json",
        f"{GENERATE} --template --tools other.json",
    ),
    "other.yaml": ("init new --from-trl other.yaml", "init new --from-axolotl other.yaml"),
    "rows.jsonl": (PREVIEW, EVAL_ROWS, "generate runs/trial/final --input rows.jsonl"),
}
SAME = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
"""Of the run with adapters, read as those of the other run."""
NOT_READ = ("summary.txt", "tensorboard")
ANY_SIZE = ("rows.jsonl", "rank-0.log", "other.log")
"""Read in pieces, or by name, whatever their size."""
WITHOUT_FILES = {
    "schema",
    "checkpoint list",
    "checkpoint verify",
    "runs status",
    "runs logs",
    "runs watch",
    "runs wait",
    "runs cancel",
    "runs resume",
    "runs forget",
    "runs artifacts",
    "cluster up",
    "cluster down",
    "cluster leaks",
    "cluster status",
    "image logs",
}
"""They read no file here, read `cluster.yaml` as `runs list` does, or have odd files in a table of
what is wrong (below)."""


class Place(NamedTuple):
    directory: Path
    run: ForkedCommands

    def call(self, line: str) -> Ended:
        return self.run(self.directory, *line.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A directory with two runs that were really trained, what they were trained from, and files
    that a user names."""
    place = tmp_path_factory.mktemp("trained")
    rows = [{"text": f"row {number} " + "abc def " * 20} for number in range(16)]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "run.yaml").write_text(RUN)
    (place / "adapted.yaml").write_text(ADAPTED)
    for name, content in {
        "cluster.yaml": "name: here\nplatform: local\nprocesses_per_node: 1\n",
        "hardware.yaml": "prices: []\n",
        "acceptance.json": "{}",
        "other.log": "",
        "other.json": "{}",
        "other.yaml": "",
        "config.json": "{}",
    }.items():
        (place / name).write_text(content)
    make_checkout(place / "image")
    with forked(COMPUTING):
        subprocess.run(
            [sys.executable, Path(__file__).with_name("small_model.py"), place], check=True
        )
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "drillyard", "train", name],
                cwd=place,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name in ("run.yaml", "adapted.yaml")
        ]
        assert [process.wait() for process in started] == [0, 0]
    (place / "runs/trial/cluster.yaml").write_text(CLUSTER)
    with ForkedCommands() as run:
        yield Place(place, run)


def make_checkout(directory: Path) -> None:
    """The files of an image, in git."""
    directory.mkdir()
    (directory / "Dockerfile").write_text("FROM debian:12\nCOPY app.py /\n")
    (directory / "app.py").write_text("")
    who = ["-c", "user.name=tester", "-c", "user.email=tester@example.com"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "image"]):
        subprocess.run(["git", "-C", directory, *words], check=True)


def test_every_file_and_every_command_is_in_the_table(place: Place) -> None:
    files = {str(each.relative_to(place.directory)) for each in place.directory.rglob("*.*")}
    for name in files:
        path = place.directory / name
        is_other = path.name in NOT_READ or "tensorboard" in name
        is_other = is_other or name.startswith(("cache/", "image/.git/", "image/app.py"))
        alike = name.replace("adapted", "trial").replace("step-00000001", "step-00000002")
        alike = alike.replace("adapted.yaml", "run.yaml")
        if path.is_file() and not is_other and name != "adapted.yaml":
            assert name in READERS or alike in READERS, name
    called = [line for lines in READERS.values() for line in lines]
    for command in all_commands() - WITHOUT_FILES:
        assert any(line.startswith(f"{command} ") for line in called), command


@pytest.mark.parametrize("name", READERS)
def test_an_odd_file_is_named_at_once(place: Place, name: str) -> None:
    path = place.directory / name
    kept = path.with_name("kept")
    path.rename(kept)
    try:
        for number, line in enumerate(READERS[name]):
            for put in ODD if number == 0 else (pipe, endless_line):
                if path.name in ANY_SIZE and put in (sparse_file, endless_line):
                    continue
                put(path)
                ended = place.call(line)
                path.rmdir() if put is directory else path.unlink()
                case = (line, put.__name__, ended)
                assert ended.code == 2 and path.name in ended.output, case
                assert ended.seconds < SECONDS and ended.bytes < BYTES, case
    finally:
        kept.rename(path)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_checkpoint_commands_list_odd_files(place: Place, name: str) -> None:
    path = place.directory / "runs/trial" / STEP / name
    kept = path.with_name("kept")
    path.rename(kept)
    try:
        for put in (pipe, sparse_file):
            put(path)
            listed = place.call("checkpoint list runs/trial")
            verified = place.call("checkpoint verify runs/trial")
            path.unlink()
            assert listed.code == 0 and "damaged" in listed.output, listed
            assert verified.code == 1 and name in verified.output, verified
            assert max(listed.seconds, verified.seconds) < SECONDS
    finally:
        kept.rename(path)


@pytest.mark.parametrize("put", [pipe, sparse_file])
def test_an_odd_file_of_a_cache_is_damage_that_is_named_and_repaired(
    place: Place, put: Callable[[Path], None]
) -> None:
    path = next(place.directory.glob("cache/tokenized/*/train.lengths"))
    path.unlink()
    put(path)
    ended = place.call(BUILD)
    assert ended.code == 0 and "train.lengths" in ended.output, ended
    assert path.is_file() and path.stat().st_size < 1000


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("run.yaml", REPORT),
        ("cluster.yaml", REPORT),
        ("run.yaml", EXPORT),
        ("tokenizer/chat_template.jinja", EXPORT),
        ("base/generation_config.json", EXPORT),
    ],
)
def test_a_link_of_a_run_to_a_file_of_the_reader_is_not_followed(
    place: Place, name: str, line: str
) -> None:
    secret = place.directory / "secret"
    secret.write_text('{"token": "recognisable"}')
    path = place.directory / "runs/trial" / name
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(secret)
    try:
        ended = place.call(line)
    finally:
        kept.replace(path)
    assert ended.code == 2 and str(secret) in ended.output, ended
    assert "recognisable" not in ended.output
    written = [each for each in place.directory.rglob("*") if each.is_file() and each != secret]
    assert not [each for each in written if b"recognisable" in each.read_bytes()]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("data.source=rowz.jsonl", "rows.jsonl"),
        ("data.held_out.source=rowz.jsonl", "rows.jsonl"),
        ("data.tokenizer=./words", "data.tokenizer"),
        ("model.id=./models", "model.id"),
        ("model.lora.adapter=./adapter", "model.lora.adapter"),
    ],
)
def test_a_wrong_path_under_the_name_of_a_run_is_named_without_a_wait(
    place: Place, setting: str, named: str
) -> None:
    config = "adapted.yaml" if "lora" in setting else "run.yaml"
    more = "--set data.held_out.fraction=0" if "held_out" in setting else ""
    ended = place.call(f"train {config} --set {setting} {more}")
    assert ended.code == 2 and named in ended.output, ended
    assert "different run" not in ended.output
    assert ended.seconds < SECONDS and ended.bytes < BYTES


@pytest.mark.parametrize("name", ["trial", "adapted"])
def test_a_run_in_the_place_of_a_model_is_answered_with_the_command_that_makes_one(
    place: Place, name: str
) -> None:
    shutil.copytree(place.directory / "runs" / name, place.directory / f"{name}-again")
    start = "train run.yaml --set name=further --set data.tokenizer=model --set model.id="
    if name == "trial":
        with_final = place.call(f"{start}{name}-again")
        assert with_final.code == 2 and f"{name}-again/final" in with_final.output, with_final
    shutil.rmtree(place.directory / f"{name}-again/final")
    ended = place.call(f"{start}{name}-again")
    assert ended.code == 2 and "step-00000002" in ended.output, ended
    assert ended.seconds < SECONDS
    (command,) = [line for line in ended.output.splitlines() if "drillyard export" in line]
    words = command.partition("drillyard ")[2].split()
    assert place.run(place.directory, *words).code == 0
    assert (place.directory / words[2] / "model.safetensors").is_file()
    dry = place.call(f"{LAUNCH} --set model.id={words[2]}")
    assert dry.code == 0, dry


@pytest.mark.parametrize("put", [pipe, device, directory, sparse_file, endless_line])
@pytest.mark.parametrize("name", ["state.json", "job.json"])
def test_an_odd_file_of_a_launch_is_not_waited_for(
    tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    from drillyard.launch.agent.job import read_job
    from drillyard.launch.agent.state_file import read_state

    put(tmp_path / name)
    with pytest.raises((ValueError, OSError)):
        read_state(tmp_path) if name == "state.json" else read_job(tmp_path / name)


def test_damaged_lines_and_a_torn_end_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n\0\0\0\n{"a": 2\n{"a": 3}\n{"a": 4, "b":')
    assert list(read_records(path)) == [{"a": 1}, {"a": 3}]


def test_a_stream_that_the_user_names_is_read(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "drillyard", "estimate", "/dev/stdin"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, input=b"nonsense: 1", env=environment, capture_output=True)
    assert ended.returncode == 2 and b"/dev/stdin:1: nonsense" in ended.stderr
