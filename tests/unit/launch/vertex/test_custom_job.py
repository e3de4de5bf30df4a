"""The request that makes a run a custom job: every field, for every way of buying, as Google's own
type reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Call, Plan
from drillyard.launch.vertex import run_status
from drillyard.launch.vertex.custom_job import label_of
from drillyard.launch.vertex.service import parse_request

RUN = "projects/123/zones/us-central1-b/reservations/"


def vertex(**settings: Any) -> str:
    return cluster("vertex", **{"storage": "{bucket: my-bucket}", **settings})


def plan(cluster_yaml: str, run: str = WORKLOAD, **options: Any) -> Plan:
    asked = request(cluster_yaml, run, **options)
    return launcher_for(asked.cluster).plan(asked)


def body(made: Plan) -> dict[str, Any]:
    (create,) = [step for step in made.steps if isinstance(step, Call) and step.method == "POST"]
    return create.body


def spec(made: Plan) -> dict[str, Any]:
    found: dict[str, Any] = body(made)["jobSpec"]
    return found


def test_chief_and_workers_are_alike_but_for_their_number() -> None:
    chief, workers = spec(plan(vertex(nodes=5)))["workerPoolSpecs"]
    assert (chief.pop("replicaCount"), workers.pop("replicaCount")) == ("1", "4")
    assert chief == workers
    assert chief["machineSpec"] == {
        "machineType": "a3-megagpu-8g",
        "acceleratorType": "NVIDIA_H100_MEGA_80GB",
        "acceleratorCount": 8,
        "reservationAffinity": {"reservationAffinityType": "NO_RESERVATION"},
    }
    launch = "/gcs/my-bucket/runs/nccl/launch"
    assert chief["containerSpec"] == {
        "imageUri": "us-docker.pkg.dev/p/r/i:1",
        "command": ["python3", "-B", f"{launch}/agent", "run", "--job", f"{launch}/job.json"],
    }


def test_one_node_is_a_chief_alone() -> None:
    (chief,) = spec(plan(vertex(nodes=1)))["workerPoolSpecs"]
    assert chief["replicaCount"] == "1"


@pytest.mark.parametrize(
    ("settings", "strategy", "affinity", "wait"),
    [
        (
            {"consumption": "on-demand"},
            "STANDARD",
            {"reservationAffinityType": "NO_RESERVATION"},
            None,
        ),
        ({"consumption": "spot"}, "SPOT", {"reservationAffinityType": "NO_RESERVATION"}, None),
        (
            {"consumption": "flex-start"},
            "FLEX_START",
            {"reservationAffinityType": "NO_RESERVATION"},
            "86400s",
        ),
        (
            {"consumption": "flex-start", "vertex": "{max_wait_hours: 0}"},
            "FLEX_START",
            {"reservationAffinityType": "NO_RESERVATION"},
            "0s",
        ),
        (
            {"consumption": "reservation", "reservation": RUN + "mine"},
            "STANDARD",
            {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [RUN + "mine"],
            },
            None,
        ),
        (
            {
                "consumption": "reservation",
                "reservation": "mine",
                "location": "{project: p, region: us-central1, zone: us-central1-b}",
            },
            "STANDARD",
            {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": ["projects/p/zones/us-central1-b/reservations/mine"],
            },
            None,
        ),
    ],
)
def test_ways_of_buying(
    settings: dict[str, str], strategy: str, affinity: dict[str, Any], wait: str | None
) -> None:
    made = spec(plan(vertex(**settings)))
    assert made["scheduling"]["strategy"] == strategy
    assert made["scheduling"].get("maxWaitDuration") == wait
    for pool in made["workerPoolSpecs"]:
        assert pool["machineSpec"]["reservationAffinity"] == affinity


def test_every_setting_of_the_service_arrives() -> None:
    settings = """{service_account: me@p.iam.gserviceaccount.com, network: projects/12/global/networks/net,
      reserved_ip_ranges: [range-a], tensorboard: projects/12/locations/us-central1/tensorboards/7, timeout_hours: 1.5,
      boot_disk_gb: 900, boot_disk_type: pd-ssd, web_access: true, labels: {team: research}}"""  # noqa: E501
    made = plan(vertex(vertex=settings))
    message = spec(made)
    assert {
        key: message[key] for key in message if key not in ("workerPoolSpecs", "scheduling")
    } == {
        "serviceAccount": "me@p.iam.gserviceaccount.com",
        "network": "projects/12/global/networks/net",
        "reservedIpRanges": ["range-a"],
        "tensorboard": "projects/12/locations/us-central1/tensorboards/7",
        "enableWebAccess": True,
        "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/runs/nccl/"},
    }
    assert message["scheduling"]["timeout"] == "5400s"
    assert message["workerPoolSpecs"][1]["diskSpec"] == {
        "bootDiskType": "pd-ssd",
        "bootDiskSizeGb": 900,
    }
    assert body(made)["labels"]["team"] == "research"
    assert body(made)["displayName"] == "nccl"


def test_googles_type_knows_every_field_and_changes_none() -> None:
    made = body(plan(vertex(consumption="flex-start")))
    again = json.loads(json_format.MessageToJson(CustomJob.pb(parse_request(made))))
    # Proto3's JSON leaves out what is false.
    made["jobSpec"]["scheduling"].pop("disableRetries")
    made["jobSpec"]["scheduling"].pop("restartJobOnWorkerRestart")
    assert again == made


@pytest.mark.parametrize(
    ("wrong", "named"), [({"gpuCount": 8}, "gpuCount"), ({"acceleratorType": "H100"}, "H100")]
)
def test_a_field_or_value_that_googles_type_lacks_is_refused(
    wrong: dict[str, Any], named: str
) -> None:
    made = body(plan(vertex()))
    made["jobSpec"]["workerPoolSpecs"][0]["machineSpec"].update(wrong)
    with pytest.raises(UserError, match=named):
        parse_request(made)


def test_the_run_is_in_the_bucket_and_its_files_are_sent_before_the_request() -> None:
    made = plan(vertex())
    upload, create = made.steps
    assert isinstance(upload, Call)
    assert isinstance(create, Call)
    assert (upload.method, upload.target) == ("upload", "gs://my-bucket/runs/nccl/launch/")
    assert set(upload.sends) == {file.path for file in made.files}
    assert (
        create.target
        == "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/us-central1/customJobs"
    )
    assert json.loads(made.file("custom-job.json").content) == create.body
    job = json.loads(made.file("job.json").content)
    assert job["run_directory"] == "/gcs/my-bucket/runs/nccl"
    # A mount shows another node's file up to a minute late; the lease outlasts that by a renewal
    # and more.
    assert job["lease_seconds"] * (1 - 1 / 8) > 60
    assert job["log_parts"] is True


def test_a_run_of_ours_writes_into_the_bucket() -> None:
    made = plan(vertex(machine="a4-highgpu-8g", consumption="spot"), run=TRAINING_IN_A_PREFIX)
    assert made.run_directory == "/gcs/my-bucket/team/llama-8b"
    assert "output: /gcs/my-bucket/team" in made.file("run.yaml").content


TRAINING_IN_A_PREFIX = """
name: llama-8b
output: gs://my-bucket/team
model: {id: meta-llama/Llama-3.1-8B}
data: {source: org/documents, sequence_length: 4096}
training: {steps: 100, optimizer: {learning_rate: 2.0e-5}}
"""


@pytest.mark.parametrize("output", ["/home/me/runs", "gs://other-bucket/runs", "../../elsewhere"])
def test_an_output_outside_of_the_bucket_is_refused(output: str) -> None:
    with pytest.raises(UserError, match=r"output: .* is not in the bucket my-bucket"):
        plan(vertex(), run=f"{WORKLOAD}output: {output}\n")


def test_plans_repeat_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    config = vertex(environment="{TOKEN: '${env:TOKEN}'}")
    asked = request(config, WORKLOAD)
    made = launcher_for(asked.cluster).plan(asked)
    assert made == launcher_for(asked.cluster).plan(asked)
    assert "hunter2" not in repr(made)
    assert "${env:TOKEN}" in made.file("job.json").content
    assert "TOKEN" not in json.dumps(body(made))
    assert any("secrets.json" in warning for warning in made.warnings)


def test_every_field_of_the_request_has_its_reason() -> None:
    made = plan(vertex(consumption="flex-start", vertex="{web_access: true}"))
    explained = {field.place for field in made.fields}
    for path in _leaves(body(made)):
        name = path.removeprefix("jobSpec.").replace("workerPoolSpecs[0].", "workerPoolSpecs[*].")
        name = name.replace("workerPoolSpecs[1].", "workerPoolSpecs[*].")
        exact = path.removeprefix("jobSpec.")
        assert name in explained or exact in explained, path
    assert all(field.reason and field.source for field in made.fields)


def _leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [
            leaf
            for key, each in value.items()
            for leaf in _leaves(each, f"{path}.{key}" if path else key)
        ]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [
            leaf for number, each in enumerate(value) for leaf in _leaves(each, f"{path}[{number}]")
        ]
    return [path]


@pytest.mark.parametrize(
    ("machine", "kind"), [("a4-highgpu-8g", "NVIDIA_B200"), ("a3-ultragpu-8g", "NVIDIA_H200_141GB")]
)
def test_machines_that_boot_from_hyperdisk_say_so(machine: str, kind: str) -> None:
    pool = spec(plan(vertex(machine=machine, consumption="spot")))["workerPoolSpecs"][0]
    assert pool["diskSpec"]["bootDiskType"] == "hyperdisk-balanced"
    assert pool["machineSpec"]["acceleratorType"] == kind


@given(st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True))
def test_a_run_s_label_is_a_label_and_its_own(name: str) -> None:
    label = label_of(name)
    assert 0 < len(label) <= 63
    assert set(label) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert label == name or "." in name


def test_names_that_differ_in_a_dot_have_different_labels() -> None:
    assert len({label_of(name) for name in ("a.b", "a_b", "a-b")}) == 3


def test_planning_imports_nothing_of_googles() -> None:
    """The client takes a second to import; a dry run needs none of it."""
    code = (
        "import sys\nfrom tests.unit.launch.requests import WORKLOAD, cluster, request\nfrom"
        " drillyard.launch.launcher import launcher_for\nasked = request(cluster('vertex',"
        " storage='{bucket: my-bucket}'),"
        " WORKLOAD)\nlauncher_for(asked.cluster).plan(asked)\nprint([n for n in sys.modules if"
        " n.startswith(('google.cloud.', 'google.api', 'google.auth', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_job_is_the_clusters_where_its_agent_is_in_the_clusters_bucket() -> None:
    made = body(plan(vertex(nodes=2)))
    assert run_status.is_made_here(made, "my-bucket")
    assert not run_status.is_made_here(made, "my") and not run_status.is_made_here(made, "other")
    spec = made["jobSpec"]
    copied = {"command": ["python3", "train.py"], "imageUri": "i"}
    for changed in (
        {**spec, "workerPoolSpecs": [{"containerSpec": copied}, {}]},
        {**spec, "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/runs/other/"}},
        {**spec, "baseOutputDirectory": {}},
        {},
    ):
        assert not run_status.is_made_here({**made, "jobSpec": changed}, "my-bucket")
