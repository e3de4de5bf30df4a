"""acceptance.json as text for a terminal, as the table of the page, and as JUnit XML for CI
systems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from drillyard import formatting
from drillyard.acceptance.acceptance_document import AcceptanceDocument, ResultEntry
from drillyard.control_characters import clean

_EVIDENCE_LINES = 12
_NOT_IN_XML = re.compile("[\ufffe\uffff]")
"""What `clean` leaves: Char in XML 1.0, 2.2."""
_ORDER = ("fail", "incomplete", "warn", "pass", "recorded", "skipped")


def results_table(document: AcceptanceDocument) -> Iterator[tuple[str, ResultEntry]]:
    """Every result with the nodes that it is about, in words: the worst first, and within one
    status in the document's order."""
    several = len(document.nodes) > 1
    for each in sorted(document.results, key=lambda each: _ORDER.index(each.status)):
        yield _where(each, len(document.nodes) if several else 0), each


def _where(result: ResultEntry, nodes: int) -> str:
    device = "" if result.device is None else f" device {result.device}"
    if nodes and len(result.nodes) == nodes and nodes > 2:
        return f"all {nodes} nodes"
    return formatting.first_few(result.nodes, 4) + device if result.nodes else ""


def figure_text(result: ResultEntry) -> str:
    """What was observed, with its unit; the interval of the repeats where it was repeated."""
    if result.observed is None:
        return ""
    if isinstance(result.observed, str):
        return result.observed
    text = f"{_number(result.observed)} {result.unit}".strip()
    if result.interval and result.interval[0] != result.interval[-1]:
        low, high = (_number(each) for each in result.interval)
        text += f" ({low} to {high})"
    return text


def threshold_text(result: ResultEntry) -> str:
    """The limit: `at least 329.4 GB/s`; else what is expected, in words."""
    limit = result.threshold
    if limit is None:
        return result.expected
    word = "at least" if limit.at_least else "at most"
    return f"{word} {_number(limit.value)} {limit.unit}".strip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else formatting.number(value)


def as_text(document: AcceptanceDocument, *, every: bool = False) -> str:
    """The outcome for a terminal: nodes at fault, then what is not a pass (with `every`, all
    results), then the verdict."""
    lines: list[str] = []
    said: set[str] = set()
    proven = {each.check for each in document.results if each.culprits}
    for culprit in document.culprits:
        lines.append(f"{culprit.name}: at fault")
        lines += [f"    {reason}" for reason in culprit.reasons]
        lines += [f"    evidence: {line}" for line in culprit.evidence[:4]]
        lines += [f"    do: {action}" for action in culprit.actions]
    rows = [
        (where, each)
        for where, each in results_table(document)
        if every or each.status in ("fail", "incomplete", "warn")
    ]
    texts = [(each.status, each.check, where) for where, each in rows]
    widths = [max((len(row[column]) for row in texts), default=0) for column in range(3)]
    for row, (_, each) in zip(texts, rows, strict=True):
        first = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{first}  {each.reason}".rstrip())
        if each.status in ("fail", "incomplete") and each.check not in proven:
            shown = [line for line in each.evidence if line not in each.reason]
            lines += [f"    {line}" for line in shown[-_EVIDENCE_LINES:]]
            if each.action and each.action not in said:
                lines.append(f"    do: {each.action}")
                said.add(each.action)
    nodes = formatting.plural(len(document.nodes), "node")
    lines.append(f"{document.verdict}: {nodes}; results: {', '.join(_counts(document))}")
    return "\n".join(lines) + "\n"


def _counts(document: AcceptanceDocument) -> Iterator[str]:
    """How many results have each status, the worst first: `1 fail`, `27 pass`, ..."""
    for status in _ORDER:
        if count := sum(each.status == status for each in document.results):
            yield f"{count} {status}"


def junit_xml(document: AcceptanceDocument, title: str) -> str:
    """The results as a test suite in JUnit's form, which CI systems show: a case per result; `fail`
    is a failure, `incomplete` an error, `skipped` and `recorded` are skipped, `warn` passes with
    its reason as output."""
    counts = {
        kind: sum(each.status in statuses for each in document.results)
        for kind, statuses in {
            "tests": _ORDER,
            "failures": ("fail",),
            "errors": ("incomplete",),
            "skipped": ("skipped", "recorded"),
        }.items()
    }
    figures = {name: str(count) for name, count in counts.items()}
    top = ElementTree.Element("testsuites", {"name": _xml_text(title), **figures})
    suite = ElementTree.SubElement(top, "testsuite", {"name": _xml_text(title), **figures})
    if document.started_at is not None:
        suite.set("timestamp", document.started_at[:19])
    for where, each in results_table(document):
        name = " ".join(filter(None, (each.metric, where)))
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": each.check, "name": _xml_text(name), "time": "0"}
        )
        parts = (each.reason, *each.evidence, *((each.action,) if each.action else ()))
        text = _xml_text("\n".join(parts))
        if each.status in ("fail", "incomplete"):
            kind = "failure" if each.status == "fail" else "error"
            found = ElementTree.SubElement(
                case, kind, {"message": _xml_text(each.reason), "type": each.status}
            )
            found.text = text
        elif each.status in ("skipped", "recorded"):
            ElementTree.SubElement(case, "skipped", {"message": _xml_text(each.reason)})
        elif each.status == "warn":
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    """Text that XML 1.0 can hold."""
    return _NOT_IN_XML.sub("\ufffd", clean(text))
