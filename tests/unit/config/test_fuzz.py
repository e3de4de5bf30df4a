"""Whatever is done to a good run config, the answer is a valid config or a UserError that names a
line: no traceback.

Damage is done to values (another type, an odd number, a missing or foreign key) and to the text of
the file itself.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drillyard.config.data_checks import has_held_out
from drillyard.config.load import load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run, require_valid, resolve_global_batch
from drillyard.errors import UserError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
GOOD = [ROOT / "demo" / "run.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]
TEXTS = [
    path.read_text(encoding="utf-8")
    for path in GOOD
    if "training:" in path.read_text(encoding="utf-8")
]

KEYS = [
    "model",
    "path",
    "id",
    "architecture",
    "vocab_size",
    "steps",
    "lr",
    "train",
    "weight",
    "name",
    "",
    "0",
    "é",
    "<<",
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["auto", "bpe", "builtin:", "builtin:text-to-sql", "${env:NOWHERE}", "/", "~", "1e5", "\0"]
    ),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(
        st.sampled_from(KEYS), st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3
    ),
)
# What a line of the error begins with: `run.yaml:7:`, `run.yaml:` for the file as a whole, or the
# override.
PLACE = re.compile(r"(run\.yaml(:\d+)?|--set .*): .+")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a document, the document's own, (), among them."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(inner for key, item in items for inner in places(item, (*path, key)))]


@st.composite
def damaged_values(draw: st.DrawFn) -> str:
    """A good config, with up to three of its values replaced, removed or given a further key."""
    document = copy.deepcopy(yaml.safe_load(draw(st.sampled_from(TEXTS))))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            continue
        parent = document
        for part in path[:-1]:
            parent = parent[part]
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                parent[path[-1]] = draw(ODD)
            case "remove":
                del parent[path[-1]]
            case "add" if isinstance(parent, dict):
                parent[draw(st.sampled_from(KEYS))] = draw(ODD)
    return yaml.safe_dump(document, allow_unicode=True)


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """A good config's text, with characters put in, taken out, or a stretch of it repeated."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        end = at + draw(st.integers(0, 40))
        middle = draw(
            st.sampled_from(
                [
                    "",
                    text[at:end] * 2,
                    "\t",
                    "- ",
                    ": ",
                    "{",
                    "]",
                    "'",
                    "&a ",
                    "*a",
                    "!!x ",
                    "\n",
                    "é",
                    "\r",
                ]
            )
        )
        text = text[:at] + middle + text[end:]
    return text


def judge(directory: Path, text: str, overrides: list[str], num_ranks: int) -> None:
    """Load and check as `drillyard train` does. A valid config must survive what every command does
    with it."""
    path = directory / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config = load_run_config(path, overrides)
        require_valid(config, num_ranks, has_gpu=False)
    except UserError as error:
        for line in str(error).replace(f"{directory}/", "").splitlines():
            assert PLACE.fullmatch(line), str(error)
        return
    assert isinstance(config, RunConfig) and check_run(config, num_ranks=num_ranks) == []
    assert resolve_global_batch(config, num_ranks) > 0
    has_held_out(config)
    save_resolved(config, directory / "saved.yaml")
    assert load_run_config(directory / "saved.yaml") == config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


FUZZ = settings(
    max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def test_the_configs_that_are_damaged_are_good(directory: Path) -> None:
    assert len(TEXTS) >= 3
    for text in TEXTS:
        (directory / "run.yaml").write_text(text)
        require_valid(load_run_config(directory / "run.yaml"), 2)


@FUZZ
@given(text=damaged_values(), num_ranks=st.integers(1, 9))
def test_damaged_values_are_reported(directory: Path, text: str, num_ranks: int) -> None:
    judge(directory, text, [], num_ranks)


@FUZZ
@given(text=damaged_texts())
def test_damaged_texts_are_reported(directory: Path, text: str) -> None:
    judge(directory, text, [], 2)


@FUZZ
@given(
    text=st.sampled_from(TEXTS),
    key=st.one_of(
        st.sampled_from(["training.steps", "data.source.0.path", "data.source", "model", "name"]),
        st.text("ab.=0 [{:é", max_size=8),
    ),
    value=st.one_of(st.text(max_size=10), st.text("[]{}:,'\"*&!-1e. \n", max_size=8), ODD.map(str)),
)
def test_damaged_overrides_are_reported(directory: Path, text: str, key: str, value: str) -> None:
    judge(directory, text, [re.sub(r"[^\S ]|[^ -\U0010ffff]", "", f"{key}={value}")], 2)
