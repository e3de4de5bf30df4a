"""`drillyard accept --from FILE`: recorded output is evidence too, judged without a cluster.

Each file is what a tool printed: nccl-tests (text, JSON, or a page with a table of message sizes),
nvidia-smi, dcgmi, dmesg. Of several in one file each is judged. A file with none of them is an
observation of the probe `file`, with an error: `incomplete`, never a pass. Only what the files hold
is judged.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from drillyard.acceptance.accept_command import read_baseline
from drillyard.acceptance.check import Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.job import expected_of
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.acceptance.parsers import dcgm, kernel_log, nvidia_smi
from drillyard.acceptance.parsers.collective_table import CollectiveTable
from drillyard.acceptance.parsers.recorded_tables import parse_tables
from drillyard.control_characters import clean
from drillyard.errors import UserError
from drillyard.guarded_files import open_input
from drillyard.hardware import load_catalog
from drillyard.launch.submission import load_cluster

LARGEST_FILE: Final = 64 << 20
_READERS: Final[tuple[Callable[[str], Observation | None], ...]] = (
    dcgm.recognise,
    nvidia_smi.recognise,
    kernel_log.recognise,
)


def recorded_evidence(
    files: Sequence[Path], expected: Expected, num_nodes: int | None = None
) -> AcceptanceEvidence:
    """The evidence in the files. `num_nodes`: of every table of a collective; None: as its ranks
    and hosts say. Raises UserError for files that cannot be read."""
    names: list[str] = []
    places = _Places(files)
    observations: list[Observation] = []
    gpus = expected.machine.num_accelerators if expected.machine is not None else None
    for path in files:
        content = _read(path)
        text = content.decode("utf-8", "replace")
        others = [seen for recognise in _READERS if (seen := recognise(text)) is not None]
        is_dcgm = any(seen.probe == "dcgm" for seen in others)
        # Other JSON than that of nccl-tests is a damaged one.
        tables = parse_tables(content.lstrip().lstrip(b"{") if is_dcgm else content)
        for same in _repeats(tables):
            table = tables[same[0]]
            observations.append(
                _of_table(clean(str(path)), content, same, table, num_nodes, gpus, names)
            )
        for seen in others:
            observations.append(_of_other(path, seen, places, names))
        if not tables and not others:
            what = "is not output that is judged here" if text.strip() else "is empty"
            observations.append(
                Observation(
                    probe="file", scope="node", nodes=(), error=what, source=clean(str(path))
                )
            )
    return AcceptanceEvidence(
        recorded=True,
        level="full",
        expected_nodes=max(1, len(names)),
        processes_per_node=gpus or 1,
        nodes=tuple(NodeIdentity(rank=rank, name=name) for rank, name in enumerate(names)),
        observations=tuple(observations),
    )


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give each file in it by --from")
    try:
        with open_input(path) as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise UserError(
            f"{path}: has more than {LARGEST_FILE >> 20} MiB; give the part with the tools' output"
        )
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # What PowerShell writes for `>`.
        return content.decode("utf-16", "replace").encode()
    return content


def _repeats(tables: Sequence[CollectiveTable]) -> list[list[int]]:
    """The numbers of tables of one collective on the same hosts, together: those of one file are
    repeats. Those of different files may be of different nodes."""
    found: dict[object, list[int]] = {}
    for place, table in enumerate(tables):
        found.setdefault((table.collective, table.ranks, table.hosts), []).append(place)
    return list(found.values())


def _of_table(
    source: str,
    text: bytes,
    same: list[int],
    table: CollectiveTable,
    num_nodes: int | None,
    gpus: int | None,
    names: list[str],
) -> Observation:
    ranks = table.ranks
    by_ranks = -(-ranks // gpus) if ranks is not None and gpus is not None else 1
    count = num_nodes or len(table.hosts) or by_ranks
    hosts = table.hosts if len(table.hosts) == count else ()
    nodes = tuple(_rank_of(name, names) for name in hosts or _unnamed(count))
    error = None
    if len(nodes) != len(set(nodes)):
        error = "names a node twice"
    values: dict[str, object] = {"output": text.decode("utf-8", "replace"), "tables": same}
    # Without a machine the expected number of ranks is not known.
    values["ranks"] = count * gpus if gpus is not None else ranks
    return Observation(
        probe="nccl_tests",
        scope="node" if count == 1 else "pairs" if count == 2 else "all",
        nodes=nodes,
        values=values,
        error=error,
        source=source,
    )


class _Places:
    """Of which node a file is, that does not say so: files of one directory are of one node, and
    where one tool's output is there again, of the next."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._several = len({path.parent for path in files}) > 1
        self._seen: Counter[tuple[Path, str]] = Counter()

    def name(self, path: Path, kind: str) -> str:
        """A name for the node of the file, in which `kind` of output is."""
        number = self._seen[path.parent, kind]
        self._seen[path.parent, kind] += 1
        if not self._several:
            return f"node {number}"
        place = clean(str(path.parent))
        return place if number == 0 else f"{place} ({number + 1})"


def _of_other(path: Path, seen: Observation, places: _Places, names: list[str]) -> Observation:
    """What another tool printed on one node."""
    tools = (seen.values or {}).get("tools")
    kind = f"{seen.probe} {' '.join(tools) if isinstance(tools, dict) else ''}"
    rank = _rank_of(places.name(path, kind), names)
    return seen.model_copy(update={"nodes": (rank,), "source": clean(str(path))})


def _unnamed(count: int) -> tuple[str, ...]:
    return tuple(f"node {number}" for number in range(count))


def _rank_of(name: str, names: list[str]) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def outcome_of_files(
    files: Sequence[Path],
    *,
    cluster_file: Path | None = None,
    machine: str | None = None,
    num_nodes: int | None = None,
    hardware: Path | None = None,
    baseline_file: Path | None = None,
) -> Outcome:
    """The judgement of recorded files: by the machine that is named, or by that of a cluster
    config. Raises UserError."""
    baseline = None if baseline_file is None else read_baseline(baseline_file)
    if cluster_file is not None:
        overrides = [f"hardware={hardware}"] if hardware is not None else []
        cluster = load_cluster(cluster_file, None, overrides)
        expected = expected_of(cluster, load_catalog(cluster.hardware), baseline=baseline)
    else:
        facts = load_catalog(None if hardware is None else str(hardware))
        expected = Expected(facts, None, None, None, baseline=baseline)
    if machine is not None:
        expected = _on_machine(expected, machine)
    return judge(recorded_evidence(files, expected, num_nodes), expected)


def _on_machine(expected: Expected, name: str) -> Expected:
    """The same for another machine. Raises UserError for one that is not known."""
    machine = expected.catalog.machine(name)
    return replace(
        expected,
        machine=machine,
        accelerator=expected.catalog.accelerator_of(machine),
        stack=expected.catalog.network_stacks.get(machine.network_stack),
    )
