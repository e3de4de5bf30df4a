"""How large src/drillyard is: lines, statements, files and small files by package, and class names that stand twice.

    python tools/size.py

A report, not a gate. Statements are `ast.stmt` nodes, docstrings included; lines are all lines of a file.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src/drillyard"
SMALL_LINES = 60


def main() -> None:
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.count("\n")
        name = path.relative_to(ROOT).parts[0] if path.parent != ROOT else "(top)"
        found = Counter(
            lines=lines,
            statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)),
            files=1,
            small=lines < SMALL_LINES,
        )
        sizes[name] += found
        sizes["all"] += found
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path.relative_to(ROOT)))
    columns = ("lines", "statements", "files", "small")
    print(f"{'package':14}" + "".join(f"{name:>12}" for name in columns))
    for package, counts in sorted(sizes.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{package:14}" + "".join(f"{counts[name]:>12,}" for name in columns))
    repeated = {name: paths for name, paths in classes.items() if len(paths) > 1}
    print(f"\npublic class names that stand more than once: {len(repeated)}")
    for name, paths in sorted(repeated.items()):
        print(f"  {name}: {', '.join(paths)}")


if __name__ == "__main__":
    main()
