"""Where each fact of a GPU stands in the forms of nvidia-smi's output. Drivers renamed some: the
first place that is there counts; places joined by + are added up."""

from __future__ import annotations

from typing import NamedTuple


class GpuField(NamedTuple):
    """A fact by its key: paths below <gpu> in XML, titles in `-q`, and columns of `--query-gpu`.
    `kind` of its text: number, flag, bus, uuid, version or name."""

    key: str
    kind: str
    xml: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    csv: tuple[str, ...] = ()


_ECC_XML, _ECC_TEXT = "ecc_errors/{}/", "ECC Errors/{}/"


def _uncorrected(period: str) -> list[GpuField]:
    """Counters of errors that were not corrected, of one period (volatile: since the driver was
    loaded; aggregate: of the GPU's life). Since driver 550 those of SRAM are two."""
    xml, text = _ECC_XML.format(period), _ECC_TEXT.format(period.title())
    dot = f"ecc.errors.uncorrected.{period}"
    return [
        GpuField(
            f"ecc.{period}.sram",
            "number",
            (
                f"{xml}sram_uncorrectable",
                f"{xml}sram_uncorrectable_parity+{xml}sram_uncorrectable_secded",
            ),
            (
                f"{text}SRAM Uncorrectable",
                f"{text}SRAM Uncorrectable Parity+{text}SRAM Uncorrectable SEC-DED",
            ),
            (f"{dot}.sram",),
        ),
        GpuField(
            f"ecc.{period}.dram",
            "number",
            (f"{xml}dram_uncorrectable",),
            (f"{text}DRAM Uncorrectable",),
            (f"{dot}.dram", f"{dot}.device_memory"),
        ),
        GpuField(
            f"ecc.{period}.total",
            "number",
            (f"{xml}double_bit/total",),
            (f"{text}Double Bit/Total",),
            (f"{dot}.total",),
        ),
    ]


def _reason(key: str, title: str) -> GpuField:
    """A reason for which clocks are lowered; before driver 535.54 they were called throttle
    reasons."""
    return GpuField(
        f"throttle.{key}",
        "flag",
        (
            f"clocks_event_reasons/clocks_event_reason_{key}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{key}",
        ),
        (
            f"Clocks Event Reasons/{title}",
            f"Clocks Throttle Reasons/{title}",
            f"Clocks Event Reasons/HW Slowdown/{title}",
            f"Clocks Throttle Reasons/HW Slowdown/{title}",
        ),
        (f"clocks_event_reasons.{key}", f"clocks_throttle_reasons.{key}"),
    )


_PCI_XML = "pci/pci_gpu_link_info/"
_PCI_TEXT = "PCI/GPU Link Info/"

FIELDS: tuple[GpuField, ...] = (
    GpuField("name", "name", ("product_name",), ("Product Name",), ("name", "gpu_name")),
    GpuField("uuid", "uuid", ("uuid",), ("GPU UUID",), ("uuid", "gpu_uuid")),
    GpuField("bus_id", "bus", ("pci/pci_bus_id",), (), ("pci.bus_id", "gpu_bus_id")),
    GpuField("serial", "version", ("serial",), ("Serial Number",), ("serial", "gpu_serial")),
    GpuField("driver", "version", (), (), ("driver_version",)),
    GpuField("vbios", "version", ("vbios_version",), ("VBIOS Version",), ("vbios_version",)),
    GpuField(
        "persistence", "name", ("persistence_mode",), ("Persistence Mode",), ("persistence_mode",)
    ),
    GpuField(
        "mig", "name", ("mig_mode/current_mig",), ("MIG Mode/Current",), ("mig.mode.current",)
    ),
    GpuField(
        "ecc.mode",
        "name",
        ("ecc_mode/current_ecc",),
        ("ECC Mode/Current", "Ecc Mode/Current"),
        ("ecc.mode.current",),
    ),
    GpuField(
        "recovery",
        "name",
        ("gpu_recovery_action",),
        ("GPU Recovery Action",),
        ("gpu_recovery_action",),
    ),
    GpuField(
        "memory.total_mib",
        "number",
        ("fb_memory_usage/total",),
        ("FB Memory Usage/Total",),
        ("memory.total",),
    ),
    GpuField(
        "memory.used_mib",
        "number",
        ("fb_memory_usage/used",),
        ("FB Memory Usage/Used",),
        ("memory.used",),
    ),
    *_uncorrected("volatile"),
    *_uncorrected("aggregate"),
    GpuField(
        "ecc.sram_threshold_exceeded",
        "flag",
        ("ecc_errors/aggregate/sram_threshold_exceeded",),
        ("ECC Errors/Aggregate/SRAM Threshold Exceeded",),
        ("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",),
    ),
    GpuField(
        "ecc.channel_repair_pending",
        "flag",
        ("ecc_errors/channel_repair_pending",),
        ("ECC Errors/Channel Repair Pending",),
    ),
    GpuField(
        "ecc.tpc_repair_pending",
        "flag",
        ("ecc_errors/tpc_repair_pending",),
        ("ECC Errors/TPC Repair Pending",),
    ),
    GpuField(
        "remapped.uncorrectable",
        "number",
        ("remapped_rows/remapped_row_unc",),
        ("Remapped Rows/Uncorrectable Error",),
        ("remapped_rows.uncorrectable",),
    ),
    GpuField(
        "remapped.pending",
        "flag",
        ("remapped_rows/remapped_row_pending",),
        ("Remapped Rows/Pending",),
        ("remapped_rows.pending",),
    ),
    GpuField(
        "remapped.failure",
        "flag",
        ("remapped_rows/remapped_row_failure",),
        ("Remapped Rows/Remapping Failure Occurred",),
        ("remapped_rows.failure",),
    ),
    GpuField(
        "retired.single_bit",
        "number",
        ("retired_pages/multiple_single_bit_retirement/retired_count",),
        ("Retired Pages/Single Bit ECC",),
        ("retired_pages.single_bit_ecc.count", "retired_pages.sbe"),
    ),
    GpuField(
        "retired.double_bit",
        "number",
        ("retired_pages/double_bit_retirement/retired_count",),
        ("Retired Pages/Double Bit ECC",),
        ("retired_pages.double_bit.count", "retired_pages.dbe"),
    ),
    GpuField(
        "retired.pending",
        "flag",
        ("retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
        ("Retired Pages/Pending Page Blacklist",),
        ("retired_pages.pending",),
    ),
    GpuField(
        "pcie.width",
        "number",
        (f"{_PCI_XML}link_widths/current_link_width",),
        (f"{_PCI_TEXT}Link Width/Current",),
        ("pcie.link.width.current",),
    ),
    GpuField(
        "pcie.width_max",
        "number",
        (f"{_PCI_XML}link_widths/max_link_width",),
        (f"{_PCI_TEXT}Link Width/Max",),
        ("pcie.link.width.max",),
    ),
    GpuField(
        "pcie.generation",
        "number",
        (f"{_PCI_XML}pcie_gen/current_link_gen",),
        (f"{_PCI_TEXT}PCIe Generation/Current",),
        ("pcie.link.gen.current", "pcie.link.gen.gpucurrent"),
    ),
    GpuField(
        "pcie.generation_max",
        "number",
        (f"{_PCI_XML}pcie_gen/max_link_gen",),
        (f"{_PCI_TEXT}PCIe Generation/Max",),
        ("pcie.link.gen.max",),
    ),
    _reason("hw_slowdown", "HW Slowdown"),
    _reason("hw_thermal_slowdown", "HW Thermal Slowdown"),
    _reason("hw_power_brake_slowdown", "HW Power Brake Slowdown"),
    _reason("sw_thermal_slowdown", "SW Thermal Slowdown"),
    _reason("sync_boost", "Sync Boost"),
    GpuField(
        "temperature",
        "number",
        ("temperature/gpu_temp",),
        ("Temperature/GPU Current Temp",),
        ("temperature.gpu",),
    ),
    GpuField(
        "temperature.margin",
        "number",
        ("temperature/gpu_temp_tlimit",),
        ("Temperature/GPU T.Limit Temp",),
        ("temperature.gpu.tlimit",),
    ),
    GpuField(
        "temperature.slowdown",
        "number",
        ("temperature/gpu_temp_slow_threshold",),
        ("Temperature/GPU Slowdown Temp",),
    ),
    GpuField(
        "power.limit_w",
        "number",
        (
            "gpu_power_readings/current_power_limit",
            "gpu_power_readings/enforced_power_limit",
            "power_readings/enforced_power_limit",
            "power_readings/power_limit",
        ),
        (
            "GPU Power Readings/Current Power Limit",
            "GPU Power Readings/Enforced Power Limit",
            "Power Readings/Enforced Power Limit",
            "Power Readings/Power Limit",
        ),
        ("enforced.power.limit", "power.limit"),
    ),
    GpuField(
        "power.default_limit_w",
        "number",
        ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        ("GPU Power Readings/Default Power Limit", "Power Readings/Default Power Limit"),
        ("power.default_limit",),
    ),
    GpuField(
        "clocks.max_sm_mhz",
        "number",
        ("max_clocks/sm_clock",),
        ("Max Clocks/SM",),
        ("clocks.max.sm", "clocks.max.gr"),
    ),
    GpuField(
        "clocks.applications_mhz",
        "number",
        ("applications_clocks/graphics_clock",),
        ("Applications Clocks/Graphics",),
        ("clocks.applications.graphics", "clocks.applications.gr"),
    ),
    GpuField(
        "clocks.default_applications_mhz",
        "number",
        ("default_applications_clocks/graphics_clock",),
        ("Default Applications Clocks/Graphics",),
        ("clocks.default_applications.graphics", "clocks.default_applications.gr"),
    ),
    GpuField("fabric.state", "name", ("fabric/state",), ("Fabric/State",), ("fabric.state",)),
    GpuField("fabric.status", "name", ("fabric/status",), ("Fabric/Status",), ("fabric.status",)),
)
