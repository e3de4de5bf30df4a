"""The pages on clusters have the tables that the planner gives today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drillyard.hardware import catalog, load_catalog

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/provision.md"
OF_HOSTS = ROOT / "docs/virtual_machines.md"
OF_SLURM = ROOT / "docs/slurm_clusters.md"
OF_JOBS = ROOT / "docs/vertex.md"


def test_the_table_of_machines_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/provision_docs.py", "--check"], capture_output=True
    )
    assert not done.stderr
    assert done.returncode == 0, "run python tools/provision_docs.py"


@pytest.mark.parametrize(("page", "modes"), [(PAGE, 6), (OF_HOSTS, 5), (OF_SLURM, 5), (OF_JOBS, 4)])
def test_every_machine_has_a_row_and_each_way_of_buying_a_cell(page: Path, modes: int) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    machines = {each.name for each in catalog().machines.values() if each.cloud == "gcp"}
    by_name = {name: cells.split("|") for name, cells in rows if name in machines}
    assert by_name.keys() == machines
    for name, cells in by_name.items():
        sold = [not cell.strip().startswith("no (") for cell in cells]
        assert len(cells) == modes
        assert sum(sold) <= len(catalog().machine(name).consumption)


def test_the_rows_of_the_page_are_a_hardware_file(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(prices:.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "own.yaml"
    file.write_text(block)
    facts = load_catalog(file)
    given = yaml.safe_load(block)["prices"][0]
    price = facts.price(given["machine"], given["consumption"], given["region"])
    assert price is not None and price.usd_per_node_hour == given["usd_per_node_hour"]
    assert facts.cpu_machine("c3-standard-8").vcpus == 8
    small = facts.cpu_machine_price(facts.cpu_machine("e2-standard-8"), "europe-west4")
    assert small is not None and small.value == 0.55 / 2
