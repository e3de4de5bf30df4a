"""The node side of the probes with PyTorch in one process, the programs of nccl-tests as fakes on
PATH, and the steps that start them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.acceptance.nccl_samples import a4_output
from tests.unit.acceptance.observations import expected

from drillyard.acceptance import node
from drillyard.acceptance.check import Level
from drillyard.acceptance.collective_evidence import measured_collectives
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.node import probe_nccl_tests, ranks, torch_collective, torch_devices
from drillyard.acceptance.rank_values import NOT_INSTALLED
from drillyard.acceptance.schedule import schedule
from drillyard.acceptance.torch_steps import COLLECTIVES, sizes_of
from drillyard.hardware import load_catalog
from drillyard.hardware.bandwidths import bus_factor

NODE = Path(node.__file__).parent
GIB = 1 << 30


# Ranks.


def run(
    probe: str, arguments: dict[str, Any], **environment: str
) -> subprocess.CompletedProcess[str]:
    """One rank alone, started as the node program starts it."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, str(NODE / f"torch_{probe}.py")],
        input=json.dumps(arguments),
        env={**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pytorch_that_is_too_old_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks.torch, "__version__", "2.3.1+cu121")
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    assert ranks.run(lambda rank, asked: {}) == 0
    assert "2.4" in json.loads(capsys.readouterr().out)["skipped"]


def test_a_missing_accelerator_is_an_error_where_the_machine_has_one() -> None:
    ended = run("devices", {"device": "cuda"}, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == ["PyTorch finds no accelerator"]


def test_a_wait_for_a_core_while_the_clock_is_read_is_not_taken_off_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = ranks.ProbeRank(0, 1, 0, 1, ranks.torch.device("cpu"))
    clock = ranks.LocalClock(rank)
    waits, wall = iter([0.0, 0.0, 0.0, 5.0, 5.0, 5.0]), iter([10.0, 10.5, 15.5])
    monkeypatch.setattr(clock, "_waited", lambda: next(waits))
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: next(wall))
    began = clock.now()
    assert clock.now() - began == pytest.approx(0.5)


def test_one_rank_alone_has_no_collective() -> None:
    ended = run("collective", {"collective": "all_reduce", "sizes": [1024]})
    assert ended.returncode == 0, ended.stderr
    assert "skipped" in json.loads(ended.stdout.splitlines()[-1])


def test_the_factor_of_bus_bandwidth_is_that_of_the_rows() -> None:
    for collective in COLLECTIVES:
        name = {"all_to_all": "alltoall"}.get(collective, collective)
        for count in (2, 8, 16):
            wanted = 1.0 if collective == "sendrecv" else bus_factor(name, count)
            assert torch_collective.bus_factor(collective, count) == wanted


def test_a_product_of_the_largest_factors_is_exact() -> None:
    assert torch_devices.LARGEST_FACTOR**2 * 1024 < torch_devices.EXACT_BELOW


def test_a_node_without_pytorch_answers_what_checks_look_for() -> None:
    assert f'"{NOT_INSTALLED}' in (NODE / "worker.py").read_text()


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (NotImplementedError("no such product for Float8_e4m3fn"), False),
        (AttributeError("module 'torch' has no attribute 'float8_e4m3fn'"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLt`"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("HIP error: unspecified launch failure"), True),
        (torch_devices.torch.cuda.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), True),
    ],
)
def test_a_device_that_fails_is_not_one_that_lacks_a_product(
    error: Exception, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        raise error

    monkeypatch.setattr(torch_devices, "_plain", lambda *_: call)
    rank = ranks.ProbeRank(0, 1, 0, 1, torch_devices.torch.device("cpu"))
    asked = {"type": "bf16", "m": 8, "n": 8, "k": 8}
    if fails:
        with pytest.raises(type(error)):
            torch_devices.matmul(rank, ranks.LocalClock(rank), asked, 1)
    else:
        assert torch_devices.matmul(rank, ranks.LocalClock(rank), asked, 1)["unsupported"]


# nccl-tests.


def fake(directory: Path, name: str, text: str) -> None:
    program = directory / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs, the first on PATH; none is installed elsewhere."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(probe_nccl_tests, "DIRECTORIES", ())
    monkeypatch.setenv("NPROC_PER_NODE", "16")
    return tmp_path


def asked(**more: Any) -> dict[str, Any]:
    return {"collective": "all_gather", "sizes": [1024, 8 * GIB], **more}


def read(values: dict[str, Any]) -> list[Any]:
    """What the judgement makes of it."""
    seen = Observation(
        probe="nccl_tests", scope="node", nodes=(0,), arguments=asked(), values=values
    )
    return list(
        measured_collectives(
            AcceptanceEvidence(
                level="quick",
                expected_nodes=1,
                processes_per_node=16,
                nodes=(NodeIdentity(rank=0, name="n0"),),
                observations=(seen,),
            )
        )
    )


def test_a_program_of_nccl_tests_is_run_over_all_devices(path: Path) -> None:
    (path / "table.txt").write_text(a4_output())
    fake(path, "all_gather_perf", f'echo "$@" > {path}/words; cat {path}/table.txt')
    values = probe_nccl_tests.probe(asked())
    assert (path / "words").read_text().split()[:8] == [
        *("-b", "1024", "-e", str(8 * GIB)),
        *("-f", "2", "-g", "16"),
    ]
    assert values["exit_code"] == 0
    (found,) = read(values)
    assert not found.problems
    assert found.collective == "all_gather"
    assert found.bus[8 * GIB]


def test_an_exit_code_under_a_good_table_is_a_problem(path: Path) -> None:
    (path / "table.txt").write_text(a4_output())
    fake(path, "all_gather_perf", f"cat {path}/table.txt; exit 3")
    (found,) = read(probe_nccl_tests.probe(asked()))
    assert found.problems == ("ended with exit code 3",)


def test_a_program_that_hangs_is_killed_and_its_output_kept(path: Path) -> None:
    fake(path, "all_gather_perf", "echo begun; exec sleep 60")
    began = time.monotonic()
    values = probe_nccl_tests.probe(asked(budget_seconds=0.5))
    assert time.monotonic() - began < 20
    assert values["output"] == "begun\n"
    assert values["exit_code"] is None
    (found,) = read(values)
    assert "did not end within" in found.problems[0]


def test_a_program_that_cannot_be_started_is_a_problem(path: Path) -> None:
    (path / "all_gather_perf").write_text("#!/no/such/interpreter\n")
    (path / "all_gather_perf").chmod(0o755)
    (found,) = read(probe_nccl_tests.probe(asked()))
    assert "cannot be started" in found.problems[0]


def test_without_nccl_tests_nothing_is_judged_by_them(path: Path) -> None:
    values = probe_nccl_tests.probe(asked())
    assert "skipped" in values
    assert read(values) == []
    fake(path, "all_gather_perf", "exit 0")
    assert "skipped" in probe_nccl_tests.probe(asked(ranks=1))


# Steps.


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(
    "machine", [None, "a4-highgpu-8g", "gpu-h100-sxm", "g2-standard-4", "a2-highgpu-1g"]
)
@pytest.mark.parametrize("nodes", [1, 2, 1000])
def test_steps_fit_the_machine_and_travel_on_a_command_line(
    level: Level, machine: str | None, nodes: int
) -> None:
    planned = schedule(level, expected(machine), nodes)
    assert len(json.dumps(planned)) < 100_000
    steps = [each for each in planned["steps"] if each.get("ranks")]
    probes = [each["probe"] for each in steps]
    assert probes[0] == "devices"
    assert probes[-1] == "training"
    device = None if machine is None else "cuda"
    assert {each["arguments"].get("device") for each in steps} == {device}
    scopes = {each["scope"] for each in steps if each["probe"] == "collective"}
    assert scopes == {1: {"node"}, 2: {"node", "pairs"}}.get(nodes, {"node", "pairs", "all"})


def test_a4_measures_what_its_rows_judge() -> None:
    """all_gather between two nodes up to 8 GiB, by the published run; one node's all_reduce."""
    steps = schedule(Level.quick, expected("a4-highgpu-8g"), 2)["steps"]
    pairs = [each["arguments"] for each in steps if each["scope"] == "pairs"]
    own = [each["arguments"] for each in steps if each["probe"] == "collective"]
    assert [each["collective"] for each in own] == ["all_reduce", "all_gather"]
    assert {each["collective"]: max(each["sizes"]) for each in pairs}["all_gather"] == 8 * GIB
    assert max(sizes_of(Level.quick, expected("a4-highgpu-8g"), "all_reduce", 1)) == 16 * GIB


def test_largest_messages_and_shapes_fit_the_memory() -> None:
    """Of every machine: a message is there twice, a training step as `training_phases` says."""
    for name, machine in load_catalog(None).machines.items():
        known = expected(name)
        assert known.accelerator is not None
        memory = known.accelerator.memory_gb
        if memory is None or machine.accelerator == "cpu":
            continue
        for step in schedule(Level.full, known, 2)["steps"]:
            sizes = step.get("arguments", {}).get("sizes")
            if sizes is not None:
                assert 2 * max(sizes) < memory * 1e9, (name, step["probe"])
            if step["probe"] == "training":
                assert step["arguments"]["shape"]["layers"] in (2, 4)
