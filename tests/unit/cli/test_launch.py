"""`drillyard launch`: what is shown before anything is submitted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.facts import says

from drillyard.cli import main as cli

RUN = """
name: {name}
model: {{config: {{architecture: llama, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: 64,
  intermediate_size: {intermediate}}}, init: random}}
data: {{source: /data/rows.jsonl, sequence_length: 4096, tokenizer: {{train: bpe, vocab_size: 32000}}}}
training: {{steps: 10, micro_batch_size: 1, optimizer: {{learning_rate: 1.0e-3}}}}
"""  # noqa: E501
LOCAL = "name: here\nplatform: local\n"
SLURM = """
name: lab
platform: slurm
machine: a3-megagpu-8g
nodes: {nodes}
storage: {{directory: /mnt/shared}}
slurm: {{partition: main, directory: /home/me/project}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("run.yaml").write_text(RUN.format(name="small", width=256, layers=2, intermediate=512))
    Path("cluster.yaml").write_text(LOCAL)
    return tmp_path


class Said:
    """What `drillyard launch run.yaml ARGUMENTS` printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        self.code: int | str = 0
        try:
            cli.main(["launch", "run.yaml", *arguments])
        except SystemExit as ended:
            self.code = ended.code or 0
        self.out, self.err = capsys.readouterr()


Capture = pytest.CaptureFixture[str]


def test_a_dry_run_repeats_to_the_byte_and_submits_nothing(here: Path, capsys: Capture) -> None:
    first, second = Said(capsys, "--dry-run"), Said(capsys, "--dry-run")
    assert first.code == 0 and first.out == second.out
    assert "local://here/small: 1 node x 1 rank" in first.out
    assert sorted(path.name for path in here.iterdir()) == ["cluster.yaml", "run.yaml"]


def test_the_plan_as_json_is_the_plan(here: Path, capsys: Capture) -> None:
    plan = json.loads(Said(capsys, "--dry-run", "--json").out)
    assert set(plan) == {
        "handle",
        "nodes",
        "processes_per_node",
        "run_directory",
        "launch_directory",
        "code",
        "files",
        "steps",
        "fields",
        "warnings",
        "script",
    }
    assert plan["handle"] == "local://here/small"
    assert (plan["nodes"], plan["processes_per_node"]) == (1, 1)
    assert plan["run_directory"] == str(here / "runs" / "small")
    assert (
        json.loads(next(file["content"] for file in plan["files"] if file["path"] == "job.json"))[
            "nodes"
        ]
        == 1
    )
    assert all(step["purpose"] for step in plan["steps"])


def test_every_line_of_explain_has_a_source(here: Path, capsys: Capture) -> None:
    Path("cluster.yaml").write_text(SLURM.format(nodes=2))
    text = Said(capsys, "--explain").out
    assert text.count("    why:") == text.count("    source:") > 20
    assert "environment: NCCL_" in text and "--nodes" in text


def test_a_run_that_cannot_fit_is_not_submitted(here: Path, capsys: Capture) -> None:
    Path("run.yaml").write_text(
        RUN.format(name="large", width=16384, layers=126, intermediate=53248)
    )
    Path("cluster.yaml").write_text(SLURM.format(nodes=1))
    said = Said(capsys)
    assert said.code == 2
    assert says(said.err, "Estimate: ... not fit")
    assert says(said.err, "large: ... not fit ... a3-megagpu-8g")
    assert not (here / "xdg_config_home").exists()


def test_a_sweep_has_one_plan_per_point_with_its_own_name_and_setting(
    here: Path, capsys: Capture
) -> None:
    Path("cluster.yaml").write_text(SLURM.format(nodes=2))
    plans = json.loads(Said(capsys, "--dry-run", "--json", "--sweep", "training.seed=1,2").out)
    assert [plan["handle"] for plan in plans] == [
        "slurm://lab/small-seed-1",
        "slurm://lab/small-seed-2",
    ]
    configs = [
        next(file["content"] for file in plan["files"] if file["path"] == "run.yaml")
        for plan in plans
    ]
    assert "seed: 1\n" in configs[0] and "seed: 2\n" in configs[1]


def test_output_is_refused_nothing_that_a_dry_run_shows(here: Path, capsys: Capture) -> None:
    assert Said(capsys, "--output", "out").code == 0
    shown = json.loads(Said(capsys, "--dry-run", "--json").out)
    for file in shown["files"]:
        assert (here / "out" / "launch" / file["path"]).read_text() == file["content"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "missing.yaml"], "missing.yaml: ... no such file"),
        (["--sync"], "--sync: ... local"),
        (["--after", "slurm://lab/first"], "--after: ... local"),
        (
            ["--sweep", "training.seed=1,2"],
            "--sweep: ... local ... queue ... slurm, kubernetes, gke, vertex",
        ),
        (["--sweep", "training.seed"], "has no key"),
        (["--sweep", "training.sede=1,2"], "training.sede"),
        (["--set", "name=UPPER"], "name"),
    ],
)
def test_what_is_refused(here: Path, capsys: Capture, arguments: list[str], said: str) -> None:
    refused = Said(capsys, *arguments)
    assert refused.code == 2 and says(refused.err, said)
    assert not (here / "runs").exists() and not (here / "xdg_state_home").exists()


@pytest.mark.parametrize("platform", ["gce", "nebius"])
def test_a_platform_without_a_launcher_is_reported_before_what_its_config_lacks(
    here: Path, capsys: Capture, platform: str
) -> None:
    Path("cluster.yaml").write_text(f"name: lab\nplatform: {platform}\n")
    said = Said(capsys)
    fix = "drillyard cluster up cluster.yaml --write"
    assert said.code == 2 and says(said.err, f"{platform} ... {fix} ... local, ssh")
    assert "missing" not in said.err
    # What is no platform at all is the config's mistake.
    Path("cluster.yaml").write_text("name: lab\nplatform: mars\n")
    assert "cluster.yaml:2: platform: found 'mars'" in Said(capsys).err
