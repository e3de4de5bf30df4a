"""Write the tables of machines and ways of buying into docs/provision.md (GKE),
docs/virtual_machines.md, docs/slurm_clusters.md, docs/vertex.md and docs/nebius.md, by planning a
cluster of each: `python tools/provision_docs.py`.

`--check` writes nothing and exits with 1 where a page has another table.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from drillyard.config.cluster import cluster_model
from drillyard.config.creation import Consumption
from drillyard.config.platforms import platforms
from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.nebius.nebius_rules import regions_of
from drillyard.provision.provisioner import plan_cluster

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "gke": DOCS / "provision.md",
    "gce": DOCS / "virtual_machines.md",
    "slurm": DOCS / "slurm_clusters.md",
    "vertex": DOCS / "vertex.md",
    "nebius": DOCS / "nebius.md",
}
FURTHER: dict[str, dict[str, Any]] = {
    "gke": {},
    "gce": {"gce": {"os_login": True, "user": "me"}},
    "slurm": {},
    "vertex": {"storage": {"bucket": "my-bucket"}},
    "nebius": {"cluster": {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}},
}
"""Settings without which a platform has no cluster."""
_ASKS = {
    "vertex": "; `plan` takes one, and `up` needs none, as it buys nothing",
    "nebius": "; `plan` takes one",
}
_RESERVATIONS = {"nebius": "capacityblockgroup-e00abc"}
CLOUDS = {"nebius": "nebius"}
"""The cloud of a platform's machines, where it is not Google's."""
BEGIN, END = "<!-- made by python tools/provision_docs.py -->", "<!-- end of what it made -->"
ZONE = "us-central1-b"
MODES = get_args(Consumption)


def table(platform: str) -> str:
    """The table: a price of a node-hour, `--price` where none is known, or the number of the error;
    then the errors with their machines."""
    rows: list[str] = []
    refused: dict[str, dict[str, list[str]]] = {}
    dates = []
    modes = [mode for mode in MODES if mode in platforms()[platform].consumption]
    for machine in catalog().machines.values():
        if machine.cloud != CLOUDS.get(platform, "gcp"):
            continue
        cells = []
        for mode in modes:
            try:
                line = next(
                    line for line in planned(platform, machine.name, mode).prices if line.pool
                )
            except UserError as error:
                line_of_error = str(error).splitlines()[0]
                text = line_of_error.partition(": ")[2]
                text = text.removeprefix(f"{mode}: ").removeprefix("missing: ")
                reason = text.replace(machine.name, "MACHINE").replace(f"'{mode}'", "MODE")
                refused.setdefault(reason, {}).setdefault(mode, []).append(machine.name)
                cells.append(f"no ({list(refused).index(reason) + 1})")
                continue
            if line.usd_per_hour is None:
                cells.append("`--price`")
                continue
            node = line.usd_per_hour / line.count
            dates.append(node.date)
            cells.append(f"{node.value:,.2f}{'?' if node.unverified else ''}")
        rows.append(f"| `{machine.name}` | {' | '.join(cells)} |")
    lines = [f"| machine | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|", *rows, ""]
    asks = _ASKS.get(platform, ", so `up` asks for one")
    about = (
        f"Dollars per node-hour in {_region(platform)}, the oldest of {min(dates)}; `?`: no"
        f" primary source confirms it; `--price`: none is known{asks}."
    )
    if refused:
        about += " What is not sold, or cannot be made, gets one of these errors:"
    lines += [*textwrap.wrap(about, 120), *([""] if refused else [])]
    for number, (reason, by_mode) in enumerate(refused.items(), 1):
        where = "; ".join(f"{mode}: {', '.join(names)}" for mode, names in by_mode.items())
        lines += textwrap.wrap(
            f"{number}. {reason} ({where})",
            120,
            subsequent_indent="   ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def planned(platform: str, machine: str, mode: str) -> ClusterPlan:
    """The plan of two nodes of `machine` bought by `mode`. Raises UserError."""
    content = {
        "name": "table",
        "platform": platform,
        **FURTHER[platform],
        "location": _location(platform, machine),
        "machine": machine,
        "nodes": 2,
        "consumption": mode,
        "image": "example.com/image:1",
    }
    if mode in ("reservation", "calendar"):
        content["reservation"] = _RESERVATIONS.get(platform, "my-reservation")
    with TemporaryDirectory() as directory:
        if platform == "nebius":
            content["nebius"] = {"identity_file": f"{directory}/key"}
            Path(directory, "key.pub").write_text("ssh-ed25519 KEY\n", encoding="utf-8")
        return plan_cluster(cluster_model().model_validate(content))


def _region(platform: str) -> str:
    """The region of the prices, in words."""
    if platform == "nebius":
        return "the first region that has the machine"
    return ZONE.rpartition("-")[0]


def _location(platform: str, machine: str) -> dict[str, str]:
    if platform == "nebius":
        facts = catalog()
        region = regions_of(facts.machine(machine), facts)[0]
        return {"project": "project-e00abc", "region": region}
    return {"project": "my-project", "region": ZONE.rpartition("-")[0], "zone": ZONE}


def page(platform: str, text: str) -> str:
    """The text of the platform's page with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(platform)}\n\n{END}{after}"


def main() -> int:
    """Write the pages, or compare them."""
    differ = False
    for platform, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        made = page(platform, text)
        differ = differ or made != text
        if sys.argv[1:] != ["--check"]:
            path.write_text(made, encoding="utf-8")
    return int(differ and sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    sys.exit(main())
