"""Write the table of machines and ways of buying into docs/provision.md, by planning a cluster of
each: `python tools/provision_docs.py`.

`--check` writes nothing and exits with 1 where the page has another table.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import get_args

from drillyard.config.cluster import cluster_model
from drillyard.config.creation import Consumption
from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.provisioner import plan_cluster

PAGE = Path(__file__).parents[1] / "docs/provision.md"
BEGIN, END = "<!-- made by python tools/provision_docs.py -->", "<!-- end of what it made -->"
ZONE = "us-central1-b"
MODES = get_args(Consumption)


def table() -> str:
    """The table: a price of a node-hour, `--price` where none is known, or the number of the error;
    then the errors with their machines."""
    rows, refused = [], {}
    dates = []
    for machine in catalog().machines.values():
        if machine.cloud != "gcp":
            continue
        cells = []
        for mode in MODES:
            try:
                line = next(line for line in planned(machine.name, mode).prices if line.pool)
            except UserError as error:
                text = str(error).splitlines()[0].removeprefix("consumption: ")
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
    lines = [f"| machine | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|", *rows, ""]
    about = (
        f"Dollars per node-hour in {ZONE.rpartition('-')[0]}, the oldest of {min(dates)}; `?`: no"
        " primary source confirms it; `--price`: none is known, so `up` asks for one. What is not"
        " sold, or cannot be made, gets one of these errors:"
    )
    lines += [*textwrap.wrap(about, 120), ""]
    for number, (reason, modes) in enumerate(refused.items(), 1):
        where = "; ".join(f"{mode}: {', '.join(names)}" for mode, names in modes.items())
        lines += textwrap.wrap(
            f"{number}. {reason} ({where})",
            120,
            subsequent_indent="   ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def planned(machine: str, mode: str) -> ClusterPlan:
    """The plan of two nodes of `machine` bought by `mode`. Raises UserError."""
    content = {
        "name": "table",
        "platform": "gke",
        "location": {"project": "my-project", "region": ZONE.rpartition("-")[0], "zone": ZONE},
        "machine": machine,
        "nodes": 2,
        "consumption": mode,
        "image": "example.com/image:1",
    }
    if mode in ("reservation", "calendar"):
        content["reservation"] = "my-reservation"
    return plan_cluster(cluster_model().model_validate(content))


def page(text: str) -> str:
    """The text of the page with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return int(text != page(text))
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
