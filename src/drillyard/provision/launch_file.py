"""The cluster config that `launch` takes: the user's own text with the settings that it lacks.

Comments and order stay: settings are put into the text at the places that YAML's own parser gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """`text`, a YAML mapping, with each of `settings` that it does not have; what it has wins, also
    within a section that both have. `text` itself where nothing is missing."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    for place, added in sorted(_insertions(text, root, settings), reverse=True):
        text = text[:place] + added + text[place:]
    return text


def _insertions(
    text: str, node: yaml.MappingNode, settings: Mapping[str, Any]
) -> Iterator[tuple[int, str]]:
    """Places in the text, as offsets, and what goes there."""
    given = {key.value: value for key, value in node.value}
    missing = {key: value for key, value in settings.items() if key not in given}
    for key, value in settings.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), yaml.MappingNode):
            yield from _insertions(text, given[key], value)
    if not missing:
        return
    if node.flow_style:
        comma = ", " if node.value else ""
        yield node.end_mark.index - 1, comma + _dumped(missing, flow=True).strip("{}\n")
        return
    # After the last value: its end mark is where the next token begins, past comments.
    last = node.value[-1][1]
    place = _end_of(text, last)
    indent = " " * node.value[0][0].start_mark.column
    lines = _dumped(missing, flow=False).splitlines()
    yield place, "".join(f"\n{indent}{line}" for line in lines)


def _end_of(text: str, node: yaml.Node) -> int:
    """The end of the last line of a value, its comment included."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        inner = node.value[-1]
        node = inner[1] if isinstance(inner, tuple) else inner
    place = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return len(text[:place].rstrip("\n"))
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _dumped(settings: Mapping[str, Any], *, flow: bool) -> str:
    plain: str = yaml.safe_dump(
        dict(settings), sort_keys=False, default_flow_style=flow, width=1 << 20
    )
    return plain
