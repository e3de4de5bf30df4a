"""Configs, cluster files and their values on the command line: no text ends in a traceback or takes
long to refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from drillyard.config.environment import EnvironmentText
from drillyard.config.load import apply_overrides, load_cluster_config, load_run_config
from drillyard.config.yaml_document import parse_document, read_document
from drillyard.errors import UserError
from drillyard.measurement.merge_sources import add_directory, merge_sources

# Ten levels are a billion values and never end; six are 59,049, more than a config can have.
LAUGHS = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" if n else "a0: &a0 [x]\n" for n in range(6)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 6)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300))
HOSTILE = {
    "values by aliases": (LAUGHS, r":\d+: more than 10,000 values"),
    "values by merges": (MERGES, r":\d+: more than 10,000 values"),
    "aliases nested 300 deep": (CHAIN, r":\d+: more than 40 levels"),
    "20,000 brackets": ("a: " + "[" * 20_000, ":1: .*more than 40 levels"),
    "20,000 pairs of brackets": ("a: " + "[" * 20_000 + "]" * 20_000, ":1: .*more than 40 levels"),
    "20,000 braces": ("a: " + "{a: " * 20_000, ":1: .*more than 40 levels"),
    "5,000 nested items": ("- " * 5_000, ":1: .*more than 40 levels"),
    "5,000 keys of keys": ("? " * 5_000, ":1: .*more than 40 levels"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(11_000)), r":\d+: .*more than 10,000 values"),
    "a large file": ("# comment\n" * 30_000, ": has more than 256 KiB"),
    "an escape out of range": ('a: "\\UFFFFFFFF"', ": not valid YAML"),
    "a directive out of range": (f"%YAML {'9' * 5_000}.1\n---\na: 1", ": not valid YAML"),
}


@pytest.mark.parametrize(("text", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_by_name(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"run\.yaml{problem}"):
        load_run_config(path)


def test_a_cluster_config_is_read_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(UserError, match=r"cluster\.yaml:\d+: more than"):
        load_cluster_config(path)


def test_a_file_is_read_only_as_far_as_its_limit() -> None:
    with pytest.raises(UserError, match="/dev/zero"):
        read_document("/dev/zero")


@pytest.mark.parametrize("value", ["[" * 5_000, "&a [*a]", '"\\UFFFFFFFF"'])
def test_a_hostile_value_on_the_command_line_is_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {id: x}\n")
    with pytest.raises(UserError, match="--set"):
        load_run_config(path, [f"training.steps={value}"])


def test_numbers_of_many_digits_are_text() -> None:
    """Python converts at most 4,300 digits, and raises for more."""
    digits = "9" * 5_000
    assert parse_document(f"a: {digits}\nb: 0x{digits}\nc: -{digits}.5", "x").value == {
        "a": digits,
        "b": f"0x{digits}",
        "c": f"-{digits}.5",
    }


def test_merged_keys_keep_their_precedence_and_the_places_of_their_values() -> None:
    text = (
        "a: &a {x: 1, s: {p: 1}}\nb: &b {x: 2, y: 2, s: {q: 2}}\nc:\n  <<: [*a, *b]\n  z: 3\nd:\n "
        " <<: *b\n  x: 4\n"
    )
    document = parse_document(text, "f")
    assert document.value["c"] == {"x": 1, "y": 2, "s": {"p": 1}, "z": 3}
    assert document.value["d"] == {"x": 4, "y": 2, "s": {"q": 2}}
    assert document.places["c", "s", "p"].order == 1 and ("c", "s", "q") not in document.places
    assert document.places["d", "x"].order == 8 and document.places["d", "y"].order == 2


def test_what_a_variable_of_the_environment_holds_is_never_expanded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAUGH", "${env:LAUGH}${env:LAUGH}")
    assert EnvironmentText("${env:LAUGH}") == "${env:LAUGH}${env:LAUGH}"


def test_the_number_of_keys_costs_no_square_of_time() -> None:
    def lines_run(count: int) -> int:
        """The lines of Python that reading `count` merged keys runs."""
        text = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(count)) + "}\nb:\n  <<: *a\n"
        text += "".join(f"  k{n}: 2\n" for n in range(count))
        lines = 0

        def count_line(frame: FrameType, event: str, argument: object) -> object:
            nonlocal lines
            lines += 1
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            parse_document(text, "x")
        finally:
            sys.settrace(before)
        return lines

    assert lines_run(400) < 5 * lines_run(100)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 5_000, "training: {steps: 2025-13-45}", MERGES, "a: " + "9" * 5_000]
)
def test_the_config_in_a_run_directory_of_others_is_read_the_same_way(
    text: str, tmp_path: Path
) -> None:
    """Read, or refused with its name; never a traceback, and never for long."""
    (tmp_path / "run.yaml").write_text(text)
    try:
        add_directory(merge_sources([], None), tmp_path)
    except UserError as error:
        assert str(tmp_path / "run.yaml") in str(error)


def test_overrides_do_not_multiply_aliases() -> None:
    document = parse_document("a: &a {x: 1}\nb: *a\n", "x")
    changed = apply_overrides(document, ["b.x=2"])
    assert changed.value == {"a": {"x": 1}, "b": {"x": 2}}
