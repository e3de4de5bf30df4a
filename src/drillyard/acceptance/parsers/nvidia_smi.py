"""What nvidia-smi prints of GPUs, parsed: `-q -x`, `-q`, `--query-gpu ... --format=csv`, `-L`.

Each form becomes the same table: per GPU a text for each key of `FIELDS`. A value is a number only
where all of its text is one; N/A, a field that the driver no longer has and a field that is
missing in the output are kept apart, and none of them counts as zero. Names of fields: NVIDIA's own
help (`nvidia-smi --help-query-gpu`) and the documents nvsmi_device_v11.dtd to v13.dtd.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from xml.etree import ElementTree

from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.parsers.errors import MOST_CHARACTERS, NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi_fields import FIELDS

_NUMBER = re.compile(
    r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|-\d+(?:\.\d+)?)\s*(MiB|W|C|MHz|%|us|x|bank\(s\))?"
)
_NO_VALUE = re.compile(
    r"\[?(N/A|Not Supported|Insufficient Permissions|"
    r"Requested functionality has been deprecated)\]?",
    re.IGNORECASE,
)
_LOST = re.compile(r"GPU is lost|requires reset|Unknown Error|ERR!", re.IGNORECASE)
_TABLE_WORDS = {"Yes": True, "No": False, "Active": True, "Not Active": False}
_LISTED = re.compile(r"GPU (\d{1,4}): (.+?) \(UUID: (GPU-[0-9a-fA-F-]+)\)\s*")
_LISTED_FIRST = re.compile(r"\s*GPU \d+: .* \(UUID: ")
_OUTPUT_OF = {
    "links": re.compile(r"^[ \t]+Link \d+: (?:[\d.]+ GB/s|<?inactive)", re.MULTILINE),
    "link_errors": re.compile(r"^[ \t]+Link \d+: .*Errors: ", re.MULTILINE),
    "topology": re.compile(r"^(?:\x1b\[\S*m)?[ \t]*GPU0\s.*CPU Affinity", re.MULTILINE),
}
_TEXT_HEADER = re.compile(r"=\s{0,9}NVSMI LOG\s{0,9}=")
_TEXT_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2,}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*")


@dataclass(frozen=True)
class GpuProcess:
    """A program that uses a GPU. `memory` as printed."""

    pid: str
    name: str
    kind: str
    memory: str


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index`: its place in the output, which is the order of PCI addresses. `texts`: by
    key of `FIELDS`, as printed. `processes` None: the output does not list them."""

    index: int
    texts: Mapping[str, str]
    processes: tuple[GpuProcess, ...] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self.texts

    def has_value(self, key: str) -> bool:
        """Whether the output has a value: not N/A, and not missing."""
        return key in self.texts and not _NO_VALUE.fullmatch(self.texts[key])

    def number(self, key: str) -> float | None:
        """The value as a number, without its unit; None where it is not one."""
        found = _NUMBER.fullmatch(self.texts.get(key, ""))
        return float(found[1]) if found else None

    def flag(self, key: str) -> bool | None:
        """The value as yes or no; None where it is neither."""
        return _TABLE_WORDS.get(self.texts.get(key, ""))

    @property
    def lost(self) -> str | None:
        """What the driver prints for a GPU that does not answer, if it does."""
        return next((text for text in self.texts.values() if _LOST.search(text)), None)

    @property
    def bus_id(self) -> str:
        """PCI address in the form of the kernel: 0000:05:00."""
        return short_bus_id(self.texts.get("bus_id", ""))

    @property
    def title(self) -> str:
        """The GPU in a sentence."""
        return f"GPU {self.index}" + (f" ({self.bus_id})" if self.bus_id else "")


@dataclass(frozen=True)
class GpuTable:
    """The GPUs of a node. `form`: xml, text, csv or list. `is_part`: a form of which fields
    are chosen, so that a missing one is not a fault."""

    form: str
    gpus: tuple[Gpu, ...]
    is_part: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    """`driver` and `cuda` of the node."""


def short_bus_id(text: str) -> str:
    """A PCI address without function and with a domain of four digits: 0000:05:00."""
    found = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(\.\d+)?", text)
    if not found:
        return ""
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}".lower()


@lru_cache(maxsize=4096)
def parse_gpus(text: str) -> GpuTable:
    """The table of GPUs in any of the forms; kept, as every check asks for it. Raises
    NotThisOutput."""
    if len(text) > MOST_CHARACTERS:
        raise NotThisOutput(f"is longer than {MOST_CHARACTERS >> 20} MiB")
    if not text.strip():
        raise NotThisOutput("is empty")
    if re.search(r"No devices were found", text) and len(text) < 200:
        return GpuTable("list", ())
    if "<nvidia_smi_log" in text or text.lstrip().startswith("<?xml"):
        return parse_xml(text)
    if _TEXT_HEADER.search(text):
        return parse_text(text)
    if _LISTED.match(text.lstrip()):
        return parse_list(text)
    return parse_csv(text)


def parse_xml(text: str) -> GpuTable:
    """`nvidia-smi -q -x`."""
    if "<!ENTITY" in text:
        raise NotThisOutput("has XML entities, which nvidia-smi does not print")
    try:
        # Warnings may come before the document.
        start = max(
            0, min(text.find(each) for each in ("<?xml", "<nvidia_smi_log") if each in text)
        )
        root = ElementTree.fromstring(text[start:].strip())  # noqa: S314 - no entities, bounded
    except (ElementTree.ParseError, ValueError) as error:
        raise NotThisOutput(f"is not whole XML ({error})") from None
    if root.tag != "nvidia_smi_log":
        raise NotThisOutput(f"is XML of <{root.tag}>, not of nvidia-smi")
    gpus = tuple(_xml_gpu(at, each) for at, each in enumerate(root.findall("gpu")))
    _require_count(root.findtext("attached_gpus"), len(gpus))
    facts = {
        "driver": ("driver_version", "kmd_version"),
        "cuda": ("cuda_version", "cuda_umd_version"),
    }
    found = {
        name: value.strip()
        for name, tags in facts.items()
        for tag in reversed(tags)
        if (value := root.findtext(tag))
    }
    return GpuTable("xml", gpus, facts=found)


def _xml_gpu(index: int, node: ElementTree.Element) -> Gpu:
    def find(path: str) -> str | None:
        found = node.find(path)
        return None if found is None or len(found) else (found.text or "").strip()

    texts = _texts(lambda each: each.xml, _with_groups(find))
    texts.setdefault("bus_id", node.get("id", ""))
    processes = node.find("processes")
    listed = None
    if processes is not None:
        listed = tuple(
            GpuProcess(
                *(
                    (each.findtext(tag) or "").strip()
                    for tag in ("pid", "process_name", "type", "used_memory")
                )
            )
            for each in processes.findall("process_info")
        )
    return Gpu(index, texts, listed)


def parse_text(text: str) -> GpuTable:
    """`nvidia-smi -q`, also with `-d`, which chooses sections."""
    header, gpus = _text_values(text)
    _require_count(header.get("Attached GPUs"), len(gpus))
    parsed = [
        Gpu(
            at,
            {
                **_texts(lambda each: each.text, _with_groups(values.get)),
                "bus_id": values["bus_id"],
            },
            # "Processes : None", or entries below it.
            _text_processes(listed) if listed or values.get("Processes") == "None" else None,
        )
        for at, (values, listed) in enumerate(gpus)
    ]
    whole = any("name" in gpu for gpu in parsed)
    if whole and not all(gpu.processes is not None for gpu in parsed):
        raise NotThisOutput("ends before the processes of its last GPU")
    facts = {"driver": header.get("Driver Version", ""), "cuda": header.get("CUDA Version", "")}
    return GpuTable("text", tuple(parsed), not whole, {k: v for k, v in facts.items() if v})


_Values = dict[str, str]


def _text_values(text: str) -> tuple[_Values, list[tuple[_Values, list[_Values]]]]:
    """Values of the header by title; and of each GPU: by titles joined by /, as the indents nest
    them, and those of each of its processes."""
    header: _Values = {}
    gpus: list[tuple[_Values, list[_Values]]] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if found := _TEXT_GPU.fullmatch(line):
            gpus.append(({"bus_id": found[1]}, []))
            path = []
            continue
        name, colon, value = line.strip().partition(" : ")
        name, value = name.strip(), value.strip()
        if not colon and line.rstrip().endswith(":"):
            name = line.strip()[:-1].strip()
        if not name:
            continue
        if not gpus:
            header.setdefault(name, value)
            continue
        indent = len(line) - len(line.lstrip())
        path = [(at, title) for at, title in path if at < indent]
        where = "/".join([*(title for _, title in path), name])
        values, processes = gpus[-1]
        if where.startswith("Processes/"):
            if where.endswith("Process ID"):
                processes.append({})
            if processes:
                processes[-1].setdefault(name, value)
        if colon:
            values.setdefault(where, value)
        path.append((indent, name))
    return header, gpus


def _text_processes(listed: Iterable[_Values]) -> tuple[GpuProcess, ...]:
    names = ("Process ID", "Name", "Type", "Used GPU Memory")
    return tuple(GpuProcess(*(each.get(name, "") for name in names)) for each in listed)


def parse_csv(text: str) -> GpuTable:
    """`nvidia-smi --query-gpu=... --format=csv`, with its header: without one the columns
    are unknown."""
    rows = [
        [cell.strip() for cell in row]
        for row in csv.reader(text.strip().splitlines(), skipinitialspace=True)
        if row
    ]
    names = {name: each for each in FIELDS for name in each.csv}
    header = [_without_unit(cell) for cell in rows[0]]
    keys = [names[cell].key if cell in names else None for cell in header]
    if len([key for key in keys if key]) < max(1, len(keys) // 2):
        raise NotThisOutput("has no header of nvidia-smi's columns (ask without noheader)")
    gpus: list[Gpu] = []
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise NotThisOutput(f"line {number} has {len(row)} columns, its header {len(header)}")
        texts = {key: cell for key, cell in zip(keys, row, strict=True) if key is not None}
        for key, cell in texts.items():
            kind = next(each.kind for each in FIELDS if each.key == key)
            if not _is_of(kind, cell):
                raise NotThisOutput(f"line {number}: {key} is '{cell[:40]}': columns are shifted")
        gpus.append(Gpu(len(gpus), texts))
    driver = {gpu.texts["driver"] for gpu in gpus if "driver" in gpu}
    return GpuTable("csv", tuple(gpus), True, {"driver": driver.pop()} if len(driver) == 1 else {})


def parse_list(text: str) -> GpuTable:
    """`nvidia-smi -L`; MIG devices below a GPU are passed over."""
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        if found := _LISTED.fullmatch(line):
            if int(found[1]) != len(gpus):
                raise NotThisOutput(f"lists GPU {found[1]} after {len(gpus)} others")
            gpus.append(Gpu(len(gpus), {"name": found[2], "uuid": found[3]}))
        elif not re.match(r"\s+MIG ", line):
            raise NotThisOutput(f"has the line '{line[:80]}'")
    return GpuTable("list", tuple(gpus), True)


def recognise(text: str) -> Observation | None:
    """What looks like output of nvidia-smi, whole or not, as an observation of one node; None: it
    is something else."""
    answer = {"argv": ["nvidia-smi"], "code": 0, "text": text, "error": None, "installed": True}
    tools = dict.fromkeys(_tools_of(text), answer)
    if not tools:
        return None
    return Observation(probe="accelerators", scope="node", nodes=(0,), values={"tools": tools})


def _tools_of(text: str) -> Iterator[str]:
    """The commands of which output is in the text, as the probe names them."""
    found = [tool for tool, pattern in _OUTPUT_OF.items() if pattern.search(text)]
    yield from found
    of_links = "links" in found or "link_errors" in found
    names = {name for each in FIELDS for name in each.csv}
    columns = [_without_unit(cell) for cell in text.lstrip().split("\n")[0].split(",")]
    if (
        "<nvidia_smi_log" in text
        or _TEXT_HEADER.search(text)
        or (_LISTED_FIRST.match(text) and not of_links)
        or (len(columns) > 1 and 2 * sum(cell in names for cell in columns) > len(columns))
    ):
        yield "query"


def _without_unit(column: str) -> str:
    """`memory.total [MiB]` -> `memory.total`."""
    return re.sub(r"\s*\[[^\]]*\]$", "", column.strip()[:200])


def _texts(
    paths_of: Callable[..., tuple[str, ...]], find: Callable[[str], str | None]
) -> dict[str, str]:
    """By key, the first of a form's paths that is there; several joined by + are added up."""
    texts = {}
    for each in FIELDS:
        for path in paths_of(each):
            parts = [find(part) for part in path.split("+")]
            if any(part is None for part in parts):
                continue
            found = [part for part in parts if part is not None]
            texts[each.key] = found[0] if len(found) == 1 else _sum(found)
            break
    return texts


def _with_groups(find: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """As `find`; what is below a group without a value ("Remapped Rows : N/A") has none
    either."""

    def found(path: str) -> str | None:
        value = find(path)
        while value is None and "/" in path:
            path = path.rpartition("/")[0]
            group = find(path)
            value = group if group is not None and _NO_VALUE.fullmatch(group) else None
        return value

    return found


def _sum(parts: list[str]) -> str:
    numbers = [_NUMBER.fullmatch(part) for part in parts]
    if all(numbers):
        return f"{sum(float(found[1]) for found in numbers if found):g}"
    return next(part for part, found in zip(parts, numbers, strict=True) if not found)


def _require_count(declared: str | None, found: int) -> None:
    if declared is None or not re.fullmatch(r"\s*[0-9]{1,6}\s*", declared):
        raise NotThisOutput("does not say how many GPUs are attached")
    if int(declared) != found:
        raise NotThisOutput(f"says that {declared.strip()} GPUs are attached, and has {found}")


def _is_of(kind: str, cell: str) -> bool:
    if _NO_VALUE.fullmatch(cell) or _LOST.search(cell):
        return True
    if kind == "number":
        return _NUMBER.fullmatch(cell) is not None
    if kind == "flag":
        return cell in _TABLE_WORDS
    if kind == "bus":
        return bool(short_bus_id(cell))
    if kind == "uuid":
        return cell.startswith(("GPU-", "MIG-"))
    words = bool(re.search(r"[A-Za-z]", cell)) and not _NUMBER.fullmatch(cell)
    return words or kind == "version"
