"""The cluster config that `launch` takes: the user's own text with what `--set` gave and with the
settings that it lacks.

Comments and order stay: values are put into the text at the places that YAML's own parser gives.
The result is parsed again, and taken only if it says what it should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from drillyard.config.load import apply_overrides, yaml_text
from drillyard.config.yaml_document import YamlDocument, parse_document
from drillyard.errors import ConfigError

Edit = tuple[int, int, str]
"""The text from one offset to another becomes this."""


def launch_values(
    document: YamlDocument, overrides: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a config with `overrides` (KEY=VALUE), and each of `settings` that neither
    has, also within a section that they have."""
    values: dict[str, Any] = apply_overrides(document, overrides).value
    return _completed(values, settings)


def _completed(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(values)
    for key, value in settings.items():
        if isinstance(value, Mapping) and isinstance(made.get(key) or {}, Mapping):
            made[key] = _completed(made.get(key) or {}, value)
        else:
            made.setdefault(key, value)
    return made


def with_values(text: str, values: Mapping[str, Any]) -> str | None:
    """`text`, a YAML mapping, changed to say `values`; itself where it does.

    None where it cannot be changed in place: an alias (`*name`) would change with its anchor.
    """
    label = "the config"
    before = parse_document(text, label).value
    root = yaml.compose(text, yaml.SafeLoader)
    edits = sorted(_edits(text, root, before, values), key=lambda each: each[0])
    made = text
    for start, end, new in reversed(edits):
        made = made[:start] + new + made[end:]
    try:
        found = parse_document(made, label)
    except ConfigError:
        return None
    return made if found.value == values and not found.problems else None


def _edits(text: str, node: yaml.Node | None, have: Any, want: Any) -> Iterator[Edit]:
    """What turns the value of a mapping or list into another one. Within a section before what is
    added after it."""
    if isinstance(node, yaml.MappingNode):
        own = {key.value: (key, value) for key, value in node.value}
        for name, (key, value) in own.items():
            if name not in want or have.get(name) == want[name]:
                continue
            if _is_inside(value, have[name], want[name]):
                yield from _edits(text, value, have[name], want[name])
            else:
                end = _end_of_value(text, value)
                yield key.end_mark.index, end, f": {_flow(want[name])}"
        missing = {
            key: value
            for key, value in want.items()
            if key not in own and (key not in have or have[key] != value)
        }
        if missing:
            yield _addition(text, node, missing)
    elif isinstance(node, yaml.SequenceNode):
        for item, old, new in zip(node.value, have, want, strict=True):
            if old == new:
                continue
            if _is_inside(item, old, new):
                yield from _edits(text, item, old, new)
            else:
                yield item.start_mark.index, _end_of_value(text, item), _flow(new)


def _is_inside(node: yaml.Node, have: Any, want: Any) -> bool:
    """Whether a value becomes another one by changes inside of it."""
    if isinstance(node, yaml.MappingNode) and node.value:
        return isinstance(want, Mapping) and have.keys() <= want.keys()
    if isinstance(node, yaml.SequenceNode):
        return isinstance(want, list) and len(have) == len(want)
    return False


def _addition(text: str, node: yaml.MappingNode, missing: Mapping[str, Any]) -> Edit:
    if node.flow_style:
        place = node.end_mark.index - 1
        comma = ", " if node.value else ""
        return place, place, comma + _flow(missing)[1:-1]
    # After the last value: its end mark is where the next token begins, past comments.
    place = _end_of_line(text, node.value[-1][1])
    indent = " " * node.value[0][0].start_mark.column
    lines = yaml_text(missing, width=_UNBROKEN).splitlines()
    return place, place, "".join(f"\n{indent}{line}" for line in lines)


def _end_of_line(text: str, node: yaml.Node) -> int:
    """The end of the last line of a value, its comment included."""
    end = _end_of_value(text, node)
    if text[:end].endswith("\n"):
        return len(text[:end].rstrip("\n"))
    found = text.find("\n", end)
    return len(text) if found < 0 else found


def _end_of_value(text: str, node: yaml.Node) -> int:
    """Where a value ends, without the comment after it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        inner = node.value[-1]
        node = inner[1] if isinstance(inner, tuple) else inner
    place = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return len(text[:place].rstrip("\n"))
    return place


def _flow(value: Any) -> str:
    """A value on one line, as it is written inside of braces."""
    return yaml_text([value], flow=True, width=_UNBROKEN).strip()[1:-1]


_UNBROKEN = 1 << 20
