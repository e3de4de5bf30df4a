"""JSON lines: what is read of the wanted fields alone is what the whole objects hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.measure.formats.jsonlines import Wanted, field, floats, load_all
from drillyard.measure.formats.values import WholeLines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["step", "loss", "time", "other", "st\u00e9p"]), VALUES, max_size=5)
WANTED = Wanted("step", "loss", "time")


@settings(max_examples=200, deadline=None)
@given(st.lists(OBJECTS, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_wanted_fields_are_those_of_the_whole_objects(
    objects: list[dict[str, Any]], ascii_only: bool, whole: bool
) -> None:
    lines = [json.dumps(each, ensure_ascii=ascii_only).encode() for each in objects]
    text = b"".join(line + b"\n" for line in lines)
    texts = WholeLines(text, len(lines)) if whole else lines
    assert (list(texts), len(texts), texts[-1]) == (lines, len(lines), lines[-1])
    rows, plain = WANTED.load_all(texts), load_all(texts)
    for name in ("step", "loss", "time"):
        assert repr(field(rows, name)) == repr(field(plain, name))
        assert floats(field(rows, name)).tobytes() == floats(field(plain, name)).tobytes()


@pytest.mark.parametrize(
    "line", ["", "3", "[1]", "null", '{"step": 1', '{"step": 1} more', '{"step": 1}{"step": 2}', "hello"]
)
def test_what_is_no_object_is_an_error(line: str) -> None:
    good = b'{"step": 1}'
    for texts in ([good, line.encode()], WholeLines(good + b"\n" + line.encode() + b"\n", 2)):
        with pytest.raises(ValueError, match=r"."):
            WANTED.load_all(texts)
