"""The outcome in words and as JUnit XML."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema
from tests.unit.acceptance.documents import BAD, NAMES, document, result

from drillyard.acceptance.document_text import as_text, figure_text, junit_xml, threshold_text

SCHEMA = Path(__file__).with_name("junit.xsd")


def test_junit_is_valid_and_has_a_case_per_result() -> None:
    text = junit_xml(document(), "my cluster & more")
    xmlschema.validate(text, str(SCHEMA))
    suite = ElementTree.fromstring(text)[0]
    kinds = {
        case.get("classname"): [child.tag for child in case] for case in suite.iter("testcase")
    }
    assert kinds == {
        "all-gather": [],
        "tcp-bandwidth": ["failure"],
        "dcgm": ["error"],
        "versions": ["system-out"],
        "training": ["skipped"],
        "sendrecv": ["skipped"],
    }
    counted = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counted == ["6", "1", "1", "2"]
    (failure,) = suite.iter("failure")
    assert "31.5" in failure.get("message", "") and "take it out" in (failure.text or "")


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x85", "\ufffe", "\uffff", "\ud800", "\U0001fffe"]
)
def test_junit_holds_any_character_of_a_nodes_text(character: str) -> None:
    text = f"before {character} after"
    each = result("fail", reason=text, evidence=[text], action=text, metric=text, nodes=[text])
    xmlschema.validate(junit_xml(document(results=[each]), text), str(SCHEMA))


def test_junit_without_results_is_valid() -> None:
    xmlschema.validate(junit_xml(document(results=[], started_at=None), "c"), str(SCHEMA))


def test_the_text_names_the_node_what_it_did_and_what_to_do() -> None:
    lines = as_text(document()).splitlines()
    assert lines[0] == f"{NAMES[BAD]}: at fault"
    assert any("take it out" in line for line in lines)
    assert lines[-1] == (
        "fail: 12 nodes; results: 1 fail, 1 incomplete, 1 warn, 1 pass, 1 recorded, 1 skipped"
    )
    listed = [line.split()[0] for line in lines if line.startswith(("fail ", "incomplete", "warn"))]
    assert listed == ["fail", "incomplete", "warn"]
    assert len(as_text(document(), every=True).splitlines()) == len(lines) + 3


def test_a_remedy_of_results_that_blame_no_node_is_said_once() -> None:
    failed = [result("fail", action="a remedy", reason=f"r{number}") for number in range(3)]
    text = as_text(document(results=failed, culprits=[]))
    assert text.count("a remedy") == 1


@pytest.mark.parametrize(
    ("changes", "figure", "threshold"),
    [
        ({}, "277.2 GB/s (276.5 to 277.2)", "at least 251.0 GB/s"),
        ({"interval": None, "observed": 8, "unit": ""}, "8", "at least 251.0 GB/s"),
        ({"observed": "555.1", "threshold": None, "expected": "555.2"}, "555.1", "555.2"),
        ({"observed": None, "threshold": None}, "", ""),
    ],
)
def test_figures_and_limits_in_words(
    changes: dict[str, object], figure: str, threshold: str
) -> None:
    each = result(**changes)
    assert (figure_text(each), threshold_text(each)) == (figure, threshold)
