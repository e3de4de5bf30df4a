"""YAML text as plain values, with the line of every key.

PyYAML composes the text to nodes, which know their lines; this module turns nodes into values
itself, so that duplicate keys are errors, keys are always text, and scalars mean what an engineer
expects: `2e-5` is a number (YAML 1.1 calls it text), `12:00:00` is text (YAML 1.1 calls it 43200),
`010` is text (YAML 1.1 calls it 8), a date is text. `yes`, `no`, `on` and `off` are booleans, as in
PyYAML. Anchors, aliases and merge keys (`<<`) work.

A document is small: its size, its depth and the number of its values, counted where aliases and
merges are expanded, are limited, so that no text takes more than a few seconds or megabytes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import yaml

from drillyard.config.problems import Path, Problem, SourceLocation
from drillyard.errors import ConfigError, NotFoundError
from drillyard.guarded_files import open_input

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+")
STANDARD_TAG = "tag:yaml.org,2002:"
MERGE_TAG = f"{STANDARD_TAG}merge"
LONGEST_NUMBER = 300
"""Characters; a longer one is text, as Python limits conversions to numbers."""
MAX_BYTES = 256 << 10
"""A config with every default spelled out has 5,000; PyYAML reads about 100,000 bytes a second."""
MAX_DEPTH = 40
"""The deepest key of any config is at 8."""
MAX_VALUES = 10_000
_ENDS_WITH_ZERO = re.compile(r"[0-9]+\.[0-9]*0")
LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")


class WrittenFloat(float):
    """A number whose text ends with a 0, which its value does not tell: 1.30 is 1.3."""

    text: str


yaml.SafeDumper.add_representer(WrittenFloat, yaml.SafeDumper.represent_float)


@dataclass(frozen=True)
class YamlDocument:
    """The values of one YAML text, where each was written, and what was wrong with how it was
    written."""

    value: Any
    places: dict[Path, SourceLocation]
    problems: tuple[Problem, ...] = ()


def read_document(path: str | os.PathLike[str]) -> YamlDocument:
    """The document in the file at `path`. UserError when it cannot be read, is not UTF-8 or is not
    YAML."""
    label = os.fspath(path)
    if os.path.isdir(path):
        raise ConfigError(f"{label}: is a directory; name the YAML file in it")
    try:
        with open_input(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(
            f"{label}: no such file; `drillyard init` writes a run.yaml and a cluster.yaml to start"
            " from"
        ) from None
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{label}: {_TOO_LARGE}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ConfigError(
            f"{label}:{line}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8 text"
        ) from None
    return parse_document(text, label)


def parse_document(text: str, label: str) -> YamlDocument:
    """`text` as a document with lines named `label:LINE`. UserError when it is not YAML."""
    top = SourceLocation(label, 0)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{label}: {_TOO_LARGE}")
    try:
        node = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label}:{mark.line + 1}" if mark else label
        what = ", ".join(part for part in (error.context, error.problem) if part)
        tab = "; indent with spaces, not tabs" if "'\\t'" in what else ""
        raise ConfigError(f"{where}: not valid YAML: {what}{tab}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{label}:{line}: not valid YAML: character U+{error.character:04X} is not allowed"
        ) from None
    except (ValueError, OverflowError) as error:
        # PyYAML converts escapes such as "\\UFFFFFFFF" and numbers of directives without checking
        # their range.
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    if node is None:
        return YamlDocument(None, {(): top})
    builder = _Builder(label)
    value = builder.build(node, ())
    return YamlDocument(value, {(): top, **builder.places}, tuple(builder.problems))


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar."""
    if len(text) > LONGEST_NUMBER:
        return text
    if text in ("", "~") or text.lower() == "null":
        return None
    if text.lower() in BOOLEANS and text in (text.lower(), text.upper(), text.capitalize()):
        return BOOLEANS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text.replace("_", ""), 16 if text.startswith("0x") else 10)
    if FLOAT.fullmatch(text) and not LEADING_ZERO.fullmatch(text):
        plain = text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
        if _ENDS_WITH_ZERO.fullmatch(text) is None:
            return float(plain)
        number = WrittenFloat(plain)
        number.text = text
        return number
    return text


_TOO_LARGE = (
    f"has more than {MAX_BYTES >> 10} KiB, too large for a config; give the path of the right file"
)
_TOO_MANY = f"more than {MAX_VALUES:,} values, with aliases (*name) expanded; give fewer"
_TOO_DEEP = f"more than {MAX_DEPTH} levels of nested values; no setting is that deep"


class _Composer(yaml.SafeLoader):
    """Composes a limited number of nodes (keys, values), and down to a limited depth: PyYAML
    recurses at each level."""

    _depth = 0
    _count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > 2 * MAX_VALUES:
            problem = _TOO_DEEP if self._depth > MAX_DEPTH else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Builder:
    """Values and places from nodes, collecting duplicate keys and tags that have no meaning
    here."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.places: dict[Path, SourceLocation] = {}
        self.problems: list[Problem] = []
        self.open: list[yaml.Node] = []
        self.count = 0

    def place(self, node: yaml.Node) -> SourceLocation:
        line = node.start_mark.line + 1
        return SourceLocation(f"{self.label}:{line}", line)

    def accepts(self, node: yaml.Node, path: Path) -> bool:
        """Count a node, and add to the problems if it can have no value. UserError over a limit."""
        self.count += 1
        where = self.place(node).label
        if self.count > MAX_VALUES:
            raise ConfigError(f"{where}: {_TOO_MANY}")
        if any(node is outer for outer in self.open):
            self.problems.append(Problem(path, "an alias that contains itself"))
            return False
        if len(self.open) > MAX_DEPTH:
            raise ConfigError(f"{where}: {_TOO_DEEP}")
        if not node.tag.startswith(STANDARD_TAG) or node.tag == f"{STANDARD_TAG}binary":
            self.problems.append(
                Problem(
                    path,
                    f"the YAML tag {node.tag.replace(STANDARD_TAG, '!!')} has no meaning here;"
                    " remove it",
                )
            )
            return False
        return True

    def build(self, node: yaml.Node, path: Path) -> Any:
        if not self.accepts(node, path):
            return None
        if isinstance(node, yaml.ScalarNode):
            return self.leaf(node)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            assert isinstance(node, yaml.SequenceNode)
            return [self.item(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self.open.pop()

    def item(self, node: yaml.Node, path: Path) -> Any:
        self.places[path] = self.place(node)
        return self.build(node, path)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, (key_node, value_node) in self.entries(node, path).items():
            inner = (*path, key)
            self.places[inner] = self.place(key_node)
            values[key] = self.build(value_node, inner)
        return values

    def entries(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value by key: those of merged mappings first, so that the mapping's own keys win,
        and earlier merges win over later ones."""
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE_TAG:
                merged = (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                for source in reversed(merged):
                    if not isinstance(source, yaml.MappingNode):
                        self.problems.append(Problem(path, "'<<' merges mappings only"))
                    elif self.accepts(source, path):
                        self.open.append(source)
                        found |= self.entries(source, path)
                        self.open.pop()
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE_TAG:
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.places.setdefault((*path, "?"), self.place(key_node))
                self.problems.append(
                    Problem((*path, "?"), "a key must be a word, not a list or a mapping")
                )
                continue
            key = key_node.value
            if key in own:
                inner = (*path, key)
                self.problems.append(
                    Problem(inner, f"given twice, on lines {own[key]} and {line}; keep one")
                )
            own.setdefault(key, line)
            found[key] = key_node, value_node
        return found

    @staticmethod
    def leaf(node: yaml.ScalarNode) -> Any:
        text: str = node.value
        return scalar(text) if node.style is None else text
