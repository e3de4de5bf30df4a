"""`drillyard hardware`: the list, one entry in full, JSON, and names that are not known."""

from __future__ import annotations

import json

import pytest
from tests.facts import says

from drillyard.cli import main as cli


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["hardware", *map(str, arguments)])
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


def test_the_list_names_everything_by_kind_and_marks_what_is_unverified(run):
    code, out, _ = run()
    assert code == 0
    lines = out.splitlines()
    starts = [line.split()[0] for line in lines if line]
    for name in (
        "b200",
        "rtx-4090",
        "a4-highgpu-8g",
        "p5en.48xlarge",
        "gpu-b200-sxm",
        "tcpxo",
        "efa",
    ):
        assert name in starts
    assert (
        starts.index("accelerator")
        < starts.index("machine")
        < starts.index("network")
        < starts.index("price")
    )
    assert next(line for line in lines if line.startswith("gb200")).split()[1] == "2,500?"
    assert next(line for line in lines if line.startswith("b200 ")).split()[1] == "2,250"
    assert "? unverified" in out


def test_an_entry_shows_every_value_with_source_and_date(run):
    _, out, _ = run("a4-highgpu-8g")
    assert "machine a4-highgpu-8g\n" in out
    numbered = next(line for line in out.splitlines() if "network_gbps" in line).split()[-1]
    source = next(line for line in out.splitlines() if line.strip().startswith(f"{numbered} "))
    assert "gpu-network-bandwidth, 2026-04-14" in source
    assert next(line for line in out.splitlines() if "storage.aggregate" in line).endswith(
        "unverified"
    )
    assert "all_gather, 2 x 8 GPUs, measured: 1: 15.41" in out
    assert "flex-start, us-central1: $64.40 per node-hour, $8.05 per GPU-hour" in out


def test_an_entry_is_found_by_the_drivers_name(run):
    code, out, _ = run("NVIDIA H100 80GB HBM3")
    assert code == 0
    assert out.startswith("accelerator h100 (also h100-sxm): NVIDIA H100 SXM\n")
    assert "a3-megagpu-8g" in out


def test_a_stack_shows_its_settings_and_machines(run):
    _, out, _ = run("tcpxo")
    assert "profile_environment.NCCL_NVLSTREE_MAX_CHUNKSIZE" in out
    assert "plugin 1.0.14, rxdm 1.0.20" in out
    assert out.rstrip().endswith("a3-megagpu-8g")


def test_a_machine_without_a_known_price_says_so(run):
    assert "none known" in run("p5e.48xlarge")[1]


def test_json_of_an_entry_has_source_date_and_doubt_of_each_value(run):
    value = json.loads(run("b200", "--json")[1])
    assert (value["version"], value["kind"], value["name"]) == (1, "accelerator", "b200")
    assert value["facts"]["peak_tflops.fp4"]["unverified"] is True
    assert value["facts"]["peak_tflops.bf16"]["value"] == 2250
    assert all(fact["source"] and fact["date"] for fact in value["facts"].values())
    assert {row["collective"] for row in value["bandwidths"]} == {"all_reduce"}
    assert "a4-highgpu-8g" in value["machines"]


@pytest.mark.parametrize("name", ["gib", "tcpx", "a4x-highgpu-4g", "cpu"])
def test_every_kind_of_entry_is_valid_json(run, name):
    assert json.loads(run(name, "--json")[1])["name"] == name


def test_json_of_the_list_is_the_whole_catalog(run):
    value = json.loads(run("--json")[1])
    assert value["version"] == 1
    machines = {row["name"]: row for row in value["machines"]}
    assert machines["a4-highgpu-8g"]["data_nics"] == {"count": 8, "gbps": 400}
    assert machines["a4-highgpu-8g"]["sources"]["network_gbps"]["date"] == "2026-04-14"
    assert "storage.aggregate_gb_per_s" in machines["a4-highgpu-8g"]["unverified"]
    for kind in ("accelerators", "machines", "network_stacks", "bandwidths", "prices"):
        assert value[kind]
        assert all(row["source"] and row["date"] for row in value[kind])


def test_an_unknown_name_is_reported_with_the_nearest_ones(run):
    code, out, err = run("a3-mega-8g")
    assert (code, out) == (2, "")
    assert says(err, "'a3-mega-8g' ... a3-megagpu-8g")
    assert "--hardware FILE" in err
    assert "Traceback" not in err


def test_own_hardware_is_shown_with_its_file_as_source(run, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "accelerators: [{name: my-gpu, title: My GPU, memory_gib: 94, unverified: true}]\n"
    )
    _, out, _ = run("my-gpu", "--hardware", own)
    assert "94  [1]  unverified" in out
    assert f"[1] {own}" in out
    assert "my-gpu" in run("--hardware", own)[1]
    assert run("my-gpu")[0] == 2


def test_a_mistake_in_own_hardware_is_reported_with_its_line(run, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("accelerators:\n  - {name: my-gpu}\n")
    code, out, err = run("--hardware", own)
    assert (code, out) == (2, "") and says(err, f"error: {own}:2: accelerators.0.title: missing")
