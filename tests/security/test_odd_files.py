"""A pipe, a device, a socket, a directory, a huge sparse file or an endless line in the place of
each file that a command reads: named, exit code 2, at once and in little memory.

The files are those of a real run, so a file that a run writes from now on fails here until its
readers are in the table.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from drillyard.cli import main as cli
from drillyard.errors import UserError
from drillyard.telemetry.jsonlines import read_records

SECONDS = 2.0
BYTES = 200e6

RUN = """
name: trial
model: {id: model, init: pretrained}
data: {source: rows.jsonl, format: text, sequence_length: 64, cache_directory: cache, tokenizer: model}
training: {steps: 2, device: cpu, precision: fp32, micro_batch_size: 2, optimizer: {learning_rate: 0.001}}
checkpoint: {every_steps: 2}
output: runs
"""  # noqa: E501


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


def attempt(call: Callable[[], object]) -> tuple[int, str, float, int]:
    """The exit code and standard error of a call in a child of this process, its seconds and the
    most memory that it had, in bytes."""
    read, write = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        code: int | str | None = 0
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(0, 1)
            os.dup2(write, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            call()
        except SystemExit as ended:
            code = ended.code
        except UserError as error:
            print(error, file=sys.stderr)
            code = 2
        except BaseException:
            traceback.print_exc()
            code = 99
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0)
    os.close(write)
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - begun > 20:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(read)
            pytest.fail("it does not end")
        time.sleep(0.002)
    # Of the processor: a busy machine makes no test fail, and what waits does not end at all.
    seconds = usage.ru_utime + usage.ru_stime
    with open(read, "rb") as output:
        text = output.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), text, seconds, usage.ru_maxrss * 1024


def require_refused(call: Callable[[], object], path: Path) -> None:
    usual = attempt(lambda: None)[3]
    code, text, seconds, most = attempt(call)
    assert code == 2, text
    assert path.name in text
    assert seconds < SECONDS
    assert most - usual < BYTES


def command(*words: object) -> None:
    cli.main([str(word) for word in words])


Reader = Callable[[Path], object]


def metrics(run: Path) -> None:
    command("metrics", run)


def report(run: Path) -> None:
    command("report", run, "--output", run.parent / "report.html", "--overwrite")


def watch(run: Path) -> None:
    command("watch", run)


def diff(run: Path) -> None:
    command("diff", run, run)


def prune(run: Path) -> None:
    command("checkpoint", "prune", run, "--keep", 1)


def resume(run: Path) -> object:
    from drillyard.config.load import load_run_config
    from drillyard.training.run_directory import claim_run_directory

    config = load_run_config(run / "run.yaml").model_copy(update={"output": str(run.parent)})
    return claim_run_directory(config, 1)


def load_checkpoint(run: Path) -> None:
    from drillyard.training.checkpoint import loading

    loading.load_checkpoint(next((run / "checkpoints").iterdir()), {})


def samples(run: Path) -> None:
    command("data", "show", run, "--step", 1)


def layouts(run: Path) -> object:
    from drillyard.training.resolved_record import read_layouts

    return read_layouts(run)


def exit_code(run: Path) -> object:
    from drillyard.reporting.summary import required_failure

    return required_failure(run)


def base_record(run: Path) -> object:
    from drillyard.training.saved_model import read_base_record

    return read_base_record(run, "model")


def last_steps(run: Path) -> object:
    from drillyard.training.spikes import last_figures

    return last_figures(run, 3)


def rank_log(run: Path) -> object:
    from drillyard.supervise.console_output import open_log

    return open_log(run / "logs/rank-0.log", "header")


def written_again(name: str) -> Reader:
    from drillyard.telemetry.jsonlines import LineFile

    return lambda run: LineFile(run / name, print)


def exported(run: Path) -> object:
    from drillyard.training.run_directory import _require_room_for_model

    return _require_room_for_model(run / "final")


def model_config(where: str) -> Reader:
    def load(run: Path) -> object:
        from drillyard.config.run import ModelConfig
        from drillyard.models.meta_model import load_config, load_generation_config

        config = ModelConfig(id=str(run / where))
        return load_config(config), load_generation_config(config)

    return load


def weights(run: Path) -> object:
    from drillyard.models.pretrained import StoredTensors

    return StoredTensors(run / "final")


def tokenizer(where: str) -> Reader:
    def load(run: Path) -> object:
        from drillyard.data.tokenizer import open_tokenizer

        return open_tokenizer(str(run / where))

    return load


READERS: dict[str, tuple[Reader, ...]] = {
    "events.jsonl": (metrics, report, watch, samples, written_again("events.jsonl")),
    "metrics.jsonl": (metrics, report, watch, diff, last_steps, written_again("metrics.jsonl")),
    "dllogger.json": (written_again("dllogger.json"),),
    "run.yaml": (report, prune, samples, resume),
    "cluster.yaml": (report,),
    "data.json": (samples,),
    "resolved.json": (layouts,),
    "summary.json": (exit_code, resume),
    "base/base.json": (base_record,),
    "base/config.json": (model_config("base"),),
    "base/generation_config.json": (model_config("base"),),
    "logs/rank-0.log": (rank_log,),
    "checkpoints/step-00000002/manifest.json": (load_checkpoint,),
    "checkpoints/step-00000002/.metadata": (load_checkpoint,),
    "checkpoints/step-00000002/__0_0.distcp": (load_checkpoint,),
    "final/.drillyard-export.json": (exported,),
    "final/config.json": (model_config("final"),),
    "final/generation_config.json": (model_config("final"),),
    "final/model.safetensors": (weights,),
    "final/tokenizer.json": (tokenizer("final"),),
    "final/tokenizer_config.json": (tokenizer("final"),),
    "tokenizer/tokenizer.json": (tokenizer("tokenizer"),),
    "tokenizer/tokenizer_config.json": (tokenizer("tokenizer"),),
}
NOT_READ = {"summary.txt"}
# These read a bounded number of bytes of a file of any size.
ANY_SIZE: set[Reader] = {last_steps, weights}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was really trained, with the cluster.yaml of a launch."""
    import torch
    from tests.unit.reporting.runs import CLUSTER
    from transformers import GPT2Config, GPT2LMHeadModel

    from drillyard.config.run import TrainTokenizer
    from drillyard.data.tokenizer import trained_tokenizer

    place = tmp_path_factory.mktemp("trained")
    rows = [{"text": f"row {number} " + "abc def " * 20} for number in range(16)]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = iter([row["text"] for row in rows])
    made = trained_tokenizer(
        TrainTokenizer(train="bpe", vocab_size=300), "key", texts, place / "cache"
    )
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(place / "model")
    made.pretrained.save_pretrained(place / "model")
    (place / "run.yaml").write_text(RUN)
    subprocess.run(
        [sys.executable, "-m", "drillyard", "train", "run.yaml"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
    )
    (place / "runs/trial/cluster.yaml").write_text(CLUSTER)
    return place


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, beside the model and the data that it names."""
    for name in ("model", "rows.jsonl", "cache"):
        (tmp_path / name).symlink_to(trained / name)
    shutil.copytree(trained / "runs/trial", tmp_path / "runs/trial")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs/trial"


def test_every_file_of_a_run_is_in_the_table(run: Path) -> None:
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    files = {name for name in files if not name.startswith("tensorboard/")}
    assert files == READERS.keys() | NOT_READ


@pytest.mark.parametrize("put", ODD)
@pytest.mark.parametrize("name", READERS)
def test_an_odd_file_is_named_at_once(run: Path, name: str, put: Callable[[Path], None]) -> None:
    (run / name).unlink()
    put(run / name)
    for reader in READERS[name]:
        is_writer = reader is rank_log or "written_again" in reader.__qualname__
        takes_it = (
            put not in (pipe, directory)
            if is_writer
            else reader in ANY_SIZE and put in (sparse_file, endless_line)
        )
        if not takes_it:
            require_refused(functools.partial(reader, run), run / name)


def state_of_a_launch(path: Path) -> object:
    from drillyard.launch.agent.state_file import read_state

    try:
        return read_state(path.parent)
    except ValueError as error:
        raise UserError(f"{path.name}: {error}") from None


def job_of_a_launch(path: Path) -> object:
    from drillyard.launch.agent.job import read_job

    try:
        return read_job(path)
    except OSError as error:
        raise UserError(str(error)) from None


@pytest.mark.parametrize("put", [pipe, device, directory, sparse_file, endless_line])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("state.json", state_of_a_launch),
        ("job.json", job_of_a_launch),
        ("run.log", lambda path: command("metrics", path)),
    ],
)
def test_an_odd_file_of_a_launch_or_log_is_not_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    read: Callable[[Path], object],
    put: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    put(Path(name))
    require_refused(functools.partial(read, Path(name)), Path(name))


def test_damaged_lines_and_a_torn_end_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n\0\0\0\n{"a": 2\n{"a": 3}\n{"a": 4, "b":')
    assert list(read_records(path)) == [{"a": 1}, {"a": 3}]


def test_a_stream_that_the_user_names_is_read(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "drillyard", "estimate", "/dev/stdin"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, input=b"nonsense: 1", env=environment, capture_output=True)
    assert ended.returncode == 2 and b"/dev/stdin:1: nonsense" in ended.stderr
