"""Every sentence that a user of Drillyard may read, in one file: errors, help, warnings,
descriptions of settings.

    python tools/messages.py            # rewrites tests/unit/messages.txt (make messages)
    python tools/messages.py --check    # exit code 1 where the file is out of date

A sentence is any text in src/drillyard of two or more words, as it is put together from literals:
`{name}` stands for a value, `[a|b]` for a choice. Docstrings count where they are a command's help.
The package is parsed, never imported. Sentences have no line numbers and keep the order of their
file, so a diff shows what changed and nothing else.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/drillyard"
SNAPSHOT = ROOT / "tests/unit/messages.txt"
ROWS_OF_DATA = ("data_builtin/", "data/builtin/")
TWO_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? \(?`?[a-z]{2,}")
MOST_LINES = 4
"""A longer text is a file that a command writes, such as a job script."""


def main() -> int:
    text = "".join(section(path) for path in sorted(SOURCE.rglob("*.py")))
    if "--check" not in sys.argv[1:]:
        SNAPSHOT.write_text(text, encoding="utf-8")
        return 0
    written = SNAPSHOT.read_text(encoding="utf-8") if SNAPSHOT.exists() else ""
    print(
        "\n".join(
            unified_diff(
                written.splitlines(), text.splitlines(), "messages.txt", "src", n=0, lineterm=""
            )
        )
    )
    return int(written != text)


def section(path: Path) -> str:
    """The sentences of one file under its name; empty where it has none."""
    name = path.relative_to(SOURCE).as_posix()
    if name.startswith(ROWS_OF_DATA):
        return ""
    found = dict.fromkeys(sentences(ast.parse(path.read_text(encoding="utf-8"))))
    return "".join([f"# {name}\n", *(f"{line}\n" for line in found), "\n"]) if found else ""


def sentences(node: ast.AST) -> Iterator[str]:
    """The sentences below `node`, in the order of the file."""
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.FunctionDef) and any(
        ".command(" in ast.unparse(each) for each in node.decorator_list
    ):
        paragraphs = (ast.get_docstring(node) or "").split("\n\n")
        yield from (
            sentence for each in paragraphs for sentence in lines_of(" ".join(each.split()))
        )
    if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)):
        text = rendered(node)
        if text is not None:
            yield from lines_of(text)
            return
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_docstring:
            yield from sentences(child)


def lines_of(text: str) -> Iterator[str]:
    """The lines of `text` that are sentences."""
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) <= MOST_LINES:
        yield from (line for line in lines if TWO_WORDS.search(line))


def rendered(node: ast.AST) -> str | None:
    """The text that an expression makes, values as `{name}`; None where it makes none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) or "" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        text = rendered(node.value)
        return f"{{{short_name(node.value)}}}" if text is None else text
    if isinstance(node, ast.IfExp):
        choices = [rendered(part) for part in (node.body, node.orelse)]
        return (
            None
            if choices == [None, None]
            else f"[{'|'.join('...' if c is None else c for c in choices)}]"
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [(rendered(part), part) for part in (node.left, node.right)]
        if any(text is not None for text, _ in parts):
            return "".join(
                f"{{{short_name(part)}}}" if text is None else text for text, part in parts
            )
    return None


def short_name(node: ast.expr) -> str:
    """What a value is called: the last name in its expression, `...` where it has none."""
    names = re.findall(
        r"[A-Za-z_]\w*", ast.unparse(node.func if isinstance(node, ast.Call) else node)
    )
    return names[-1] if names else "..."


if __name__ == "__main__":
    sys.exit(main())
