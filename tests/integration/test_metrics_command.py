"""The real commands in an environment without torch: any log, a pipe, a file that grows; the
report; an estimate."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.integration.torch_free import ROOT
from tests.integration.torch_free import torch_free as torch_free
from tests.unit.reporting import runs

RECIPE = ROOT / "recipes" / "llama31-70b-b200"


def step_line(step: int) -> str:
    return (
        f"Step: {step} | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss:"
        f" {2 / step:.4f}\n"
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text("".join(map(step_line, range(1, 21))))
    return path


def test_there_is_no_torch_and_the_figures_are_right(torch_free, log):
    probe = torch_free("--version")
    python = Path(probe.args[0]).with_name("python")
    for module in ("torch", "transformers"):
        absent = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
        assert f"No module named '{module}'" in absent.stderr
    ended = torch_free(
        *(
            "metrics",
            log,
            "--json",
            "--accelerator",
            "b200",
            "--num-gpus",
            16,
            "--params",
            "70.55e9",
        ),
        *("--batch-size-per-gpu", 8, "--sequence-length", 4096, "--price-per-gpu-hour", 8.05),
    )
    assert ended.returncode == 0, ended.stderr
    got = json.loads(ended.stdout)
    assert got["mfu"] == pytest.approx(0.4240, abs=0.0002)
    assert got["cost_per_step"] == pytest.approx(0.520, abs=0.001)


def test_standard_input_and_the_screen(torch_free, log):
    ended = torch_free("metrics", "-", "--fail-if", "step_seconds.p50>14", input=log.read_text())
    assert ended.returncode == 1
    assert "14.54 s median" in ended.stdout
    assert ended.stderr == "failed: step_seconds.p50 is 14.54: --fail-if 'step_seconds.p50>14'\n"


def test_gpu_recipes_and_comparison(torch_free, log, tmp_path):
    dllogger = tmp_path / "dllogger.json"
    dllogger.write_text('DLLL {"step": 10, "data": {"train_step_timing in s": 40.0}}\n')
    ended = torch_free(
        *(
            "metrics",
            "--format",
            "gpu-recipes",
            f"--file={dllogger}",
            "--batch_size=1024",
            "--num_accelerators=128",
        ),
        *("--model_type=gpt3-175b", "--accelerator_type=h100"),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[0] == "Average step time: 40.00000000"
    compared = torch_free("metrics", "--compare", log, log)
    assert compared.returncode == 0, compared.stderr
    assert "as fast as" in " ".join(compared.stdout.split())


def test_a_growing_file_is_followed_until_interrupted(torch_free, log):
    command = torch_free("--version").args[0]
    followed = subprocess.Popen(
        [command, "metrics", "-f", "--json", log],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert followed.stdout is not None
        assert json.loads(followed.stdout.readline())["step_seconds"]["last_step"] == 20
        with log.open("a") as file:
            file.write(step_line(21) + step_line(22)[:10])
        second = followed.stdout.readline()
        assert second, followed.communicate(timeout=240)
        assert json.loads(second)["step_seconds"]["last_step"] == 21
        followed.send_signal(signal.SIGINT)
        _, errors = followed.communicate(timeout=240)
    finally:
        followed.kill()
        followed.wait()
    assert (followed.returncode, errors) == (130, "")


def test_report_and_watch_need_no_torch_either(torch_free, log, tmp_path):
    run = runs.write_run(tmp_path / "whole", steps=60)
    for arguments in (
        ("report", run),
        ("report", log, "--output", tmp_path / "log.html"),
        ("watch", run),
    ):
        ended = torch_free(*arguments)
        assert (ended.returncode, ended.stderr) == (0, ""), arguments
    assert "60" in ended.stdout
    for page in (run / "report.html", tmp_path / "log.html"):
        assert "<table" in page.read_text()
    estimated = torch_free(
        *(
            "estimate",
            RECIPE / "run.yaml",
            "--cluster",
            RECIPE / "cluster.yaml",
            "--config",
            RECIPE / "config.json",
        )
    )
    assert (estimated.returncode, "FITS" in estimated.stdout) == (0, True), estimated.stderr
