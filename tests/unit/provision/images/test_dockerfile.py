"""Which image a Dockerfile starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.provision.images.dockerfile import base_image, missing_sources

ROOT = Path(__file__).parents[4]


def base(text: str, **arguments: str) -> str:
    return base_image(text, arguments, "Dockerfile").image


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("FROM a:1\n", "a:1"),
        ("from --platform=linux/amd64 a:1 as b", "a:1"),
        ("ARG X=a:1\nFROM $X", "a:1"),
        ('ARG X="a:1"\nFROM ${X}', "a:1"),
        ("ARG TAG=1\nFROM a:${TAG}-base", "a:1-base"),
        ("ARG X\nFROM ${X:-a:2}", "a:2"),
        ("ARG X=1\nFROM a:${X:+9}", "a:9"),
        ("ARG A=1 B=2\nARG C=$A.$B\nFROM a:$C", "a:1.2"),
        ("FROM a:1 AS one\nFROM b:2 AS two\nFROM one", "a:1"),
        ("FROM a:1 AS One\nFROM one AS two\nRUN true\nFROM two", "a:1"),
        ("FROM a:1\nFROM scratch\nCOPY --from=0 / /", "scratch"),
        ("# syntax=docker/dockerfile:1\n\n# FROM x\nFROM \\\n  a:1 \\\n  # why\n  AS b", "a:1"),
        ("FROM a:1\nRUN <<EOF\nFROM b:2\nEOF\n", "a:1"),
        ("FROM a:1\nARG Y=b\nRUN echo \\\n FROM b:2\n", "a:1"),
    ],
)
def test_the_last_stage_decides(text: str, image: str) -> None:
    assert base(text) == image


def test_an_argument_wins_over_its_default_and_a_stage_s_own_is_none_of_it() -> None:
    text = "ARG BASE=a:1\nFROM ${BASE}\nARG OTHER=x\n"
    assert base(text, BASE="b:2", OTHER="c") == "b:2"
    found = base_image(text, {}, "Dockerfile")
    assert (found.image, found.line, found.argument) == ("a:1", 2, "BASE")
    assert base_image("ARG T=1\nFROM a:$T", {}, "f").argument is None


def test_our_own_starts_from_the_base_in_every_stage() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    assert base(text).startswith("docker.io/nvidia/cuda:")
    assert base(text, BASE="localhost/base") == "localhost/base"


def test_what_has_no_base_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match="--file"):
        base("RUN true\n")
    with pytest.raises(UserError, match="--file"):
        base("")
    with pytest.raises(UserError, match=r"Dockerfile:2: FROM"):
        base("ARG X=1\nFROM \n# a\n".replace("FROM ", "FROM --platform=x"))
    text = "ARG BASE\nFROM $BASE\n"
    with pytest.raises(UserError, match=r"Dockerfile:2: .*--build-arg BASE=IMAGE"):
        base(text)
    assert base(text, BASE="a:1") == "a:1"


@pytest.mark.parametrize(
    "line",
    [
        "COPY . /",
        "COPY ./ /",
        "copy main.py app/deep.py /",
        "COPY app /",
        "COPY /app/ /",
        "COPY *.py /",
        "COPY main.py optional*.txt /",
        "COPY ../main.py /",
        'COPY ["main.py", "app", "/"]',
        "COPY --chown=1:1 --link main.py /",
        "COPY --from=build /any /",
        "COPY $X ${Y}/a /",
        "ADD https://example.com/a.tar /",
        "ADD git@example.com:a.git /",
        "COPY <<EOF /a\nmissing\nCOPY gone /\nEOF",
        "RUN cp gone /",
        "COPY main.py \\\n  app /",
    ],
)
def test_what_is_there_is_copied(line: str) -> None:
    assert list(missing_sources(f"FROM a\n{line}\n", ("main.py", "app/deep.py"))) == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("COPY gone main.py also /", ["gone", "also"]),
        ("COPY deep.py /", ["deep.py"]),
        ('ADD ["gone", "/"]', ["gone"]),
        ("COPY ../gone /", ["../gone"]),
    ],
)
def test_what_is_not_there_is_found_with_its_line(line: str, missing: list[str]) -> None:
    found = list(missing_sources(f"FROM a\n{line}\n", ("main.py", "app/deep.py")))
    assert found == [(2, source) for source in missing]
