"""What every test starts from: markers by directory, a time limit per group, no network, caches of
its own.

The environment is set at import, before any test module can import a library that reads it, and is
inherited by the processes that tests start.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Far above what any test takes alone: a busy machine is several times slower, and only what hangs
# gets here.
TIMEOUT_SECONDS = {"unit": 180, "security": 180, "distributed": 900, "integration": 1800}

LONGEST_FIRST = [
    "distributed/test_memory_tracker.py",
    "distributed/test_lora.py",
    "distributed/test_block_graphs.py",
    "distributed/test_epochs.py",
    "distributed/test_parallelize.py",
    "integration/kubernetes/test_runs.py",
    "integration/kubernetes/test_restarts.py",
    "integration/launch/test_slurm.py",
    "integration/launch/test_ssh.py",
    "integration/kubernetes/test_lost_node.py",
    "integration/acceptance/test_accept_ssh.py",
    "integration/test_soak.py",
    "integration/launch/test_local.py",
    "integration/acceptance/test_accept_slurm.py",
    "integration/test_gpu_rows.py",
    "integration/kubernetes/test_waiting.py",
    "integration/kubernetes/test_queue.py",
    "integration/kubernetes/test_image.py",
    "integration/acceptance/test_lost_nodes.py",
    "integration/provision/test_slurm_life.py",
    "integration/provision/test_hosts_life.py",
    "integration/test_train.py",
]
"""Files of minutes: what begins last should end soon after the rest (`--no-loadscope-reorder`)."""

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    # Ranks of a test share two cores; more threads than cores make gloo ranks wait for each other.
    OMP_NUM_THREADS="1",
    # torch.compile would start processes for its kernels, each with torch to import.
    TORCHINDUCTOR_COMPILE_THREADS="1",
    # Kubernetes, terraform, helm and the like are Go: a quarter to half of the time of a command is
    # the collection of garbage that there is memory enough to keep.
    GOGC="400",
)
# Properties are judged by their truth, never by their time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# What the commands print is compared: as wide as without a terminal, and without colours.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)


def put_bare_python_first(directory: str) -> None:
    """Have `python3` be an interpreter in `directory` without packages, as agents need no more.

    It is started hundreds of times. A shim of pyenv is a shell script, 0.13 s of a core, and
    packages may have lines (*.pth) that each start runs.
    """
    if (found := shutil.which("python3")) is None:
        return
    code = "import sys, venv; venv.create(sys.argv[1], symlinks=True)"
    if subprocess.run([found, "-c", code, directory], check=False).returncode == 0:
        os.environ["PATH"] = f"{directory}/bin:{os.environ['PATH']}"


def pytest_configure(config: pytest.Config) -> None:
    """Give the session empty caches, whatever the caller's HOME holds. xdist workers inherit the
    controller's."""
    # Here and not in pyproject.toml, so that these tests can be collected on an earlier commit
    # (tools/fails_on.py).
    config.addinivalue_line(
        "markers", "security: attacks that must fail, milliseconds each (tests/security)"
    )
    # In the background of a shell SIGINT is ignored, under nohup SIGHUP: what tests start would
    # ignore it too.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    if hasattr(config, "workerinput"):
        return
    directory = tempfile.mkdtemp(prefix="drillyard-tests-")
    # Hosts of a test may be another user's.
    os.chmod(directory, 0o711)
    put_bare_python_first(os.path.join(directory, "python"))
    config.stash[CACHE_DIRECTORY] = directory
    os.environ["DRILLYARD_CACHE"] = os.path.join(directory, "drillyard")
    os.environ["HF_HOME"] = os.path.join(directory, "huggingface")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's caches."""
    directory = config.stash.get(CACHE_DIRECTORY, None)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


CACHE_DIRECTORY = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the modules and tests, millions of objects that live to the end, out of each garbage
    collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its directory and limit its time; the longest files begin."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FIRST)}
    assert all(path.is_file() for path in place)
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        group = _group(item.path)
        if group in TIMEOUT_SECONDS:
            item.add_marker(group)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS[group]))


@functools.cache
def _group(file: Path) -> str:
    """unit, security, distributed or integration."""
    return file.relative_to(Path(__file__).parent).parts[0]
