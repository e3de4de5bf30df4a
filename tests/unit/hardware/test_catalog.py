"""The whole catalog is consistent: every value has a source, sums add up, nothing exceeds what the
hardware can do."""

from __future__ import annotations

import subprocess
import sys
from datetime import date

import pytest

from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.bandwidths import bus_bandwidth_bound
from drillyard.hardware.capacity import QuotaRule
from drillyard.hardware.catalog import KINDS, packaged_rows, raw_rows, sources
from drillyard.hardware.cloud_limits import Limit, WayOfBuying, address_ranges
from drillyard.hardware.cluster_parts import PARTS_WITHOUT_PRICE
from drillyard.hardware.facts import read_row
from drillyard.hardware.user_file import contradictions

OURS = catalog()
ALL_ROWS = [
    *OURS.accelerators.values(),
    *OURS.machines.values(),
    *OURS.network_stacks.values(),
    *OURS.bandwidths,
    *OURS.prices,
    *OURS.regions.values(),
    *packaged_rows(Limit, "limits"),
    *packaged_rows(WayOfBuying, "consumption"),
    *address_ranges(),
]
every_row = pytest.mark.parametrize(
    "row", [pytest.param(row, id=getattr(row, "name", None)) for row in ALL_ROWS]
)
ACCELERATORS = (
    "a100-40gb a100-80gb h100 h100-pcie h100-nvl h200 h20 b200 b300 gb200 l4 l40s rtx-4090 a10g"
    " mi300x cpu"
)
MACHINES = """
a2-highgpu-8g a2-ultragpu-8g a3-highgpu-8g a3-megagpu-8g a3-ultragpu-8g a4-highgpu-8g a4x-highgpu-4g g2-standard-96
p4d.24xlarge p4de.24xlarge p5.48xlarge p5e.48xlarge p5en.48xlarge p6-b200.48xlarge
gpu-h100-sxm gpu-h200-sxm gpu-b200-sxm"""  # noqa: E501


def test_the_catalog_has_what_it_is_for():
    assert set(ACCELERATORS.split()) <= set(catalog().accelerators)
    assert set(MACHINES.split()) <= set(catalog().machines)
    assert set(catalog().network_stacks) == {
        "ethernet",
        "tcpx",
        "tcpxo",
        "gib",
        "infiniband",
        "efa",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_rows_are_the_same_one(kind):
    keys = [KINDS[kind][1](row) for row in raw_rows(kind)]
    assert len(set(keys)) == len(keys)


@every_row
def test_every_value_has_a_source_and_a_day_that_has_been(row):
    for name in type(row).model_fields:
        source = row.provenance.of(name)
        assert source.text
        assert date(2020, 1, 1) <= date.fromisoformat(source.date) <= date.today()
    for source in row.provenance.by_field.values():
        assert source.text
        assert source.date


@every_row
def test_no_row_contradicts_itself_or_another_one(row):
    assert list(contradictions(row, catalog())) == []


def test_a_row_of_ours_must_name_a_known_source():
    cls, _ = KINDS["prices"]
    priced = {"machine": "a4-highgpu-8g", "consumption": "spot", "usd_per_gpu_hour": 3}
    for unknown in ({}, {"source": "hearsay"}):
        with pytest.raises(KeyError):
            read_row(cls, priced | unknown, sources())
    assert read_row(cls, priced | {"source": "gcp-price-table"}, sources()).usd_per_gpu_hour == 3


def test_every_source_is_used():
    own = ("quotas", "images", "limits", "address_ranges", "consumption", "xids")
    own += ("boot_images", "cluster_toolkit", "slurm_machines", "nodeset_rules", "home_storage")
    raws = [row for kind in (*KINDS, *own) for row in raw_rows(kind)]
    used = {row["source"] for row in raws} | {
        key for row in raws for key in row.get("sources", {}).values()
    }
    assert set(sources()) == used


def test_data_and_host_nics_are_all_of_a_machines_network():
    for machine in catalog().machines.values():
        if machine.network_gbps is not None:
            nics = [machine.data_nics, machine.host_nics]
            assert sum(nic.count * nic.gbps for nic in nics) == machine.network_gbps, machine.name


def test_peaks_with_sparsity_are_twice_the_dense_ones():
    seen = 0
    for accelerator in catalog().accelerators.values():
        for precision in {"bf16", "fp8"} & set(accelerator.sparse_tflops):
            dense = accelerator.peak_tflops[precision]
            assert accelerator.sparse_tflops[precision] == pytest.approx(2 * dense, rel=0.002), (
                accelerator.name
            )
            seen += 1
    assert seen >= 20


def test_no_matmul_was_measured_above_the_peak():
    for accelerator in catalog().accelerators.values():
        for precision in accelerator.achievable_tflops:
            assert (
                0.5
                < accelerator.achievable_tflops[precision] / accelerator.peak_tflops[precision]
                < 1
            )


def test_the_driver_reports_no_more_memory_than_was_sold():
    for accelerator in catalog().accelerators.values():
        if accelerator.name != "cpu":
            # Vendors count the gigabytes of HBM as 2^30 bytes on most models and as 1e9 on some.
            assert 0.9 * accelerator.memory_gb < accelerator.memory_gib <= accelerator.memory_gb


def test_host_copies_are_not_faster_than_their_link():
    for accelerator in catalog().accelerators.values():
        if accelerator.host_device_gb_per_s is not None:
            assert accelerator.host_device_gb_per_s < accelerator.host_link_gb_per_s


def test_reference_bandwidths_stay_below_what_line_rates_allow():
    seen = 0
    for row in catalog().bandwidths:
        if row.machine is not None:
            machines = [catalog().machine(row.machine)]
        else:
            machines = [
                machine
                for machine in catalog().machines.values()
                if machine.accelerator == row.accelerator
                and machine.num_accelerators == row.num_accelerators
            ]
        for machine in machines:
            bound = bus_bandwidth_bound(
                machine, catalog().accelerator_of(machine), row.collective, row.nodes
            )
            assert max(row.gb_per_s.values()) < bound.value
            assert row.num_accelerators == row.nodes * machine.num_accelerators
            seen += 1
    assert (
        seen >= len(catalog().bandwidths) - 2
    )  # no machine of ours carries the H100 NVL or the MI300X


def test_bandwidth_grows_with_the_message():
    for row in catalog().bandwidths:
        rates = [row.gb_per_s[size] for size in sorted(row.gb_per_s)]
        assert rates == sorted(rates)


def test_the_least_accepted_bandwidth_is_below_the_measured_one():
    rows = catalog().bandwidths
    pairs = [
        (least, seen)
        for least in rows
        for seen in rows
        if (least.role, seen.role) == ("minimum", "measured")
        and (least.machine, least.accelerator, least.collective, least.nodes, least.in_network)
        == (seen.machine, seen.accelerator, seen.collective, seen.nodes, seen.in_network)
    ]
    assert len(pairs) >= 7
    for least, seen in pairs:
        assert min(least.gb_per_s.values()) < max(seen.gb_per_s.values())


def test_prices_are_positive_and_spot_is_cheaper():
    for price in catalog().prices:
        machine = catalog().machine(price.machine)
        assert 0.2 < price.gpu_hour(machine).value < 20
        assert price.consumption in machine.consumption
        on_demand = catalog().price(price.machine, "on-demand", price.region)
        if price.consumption == "spot" and on_demand is not None:
            assert price.node_hour(machine).value < on_demand.node_hour(machine).value


def test_every_machine_without_gpus_has_a_price_a_quota_and_a_disk_that_has_a_price():
    for machine in catalog().cpu_machines.values():
        price = catalog().cpu_machine_price(machine, "us-central1")
        assert 0.02 < price.value / machine.vcpus < 0.06
        assert machine.cpu_quota
        if machine.cloud == "nebius":
            assert machine.boot_disk in PARTS_WITHOUT_PRICE
            continue
        disk = catalog().part_price(machine.boot_disk, "us-central1", "usd_per_gib_month")
        assert disk.value == 0.10


def test_the_price_of_a_part_is_that_of_its_region_or_of_everywhere():
    assert catalog().part_price("gke-control-plane", "europe-west4").value == 0.10
    assert catalog().part_price("pd-balanced", "europe-west4", "usd_per_gib_month") is None
    # Another unit is another price.
    assert catalog().part_price("pd-balanced", "us-central1") is None
    small = catalog().cpu_machine("e2-standard-4")
    assert catalog().cpu_machine_price(small, "asia-southeast1").value == pytest.approx(2 * 0.08267)
    assert catalog().cpu_machine_price(small, "asia-southeast2") is None


def test_quota_rules_are_read_and_name_known_words():
    rules = packaged_rows(QuotaRule, "quotas")
    assert {rule.cloud for rule in rules} == {"gcp", "aws", "nebius"}
    clouds = {machine.cloud: machine.gpu_quota for machine in catalog().machines.values()}
    assert set(clouds) == {"gcp", "aws", "nebius"}
    for rule in rules:
        rule.metric.format(gpu="X", gpu_lower="x", vm_family="A", cpu_quota="C", cpu_pool_quota="C")


def test_stacks_carry_the_versions_that_their_images_have():
    for stack in catalog().network_stacks.values():
        for image in stack.images.values():
            assert "/" in image
            assert ":" in image or "@" in image
        if "plugin" in stack.versions:
            assert stack.images["installer"].endswith(f":v{stack.versions['plugin']}")
        if "rxdm" in stack.versions:
            assert stack.images["sidecar"].endswith(f":v{stack.versions['rxdm']}")
            assert {
                "plugin": stack.versions["plugin"],
                "rxdm": stack.versions["rxdm"],
            } in stack.coupled_versions


def test_settings_of_a_stack_can_depend_on_the_machine():
    gib = catalog().network_stack("gib")
    assert gib.environment_on("a4-highgpu-8g")["NCCL_TUNER_CONFIG_PATH"].endswith(
        "tuner_config_a4.txtpb"
    )
    assert gib.environment_on("a3-ultragpu-8g")["NCCL_TUNER_CONFIG_PATH"].endswith(
        "tuner_config_a3u.txtpb"
    )
    assert gib.environment_on("a4-highgpu-8g")["NCCL_NET"] == "gIB"


def test_hosts_have_interfaces_of_their_own_for_every_data_nic():
    for name, stack, variable in (
        ("a3-highgpu-8g", "tcpx", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"),
        ("a3-megagpu-8g", "tcpxo", "NCCL_FASTRAK_IFNAME"),
    ):
        settings = catalog().network_stack(stack).host_environment_on(name)
        interfaces = settings[variable].split(",")
        assert len(set(interfaces)) == catalog().machine(name).data_nics.count
        assert settings["NCCL_SOCKET_IFNAME"] not in interfaces


def test_a_stack_with_a_script_has_it_on_hosts_too_with_libraries_and_volumes():
    for stack in catalog().network_stacks.values():
        assert bool(stack.profile_script) == bool(stack.host_profile_script)
        if stack.host_library_path is not None:
            assert stack.host_volumes
            assert any(stack.host_library_path.startswith(volume) for volume in stack.host_volumes)
        assert set(stack.enforced) <= set(stack.profile_environment)
        assert not set(stack.forbidden) & {*stack.environment, *stack.host_environment}


def test_newer_accelerators_need_a_newer_cuda():
    floors = {
        name: row.min_cuda
        for name, row in catalog().accelerators.items()
        if row.min_cuda is not None
    }
    assert floors == {"b200": "12.8", "gb200": "12.8", "b300": "12.9", "gb300": "12.9"}


def test_nodes_share_what_their_storage_can_take():
    mega = catalog().machine("a3-megagpu-8g")
    assert mega.storage_gb_per_s(1).value == 25  # 200 Gb/s of its host NIC
    shared = mega.storage_gb_per_s(64)
    assert (shared.value, shared.unverified) == (25, True)  # 200 Gb/s of the bucket
    assert catalog().machine("p5.48xlarge").storage_gb_per_s(3).value == 30
    assert catalog().machine("gpu-h100-sxm").storage_gb_per_s(2) is None


def test_a_gpus_share_of_the_nics():
    assert catalog().machine("a4-highgpu-8g").nic_gb_per_s_per_accelerator().value == 50
    assert catalog().machine("a3-highgpu-8g").nic_gb_per_s_per_accelerator().value == 12.5
    assert catalog().machine("a2-highgpu-8g").nic_gb_per_s_per_accelerator().value == pytest.approx(
        12.5 / 8
    )
    assert (
        catalog().machine("gpu-h100-sxm_1gpu-16vcpu-200gb").nic_gb_per_s_per_accelerator() is None
    )


def test_a_machine_is_found_by_its_platform_and_preset():
    assert catalog().machine("gpu-h200-sxm_8gpu-128vcpu-1600gb").name == "gpu-h200-sxm"


@pytest.mark.parametrize(
    ("lookup", "name", "meant"),
    [
        ("machine", "a4-highgpu", "a4-highgpu-8g"),
        ("machine", "P5.48XLARG", "p5.48xlarge"),
        ("accelerator", "h1000", "h100"),
        ("network_stack", "tcp-xo", "tcpxo"),
    ],
)
def test_a_miss_names_what_was_meant_and_how_to_give_ones_own(lookup, name, meant):
    with pytest.raises(UserError, match=f"'{name}'.*mean .*{meant}") as missed:
        getattr(catalog(), lookup)(name)
    assert "--hardware FILE" in str(missed.value)


def test_a_name_like_nothing_is_reported_where_the_list_is():
    with pytest.raises(UserError, match="`drillyard hardware`"):
        catalog().machine("zzz")


def test_nothing_of_ones_own_is_our_catalog():
    assert load_catalog(None) is catalog()


def test_lookups_import_neither_torch_nor_the_models_of_configs():
    code = (
        "import sys\nfrom drillyard.hardware import catalog, find_accelerator\nassert"
        " find_accelerator('NVIDIA H200') and catalog().machine('a4-highgpu-8g') and"
        " catalog().prices\nprint(*{'torch', 'numpy', 'drillyard.config'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""
