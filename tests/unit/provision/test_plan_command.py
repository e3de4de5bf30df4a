"""`drillyard cluster plan`: what it shows, what it writes, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.facts import says
from tests.unit.ended_command import Ended, run_command

from drillyard.hardware import catalog
from drillyard.hardware.machines import Consumption
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan, PlannedResource
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document, plan_schema
from drillyard.provision.plan_text import plan_text

CLUSTER = """\
name: lab
platform: gke
location: {project: my-project, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: flex-start-queued
image: example.com/image:1
cluster:
  pools:
    - {name: spare, consumption: spot, nodes: 4}
"""
RUN = """\
name: small
model:
  init: random
  config: {architecture: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 8,
           num_attention_heads: 16, num_key_value_heads: 8, vocab_size: 32000}
data: {source: builtin:python-stdlib, sequence_length: 2048, tokenizer: tokenizer}
training: {steps: 1000, micro_batch_size: 4, optimizer: {learning_rate: 1.0e-3}}
"""
POOL = "lab-flex-start-queued"


@pytest.fixture
def drillyard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run a command in a directory with cluster.yaml and run.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("cluster.yaml").write_text(CLUSTER)
    Path("run.yaml").write_text(RUN)

    def call(*arguments: object) -> Ended:
        return run_command(capsys, *arguments)

    return call


@pytest.fixture
def plan(drillyard: Any) -> Any:
    return lambda *arguments: drillyard("cluster", "plan", "cluster.yaml", *arguments)


def test_the_text_names_pools_things_prices_quotas_and_what_comes_next(plan: Any) -> None:
    shown = plan()
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert says(lines, f"{POOL} ... a4-highgpu-8g ... 0 to 2 ... us-central1-b ... 64.40?")
    assert says(lines, "spare ... a4-highgpu-8g ... spot ... 4 ... 39.63")
    assert says(lines, "state ... 1 ... my-project-lab-tfstate")
    assert says(lines, "networks ... 3 ... lab, lab-gvnic-1, lab-rdma")
    assert says(lines, "node pools ... 3 ... cpu")
    assert says(lines, "lab/pods ... 100.64.0.0/")
    assert says(lines, f"* {POOL}: 2 x a4-highgpu-8g ... 128.80? ... 3,091.20?")
    assert says(lines, "spare: 4 x a4-highgpu-8g ... 158.53")
    idle, full = (
        float(next(line for line in lines if line.startswith(title)).split()[-2].rstrip("?"))
        for title in ("while idle", "at full size")
    )
    assert full - idle == pytest.approx(128.80 + 2 * 200 * 0.08 / 730 + 2 * 0.0014, abs=0.011)
    assert says(shown.out, "oldest price ... 2025-09-09")
    assert says(lines, "48 GPUs of PREEMPTIBLE_NVIDIA_B200_GPUS in us-central1")
    assert lines[-1] == "next: drillyard cluster up cluster.yaml"


def test_the_same_config_gives_the_same_text_byte_for_byte_without_colors(plan: Any) -> None:
    for arguments in ((), ("--json",)):
        one, other = plan(*arguments), plan(*arguments)
        assert one.out == other.out
        assert "\x1b" not in one.out


def test_a_thousand_nodes_are_planned_as_fast_as_two(plan: Any) -> None:
    shown = plan("--set", "nodes=1000", "--json")
    assert shown.json["pools"][0]["nodes"] == 1000
    assert len(shown.json["resources"]) == len(plan("--json").json["resources"])


def test_the_document_follows_its_schema_and_has_terraforms_own(drillyard: Any, plan: Any) -> None:
    document = plan("--json").json
    ClusterPlanDocument.model_validate(document)
    assert (document["kind"], document["version"]) == ("cluster-plan", 1)
    assert [pool["name"] for pool in document["pools"]] == [POOL, "spare"]
    made = {
        f"{kind}.{label}"
        for kind, labels in document["terraform"]["resource"].items()
        for label in labels
    }
    assert {each["address"] for each in document["resources"] if each["address"]} == made
    price = document["price"]
    lines = [line["usd_per_hour"]["value"] for line in price["lines"]]
    assert price["full"]["value"] == pytest.approx(sum(lines))
    assert price["unknown"] == []
    assert {each["unit"] for each in price["by_use"]} == {"GiB", "GiB and month"}
    assert any(each["metric"] == "HDB_TOTAL_GB" for each in document["quotas"])
    schema = drillyard("schema", "cluster-plan").json
    assert schema == json.loads(json.dumps(plan_schema()))
    assert set(schema["required"]) == set(document)


def test_a_price_of_ones_own_is_that_of_up_too(plan: Any) -> None:
    shown = plan("--price", "spare=40", "--set", "nodes=3")
    assert says(shown.out, "spare: 4 x a4-highgpu-8g ... 160.00")
    assert shown.out.splitlines()[-1] == (
        "next: drillyard cluster up cluster.yaml --set nodes=3 --price spare=40"
    )


UNPRICED = ("--set", "machine=a4x-highgpu-4g", "--set", "consumption=reservation")
UNPRICED += ("--set", "reservation=mine", "--set", "cluster.pools=[]")


def test_a_price_that_is_not_known_is_not_guessed_and_the_way_to_give_it_works(plan: Any) -> None:
    shown = plan(*UNPRICED)
    assert shown.code == 0
    assert says(shown.out, "while idle, at least ... at full size, at least")
    far = plan("--set", "location.zone=europe-west4-b", "--set", "location.region=europe-west4")
    assert far.out.count("part: hyperdisk-balanced, region: europe-west4") == 1
    option = shown.out.splitlines()[-1].partition("--price ")[2]
    assert option == "lab-reservation=USD"
    given = plan(*UNPRICED, "--price", option.replace("USD", "20"))
    assert "not known" not in given.out
    Path("own.yaml").write_text(
        re.search(r"prices: \[.*\]", shown.out)[0].replace("USD", "20")  # type: ignore[index]
    )
    assert "not known" not in plan(*UNPRICED, "--hardware", "own.yaml").out
    Path("cluster.yaml").write_text(CLUSTER + "hardware: own.yaml\n")
    assert "not known" not in plan(*UNPRICED).out


def test_the_command_that_comes_next_gives_every_price_of_nodes(plan: Any) -> None:
    """Of a region without prices those of all pools and of the controllers; typed, it works."""
    far = ("--set", "location.zone=me-central2-a", "--set", "location.region=me-central2")
    shown = plan(*far).out.splitlines()[-1]
    assert says(shown, f"--price cpu=USD --price {POOL}=USD --price spare=USD")
    typed = shlex.split(shown.replace("USD", "3").partition("cluster.yaml ")[2])
    lines = plan("--json", *typed).json["price"]["lines"]
    unknown = [line["what"] for line in lines if line["usd_per_hour"] is None]
    assert unknown
    assert all("disks" in what for what in unknown)


def test_a_file_is_no_place_for_a_plan(plan: Any) -> None:
    Path("taken").write_text("mine")
    for place in ("taken", "taken/plan"):
        ended = plan("--output", place)
        assert (ended.code, ended.out) == (2, "")
        assert says(ended.err, "taken ... is a file ... such as taken-plan")
    assert Path("taken").read_text() == "mine"
    assert plan("--output", "taken-plan").code == 0


def test_an_estimate_of_the_same_file_has_the_same_price(drillyard: Any, plan: Any) -> None:
    Path("own.yaml").write_text(
        "prices: [{machine: a4-highgpu-8g, consumption: flex-start, usd_per_node_hour: 70}]\n"
    )
    own = ("--hardware", "own.yaml")
    for planned, estimated in (
        ((), ()),
        (own, own),
        (("--price", f"{POOL}=33"), ("--price-per-node-hour", "33")),
    ):
        (line,) = [
            line for line in plan("--json", *planned).json["price"]["lines"] if line["pool"] == POOL
        ]
        cost = drillyard(
            "estimate", "run.yaml", "--cluster", "cluster.yaml", "--json", *estimated
        ).json["cost"]
        assert line["usd_per_hour"]["value"] == cost["usd_per_hour"]["value"]
        assert line["usd_per_hour"]["date"] == cost["usd_per_hour"]["date"]


def test_quotas_of_an_estimate_and_a_plan_are_the_same(drillyard: Any, plan: Any) -> None:
    planned = {each["metric"]: each["amount"] for each in plan("--json").json["quotas"]}
    estimated = drillyard("estimate", "run.yaml", "--cluster", "cluster.yaml", "--json").json
    for each in estimated["quotas"]:
        assert planned[each["metric"]] == each["amount"], each["metric"]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("nodes=0", "nodes ... 0"),
        ("machine=a4-high", "machine ... a4-high ... a4-highgpu-8g"),
        ("machine=p5.48xlarge", "p5.48xlarge"),
        ("consumption=on-demand", "on-demand ... reservation, spot"),
        ("location.zone=null", "location.zone"),
        ("location.project=null", "location.project"),
        ("cluster.cpu_pool.machine=e2-standard-15", "cluster.cpu_pool.machine ... e2-standard-16"),
        ("cluster.pools=[{consumption: flex-start-queued, nodes: 1}]", "cluster.pools.0.name"),
        ("cluster.pools=[{consumption: spot, nodes: 0}]", "cluster.pools ... nodes"),
        ("cluster.state_bucket=A", "cluster.state_bucket"),
        (
            "cluster.ranges.nodes=10.0.0.1/20",
            "cluster.ranges.nodes ... 10.0.0.1/20 ... 10.0.0.0/20",
        ),
    ],
)
def test_a_config_that_cannot_be_made_is_one_error(plan: Any, change: str, facts: str) -> None:
    ended = plan("--set", change)
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, facts)
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("name: lab\nplatform: local\n", "local ... gke"),
        ("name: lab\nplatform: slurm\nslurm: {partition: gpu}\n", "slurm ... gke"),
        ("", "cluster.yaml"),
        ("- a\n", "cluster.yaml"),
        ("name: [", "cluster.yaml"),
    ],
)
def test_a_file_of_something_else_is_one_error(plan: Any, text: str, facts: str) -> None:
    Path("cluster.yaml").write_text(text)
    ended = plan()
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, facts)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--price", "3"), "--price lab-flex-start-queued=3 ... --price spare=3"),
        (("--price", "spare=0"), "spare=0 ... above 0"),
        (("--price", "0"), "--price 0 ... above 0"),
        (("--hardware", "none.yaml"), "none.yaml"),
        (("--overwrite",), "--overwrite ... --output"),
        (("--explain", "--json"), "--explain ... --json"),
        (("--set", "nodes"), "nodes"),
    ],
)
def test_options_that_cannot_be_are_one_error(
    plan: Any, arguments: tuple[str, ...], facts: str
) -> None:
    ended = plan(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, facts)


def test_a_missing_file_is_one_error(drillyard: Any) -> None:
    ended = drillyard("cluster", "plan", "none.yaml")
    assert ended.code == 2
    assert says(ended.err, "none.yaml")


def test_the_directory_has_terraforms_files_and_the_steps(plan: Any, tmp_path: Path) -> None:
    assert plan("--output", "out").code == 0
    out = tmp_path / "out"
    document = json.loads((out / "main.tf.json").read_text())
    assert document == plan("--json").json["terraform"]
    assert "backend" not in document["terraform"]
    backend = json.loads((out / "backend.tf.json").read_text())
    assert backend["terraform"]["backend"] == {
        "gcs": {"bucket": "my-project-lab-tfstate", "prefix": "lab"}
    }
    script = (out / "apply.sh").read_text()
    assert os.access(out / "apply.sh", os.X_OK)
    assert not [line for line in script.splitlines() if line.startswith("drillyard ")]
    order = ["services enable", "buckets create", "--versioning"]
    # `up` and `down` know their buckets by the label.
    order += ["--update-labels=drillyard-cluster=lab", "terraform init"]
    order += ["terraform apply", "get-credentials lab"]
    places = [script.index(each) for each in order]
    assert places == sorted(places)
    subprocess.run(["sh", "-n", str(out / "apply.sh")], check=True)
    # The same plan again changes nothing.
    assert plan("--output", "out").code == 0


def test_only_a_plan_of_ours_is_replaced(plan: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "main.tf.json").write_text("mine")
    ended = plan("--output", "other", "--overwrite")
    assert ended.code == 2
    assert (other / "main.tf.json").read_text() == "mine"
    assert plan("--output", "out").code == 0
    ended = plan("--output", "out", "--set", "nodes=3")
    assert ended.code == 2
    assert "--overwrite" in ended.err
    assert plan("--output", "out", "--set", "nodes=3", "--overwrite").code == 0


class FakePrograms:
    """Programs on PATH that write their arguments to a file, in the order in which they start."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "calls"
        self.bin = directory / "bin"
        self.bin.mkdir()
        for name in ("gcloud", "terraform", "helm"):
            path = self.bin / name
            path.write_text(
                f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n'
                'case "$*" in *describe*) exit 1;; esac\n'
            )
            path.chmod(0o755)

    def calls(self, script: Path) -> list[str]:
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        subprocess.run(["sh", str(script)], check=True, env=environment)
        return self.log.read_text().splitlines()


def test_the_script_calls_each_program_with_what_it_needs(tmp_path: Path) -> None:
    own = ChartRelease("run-chart", "runs", "drillyard-run", "0.1.0", {"a": 1})
    theirs = ChartRelease("kueue", "kueue-system", "oci://registry.test/kueue", "0.17.1", {})
    cluster = PlannedResource("google_container_cluster.c", "google_container_cluster", "lab", "r")
    made = {"resource": {"google_storage_bucket": {"runs": {"name": "lab-runs"}}}}
    found = ClusterPlan(
        "lab", "gke", "p", "r", "r-a", (), made, "state", (cluster,), releases=(theirs, own)
    )
    out = tmp_path / "out"
    for path, (text, _) in plan_directory(found, ()).items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)
    assert json.loads((out / "values/run-chart.json").read_text()) == {"a": 1}
    assert (out / "charts/drillyard-run/Chart.yaml").is_file()
    calls = FakePrograms(tmp_path).calls(out / "apply.sh")
    assert [call.split()[0] for call in calls] == [
        *["gcloud"] * 3,
        *["terraform"] * 2,
        "gcloud",
    ] + ["helm"] * 2
    assert says(calls[1], "buckets create gs://state --project=p --location=r")
    assert says(calls[5], "get-credentials lab --location=r --project=p")
    assert says(calls[6], "kueue oci://registry.test/kueue --version 0.17.1 ... kueue-system")
    assert says(calls[7], "run-chart charts/drillyard-run --namespace runs")
    assert all("--kube-context gke_p_r_lab" in call for call in calls[6:])
    readme = (out / "README.md").read_text()
    # The way back is in the other order.
    assert readme.index("helm uninstall run-chart") < readme.index("helm uninstall kueue")
    assert readme.index("helm uninstall kueue") < readme.index("terraform destroy")
    # Terraform keeps a bucket that has folders.
    assert "gcloud storage rm --recursive gs://lab-runs\n" in readme


def test_a_plan_of_nothing_but_its_name_can_be_shown() -> None:
    bare = ClusterPlan("lab", "gke", "p", "r", "r-a", (), {}, "state", ())
    assert says(plan_text(bare, (), "c.yaml"), "cluster lab ... state ... next")
    assert plan_document(bare, ()).price.full.value == 0


@pytest.mark.parametrize(
    "machine", [each.name for each in catalog().machines.values() if each.cloud == "gcp"]
)
def test_every_machine_and_mode_is_planned_with_a_price_or_says_what_to_give(
    plan: Any, machine: str
) -> None:
    allowed = catalog().machine(machine).consumption
    for consumption in get_args(Consumption):
        bought = ("--set", f"machine={machine}", "--set", f"consumption={consumption}")
        if consumption in ("reservation", "calendar"):
            bought += ("--set", "reservation=mine")
        ended = plan("--json", "--set", "cluster.pools=[]", *bought)
        if consumption not in allowed:
            # It names the ways of buying that there are.
            assert (ended.code, ended.out) == (2, "")
            assert says(ended.err, f"consumption ... '{consumption}' ... {', '.join(allowed)}")
            continue
        assert ended.code == 0, ended.err
        document = ended.json
        ClusterPlanDocument.model_validate(document)
        (nodes,) = [line for line in document["price"]["lines"] if line["pool"]]
        assert (nodes["usd_per_hour"] is None) == bool(nodes["missing"])
        assert nodes["usd_per_hour"] or "--price lab-" in nodes["missing"]
        if nodes["usd_per_hour"] is not None:
            assert nodes["usd_per_hour"]["value"] > 0
        kinds = [each["kind"] for each in document["resources"]]
        quotas = {each["metric"]: each["amount"] for each in document["quotas"]}
        assert quotas["NETWORKS"] == kinds.count("google_compute_network")
        assert quotas["SUBNETWORKS"] == kinds.count("google_compute_subnetwork")
        assert quotas.get("FIREWALLS", 0) == kinds.count("google_compute_firewall")


def test_a_plan_imports_no_client_of_a_cloud_and_needs_no_terraform(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    program = (
        "import sys\nfrom drillyard.cli import main\n"
        "try:\n    main.main(['cluster', 'plan', 'cluster.yaml'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "clients = {'torch', 'kubernetes', 'googleapiclient', 'google.auth'}\n"
        "loaded = clients & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    assert shutil.which("terraform", path=str(tmp_path)) is None
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
