"""`drillyard estimate`: what it answers, what bad input gets, and what it does not import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from tests.facts import says
from tests.unit.ended_command import Ended, run_command

from drillyard.cli import main as cli
from drillyard.config.load import load_run_config
from drillyard.estimation.document import EstimateDocument, SweepDocument

RECIPE = Path(__file__).parents[3] / "recipes" / "llama31-70b-b200"
RUN = """\
name: small
model:
  init: random
  config: {architecture: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 8,
           num_attention_heads: 16, num_key_value_heads: 8, vocab_size: 32000}
data: {source: builtin:python-stdlib, sequence_length: 2048, tokenizer: tokenizer}
training: {steps: 1000, micro_batch_size: 4, optimizer: {learning_rate: 1.0e-3}}
"""
CLUSTER = """\
name: c
platform: gce
location: {project: p, zone: us-central1-b}
machine: a3-megagpu-8g
nodes: 2
consumption: spot
"""
EXTRAS = [
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "peft",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "jinja2",
    "zstandard",
    "huggingface_hub",
]


@pytest.fixture
def estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run the command in a directory with run.yaml and cluster.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("run.yaml").write_text(RUN)
    Path("cluster.yaml").write_text(CLUSTER)

    def call(*arguments: object, run: object = "run.yaml") -> Ended:
        return run_command(capsys, "estimate", run, *arguments)

    return call


def refused(message: Ended) -> str:
    """The message of a user's mistake: at most two lines and exit code 2, with nothing on
    stdout."""
    assert (message.code, message.out) == (2, ""), message.out
    lines = message.err.splitlines()
    assert lines[0].startswith("error: ") and len(lines) <= 2, message.err
    return message.err.removeprefix("error: ")


def test_the_recipe_of_16_b200s_fits_and_holds_the_published_step_time_and_cost(
    estimate: Any,
) -> None:
    message = estimate(
        "--cluster",
        RECIPE / "cluster.yaml",
        "--config",
        RECIPE / "config.json",
        "--price-per-gpu-hour",
        8.05,
        "--without-source",
        "torch-distributed-training-gke",
        "--json",
        run=RECIPE / "run.yaml",
    )
    assert message.code == 0
    value = EstimateDocument.model_validate(message.json)
    assert value.verdict == "fits" and value.model.parameters == 70_553_706_496
    assert (value.setup.activation_checkpointing, value.setup.micro_batch_size) == ("full", 8)
    assert value.step_time is not None and value.cost is not None
    assert value.step_time.seconds.low.value < 14.5 < value.step_time.seconds.high.value
    assert value.cost.usd_per_step.low.value < 0.52 < value.cost.usd_per_step.high.value


def test_a_cluster_config_tells_the_place(estimate: Any) -> None:
    value = EstimateDocument.model_validate(estimate("--cluster", "cluster.yaml", "--json").json)
    assert (value.place.machine, value.place.gpus, value.place.consumption) == (
        "a3-megagpu-8g",
        16,
        "spot",
    )
    assert value.cost is not None and value.cost.bought == "spot, us-central1"
    assert any(quota.amount == 16 for quota in value.quotas)


def test_flags_come_before_the_cluster_config(estimate: Any) -> None:
    message = estimate(
        "--cluster",
        "cluster.yaml",
        "--machine",
        "a4-highgpu-8g",
        "--nodes",
        4,
        "--region",
        "us-east4",
        "--json",
    )
    value = EstimateDocument.model_validate(message.json)
    assert (value.place.machine, value.place.nodes, value.place.region) == (
        "a4-highgpu-8g",
        4,
        "us-east4",
    )
    assert value.cost is not None and value.cost.bought == "spot, us-east4"
    bought = EstimateDocument.model_validate(
        estimate("--cluster", "cluster.yaml", "--consumption", "on-demand", "--json").json
    )
    assert bought.cost is not None and bought.cost.bought.startswith("on-demand")


def test_a_machine_or_an_accelerator_is_place_enough(estimate: Any) -> None:
    machine = estimate("--machine", "a3-megagpu-8g", "--nodes", 2)
    assert machine.code == 0 and "on 2 x a3-megagpu-8g (16 h100)" in machine.out
    alone = estimate("--accelerator", "h100", "--num-gpus", 8)
    assert alone.code == 0 and "on 8 x h100" in alone.out


def test_settings_of_the_run_can_be_changed(estimate: Any) -> None:
    message = estimate(
        "--machine", "a3-megagpu-8g", "--set", "training.micro_batch_size=2", "--json"
    )
    assert message.json["setup"]["micro_batch_size"] == 2


def test_what_does_not_fit_exits_with_1_and_is_an_answer(estimate: Any) -> None:
    message = estimate("--machine", "a3-megagpu-8g", "--set", "training.micro_batch_size=8192")
    assert message.code == 1 and "DOES NOT FIT" in message.out and "fits with" in message.out


def test_own_hardware_and_prices_come_from_a_flag_or_from_beside_the_cluster_config(
    estimate: Any, tmp_path: Path
) -> None:
    own = tmp_path / "facts" / "own.yaml"
    own.parent.mkdir()
    own.write_text(
        "machines: [{name: mine, accelerator: h100, num_accelerators: 4, network_stack:"
        " infiniband}]\nprices: [{machine: mine, consumption: on-demand, usd_per_gpu_hour: 1.5}]\n"
    )
    by_flag = EstimateDocument.model_validate(
        estimate("--machine", "mine", "--hardware", own, "--json").json
    )
    Path("cluster.yaml").write_text(
        "name: c\nplatform: ssh\nssh: {hosts: [a]}\nmachine: mine\nhardware: facts/own.yaml\n"
    )
    by_config = EstimateDocument.model_validate(
        estimate("--cluster", "cluster.yaml", "--json").json
    )
    for value in (by_flag, by_config):
        assert value.place.gpus == 4 and value.cost is not None
        assert (
            value.cost.usd_per_gpu_hour.value == 1.5
            and value.cost.usd_per_gpu_hour.source == str(own)
        )


def test_a_sweep_prints_a_table_and_writes_its_plot(estimate: Any) -> None:
    message = estimate(
        "--machine",
        "a3-megagpu-8g",
        "--sweep",
        "nodes=1..4..x2",
        "--sweep",
        "micro_batch_size=1,4",
        "--plot",
        "plot.svg",
    )
    assert message.code == 0 and message.out.count(" fits ") == 6 and "Pareto front" in message.out
    assert ElementTree.fromstring(Path("plot.svg").read_text()).tag.endswith("svg")
    one = ("--machine", "a3-megagpu-8g", "--sweep", "nodes=1")
    assert estimate(*one, "--plot", "plot.svg").code == 0
    Path("mine.svg").write_text("<svg/>")
    refused = estimate(*one, "--plot", "mine.svg")
    assert (
        refused.code == 2
        and "--overwrite" in refused.err
        and Path("mine.svg").read_text() == "<svg/>"
    )
    assert estimate(*one, "--plot", "mine.svg", "--overwrite").code == 0
    printed = estimate("--machine", "a3-megagpu-8g", "--sweep", "nodes=1,2", "--json")
    assert [point.values for point in SweepDocument.model_validate(printed.json).points] == [
        {"nodes": 1},
        {"nodes": 2},
    ]


def test_a_learning_rate_is_not_needed_and_train_shows_what_to_write(
    estimate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("run.yaml")
    content = yaml.safe_load(run.read_text())
    del content["training"]["optimizer"]
    run.write_text(yaml.safe_dump(content))
    assert estimate("--machine", "a3-megagpu-8g", "--json").json["verdict"] == "fits"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "run.yaml"])
    (line,) = capsys.readouterr().err.splitlines()
    content["training"] |= yaml.safe_load(line.split("`")[1])
    run.write_text(yaml.safe_dump(content))
    load_run_config(run)


TYPED = {
    "--storage-gb-per-s": 5,
    "--price-per-gpu-hour": 2.5,
    "--price-per-node-hour": 20,
    "--data-tokens": "10B",
    "--preemptions-per-node-day": 0.1,
    "--host-device-gb-per-s": 50,
    "--config": "config.json",
}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--accelerator", "h100", "--num-gpus", 16),
        ("--accelerator", "h100", "--num-gpus", 16, "--simulate", "--storage-gb-per-s", 5),
        (
            "--machine",
            "a3-megagpu-8g",
            "--set",
            "training.steps=null",
            "--set",
            "training.epochs=2",
        ),
        ("--machine", "a3-megagpu-8g", "--consumption", "spot"),
        ("--machine", "a3-megagpu-8g", "--region", "mars-north1"),
        ("--machine", "a3-megagpu-8g", "--params", "7B"),
    ],
)
def test_every_flag_that_is_said_to_give_what_is_missing_gives_it(
    estimate: Any, arguments: tuple[object, ...]
) -> None:
    content = yaml.safe_load(RUN)["model"]["config"]
    Path("config.json").write_text(json.dumps({**content, "model_type": content["architecture"]}))
    missing = estimate(*arguments, "--json").json["missing"]
    flags = [
        (one["what"], flag)
        for one in missing
        for flag in re.findall(r"--[a-z-]+", one["give"])
        if flag in TYPED
    ]
    assert flags or "--simulate" in arguments
    for what, flag in flags:
        kept = arguments if flag != "--config" else arguments[:2]
        left = estimate(*kept, flag, TYPED[flag], "--json").json["missing"]
        assert what not in [one["what"] for one in left], flag


@pytest.mark.slow
def test_a_simulation_is_the_same_with_the_same_seed(estimate: Any) -> None:
    arguments = (
        "--machine",
        "a3-megagpu-8g",
        "--nodes",
        64,
        "--set",
        "training.steps=300000",
        "--simulate",
        "--json",
    )
    once, again, other = (
        estimate(*arguments, "--seed", seed).json["simulation"] for seed in (1, 1, 2)
    )
    assert once == again and once["goodput"] != other["goodput"]


def test_the_explanation_names_formulas_and_sources(estimate: Any) -> None:
    message = estimate("--machine", "a3-megagpu-8g", "--explain")
    assert says(message.out, "left open") and "sources" in message.out and "Daly" in message.out
    assert "M e^(R/M) [e^(D/M) sum(e^((tau+C)/M) - 1) + e^(D/M) - 1]" in " ".join(
        message.out.split()
    )


def test_a_run_of_ones_own_is_what_speed_is_drawn_from(estimate: Any) -> None:
    own = Path("runs/mine")
    own.mkdir(parents=True)
    (own / "run.yaml").write_text(RUN)
    event = {
        "time": "2026-01-01T00:00:00.000000Z",
        "event": "parameters",
        "count": 1,
        "accelerator": "h100",
    }
    (own / "events.jsonl").write_text(json.dumps(event) + "\n")
    steps = ({"step": step, "step_seconds": 0.25, "num_gpus": 8} for step in range(1, 31))
    (own / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    message = estimate("--machine", "a3-megagpu-8g", "--calibrate", own, "--json")
    value = EstimateDocument.model_validate(message.json)
    assert value.step_time is not None and value.step_time.basis == "calibration"
    assert value.step_time.seconds.low.value < 0.25 < value.step_time.seconds.high.value
    assert [row.name for row in value.step_time.measured_rows] == ["mine"]


def test_an_unknown_family_is_estimated_by_its_counts_or_built(estimate: Any) -> None:
    unknown = ("--machine", "a3-megagpu-8g", "--set", "model.config.architecture=unheard-of")
    assert says(refused(estimate(*unknown)), "shapes")
    message = estimate(*unknown, "--params", "1.3B", "--active-params", "0.4B", "--json").json
    assert (message["model"]["parameters"], message["model"]["active_parameters"]) == (
        1_300_000_000,
        400_000_000,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not JSON: line 1"),
        ('{"model_type": "qwen2"', "config.json: not JSON"),
        ('{"hidden_size": 64}', "config.json: model_type ... missing"),
        ('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": "64"}', "hidden_size"),
        (
            (
                '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,'
                ' "num_attention_heads": 7}'
            ),
            "7 attention heads",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(estimate: Any, content: str, message: str) -> None:
    Path("config.json").write_text(content)
    assert says(refused(estimate("--machine", "a3-megagpu-8g", "--config", "config.json")), message)


PLACED = ("--machine", "a3-megagpu-8g")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--cluster FILE ... --machine M --nodes N ... --accelerator A --num-gpus N"),
        (("--machine", "a3-mega"), "machine 'a3-mega' ... a3-megagpu-8g"),
        (("--machine", "zzzzz"), "--hardware FILE"),
        (("--accelerator", "h1000", "--num-gpus", 8), "accelerator 'h1000' ... h100"),
        (("--accelerator", "h100"), "--num-gpus ... missing"),
        (("--accelerator", "h100", "--num-gpus", 8, "--nodes", 2), "--accelerator ... --nodes"),
        (("--num-gpus", 8, *PLACED), "--num-gpus ... --accelerator"),
        ((*PLACED, "--nodes", 0), "nodes ... 0 ... 1"),
        (("--cluster", "cluster.yaml", "--nodes", -1), "nodes ... -1"),
        ((*PLACED, "--consumption", "spott"), "--consumption spott ... spot"),
        (("--machine", "a4-highgpu-8g", "--consumption", "on-demand"), "'on-demand'"),
        ((*PLACED, "--price-per-gpu-hour", 0), "GPU-hour ... 0"),
        ((*PLACED, "--price-per-node-hour", -3), "node-hour ... -3"),
        ((*PLACED, "--price-per-node-hour", "nan"), "node-hour ... nan"),
        ((*PLACED, "--price-per-node-hour", 1, "--price-per-gpu-hour", 1), "one of them"),
        ((*PLACED, "--set", "parallelism.shard=3"), "shard 3 x replicate 1"),
        ((*PLACED, "--set", "parallelism.replicate=3"), "8 ... replicate 3"),
        ((*PLACED, "--set", "model.config.num_attention_heads=7"), "7 attention heads"),
        ((*PLACED, "--set", "model.config.num_hidden_layers=0"), "num_hidden_layers"),
        ((*PLACED, "--set", "training.stepz=1"), "unknown key ... 'steps'"),
        (
            (*PLACED, "--sweep", "nodes=1..1000", "--sweep", "micro_batch_size=1..1000"),
            "1,000,000 points",
        ),
        ((*PLACED, "--sweep", "node=1"), "'node' ... nodes"),
        ((*PLACED, "--sweep", "nodes=1", "--simulate"), "--simulate ... --explain"),
        ((*PLACED, "--plot", "x.svg"), "give --sweep too"),
        ((*PLACED, "--params", "8B", "--build"), "--build ... --params"),
        (
            (*PLACED, "--sweep", "nodes=1", "--plot", "no/such/dir.svg"),
            "no/such/dir.svg: ... written",
        ),
        ((*PLACED, "--failure-rate", "lama3"), "failure rate 'lama3' ... llama3"),
        ((*PLACED, "--failure-rate", -1), "failures per 1,000 node-days is -1"),
        ((*PLACED, "--restart-seconds", -1), "start_seconds is -1"),
        ((*PLACED, "--preemptions-per-node-day", -1), "preemptions ... -1"),
        ((*PLACED, "--storage-gb-per-s", 0), "GB/s ... 0"),
        ((*PLACED, "--params", "many"), "--params many: ... 0"),
        ((*PLACED, "--params", "0"), "--params 0: ... 0"),
        ((*PLACED, "--active-params", "1B"), "give --params too"),
        ((*PLACED, "--data-tokens", "-3T"), "--data-tokens -3T: ... 0"),
        ((*PLACED, "--without-source", "torchtitann"), "torchtitan"),
        ((*PLACED, "--hardware", "nothing.yaml"), "nothing.yaml:"),
        ((*PLACED, "--config", "nothing.json"), "nothing.json:"),
        ((*PLACED, "--calibrate", "nothing"), "no run.yaml there"),
        (("--cluster", "nothing.yaml"), "nothing.yaml"),
        ((*PLACED, "--set", "model={id: a/b}"), "Hugging Face cache"),
    ],
)
def test_bad_input_gets_an_error_of_one_or_two_lines(
    estimate: Any, arguments: tuple[object, ...], message: str
) -> None:
    assert says(refused(estimate(*arguments)), message)


@pytest.mark.parametrize(
    ("written", "wrong", "message"),
    [
        ("machine: a3", "machine: b3", "cluster.yaml:4: machine: ... 'b3-megagpu-8g' ... mean"),
        (
            "a3-megagpu-8g",
            "a4x-highgpu-4g",
            "cluster.yaml:6: consumption: a4x-highgpu-4g ... 'spot'",
        ),
        ("nodes: 2", "nodes: 0", "cluster.yaml:5: nodes: found 0"),
        ("name: c", "hardware: 3\nname: c", "cluster.yaml:1: hardware"),
        ("platform: gce", "platform: nebius", "a3-megagpu-8g ... Google Cloud"),
        ("machine: a3-megagpu-8g\n", "", "cluster.yaml: machine: missing"),
    ],
)
def test_a_mistake_in_the_cluster_config_is_reported_at_its_line(
    estimate: Any, written: str, wrong: str, message: str
) -> None:
    Path("cluster.yaml").write_text(
        CLUSTER.replace("zone: us-central1-b", "region: r, zone: z").replace(written, wrong)
    )
    assert says(refused(estimate("--cluster", "cluster.yaml")), message)


def run_without(modules: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process where `modules` cannot be imported."""
    code = (
        "import sys\n"
        f"for name in {modules!r}: sys.modules[name] = None\n"
        "from drillyard.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code, "estimate", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.slow
def test_it_needs_nothing_but_the_core_for_a_run_on_1024_nodes(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    place = ("--machine", "a3-ultragpu-8g", "--nodes", "1024")
    ended = run_without(EXTRAS, str(run), *place, "--simulate", "--explain")
    assert ended.returncode == 0, ended.stderr
    assert "1024 x a3-ultragpu-8g (8192 h200)" in ended.stdout
    ended = run_without(EXTRAS, str(run), *place, "--sweep", "nodes=1,1024")
    assert ended.returncode == 0, ended.stderr


def test_to_build_a_model_without_torch_is_refused_with_what_to_install(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    ended = run_without(["torch"], str(run), *PLACED, "--build")
    assert ended.returncode == 2
    assert says(ended.stderr, "--build ... torch ... pip install 'drillyard[train]'")
