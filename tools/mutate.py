"""Plant small faults in each package of src/drillyard, one at a time, and report which of them its
unit tests catch.

    python tools/mutate.py                    # eight faults a package, drawn by the newest commit's hash
    python tools/mutate.py --package launch --seed 3627644 --json caught.json

The kinds of fault: a comparison turned into its neighbour (`<` into `<=`, `==` into `!=`), a
condition negated, a whole number raised by one, a call or a `raise` removed. The same seed draws
the same kinds for every package, so that two commits can be compared: what counts is the share
caught. Faults are planted in a copy of the tree. One that makes the tests hang (a minute and three
times what they take without a fault) counts as caught. Tests run in one process: call it for two
packages at a time to keep two cores busy. Exit code 0, whatever is caught.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from uuid import uuid4

from drillyard.supervise.reaper import end_marked_processes

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/drillyard"
KINDS = (
    "comparison",
    "not",
    "off by one",
    "dropped call",
    "dropped raise",
    "comparison",
    "not",
    "off by one",
)
"""What is drawn for a package, in this order."""
TOP = "top"
"""The room of the modules beside the packages."""
OTHER_TESTS = {"data": ["data", "data_builtin"], "training": ["training", "checkpoint"]}
"""Directories of tests/unit for packages whose tests are not in the one with their name."""
TOP_TESTS = (
    "test_api",
    "test_deprecation",
    "test_formatting",
    "test_safe_files",
    "measurement",
    "cli",
    "launch",
)
_MARK = "DRILLYARD_MUTATION"
"""Variable of all processes of one run of tests."""
NEIGHBOUR: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Fault:
    """One place in one file: the text between two offsets (in bytes of UTF-8), and what takes its
    place."""

    kind: str
    file: str
    line: int
    start: int
    end: int
    replacement: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default=None, help="default: the newest commit's hash")
    parser.add_argument("--package", action="append", help="only this package; repeatable")
    parser.add_argument("--json", type=Path, help="write the faults and their results here too")
    arguments = parser.parse_args()
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    seed = arguments.seed or head.stdout.strip()
    packages = arguments.package or [
        *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")),
        TOP,
    ]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        tree = Path(directory)
        for part in ("src", "tests", "benchmarks", "tools", "recipes", "docs", "demo"):
            if (ROOT / part).is_dir():
                shutil.copytree(
                    ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__")
                )
        for file in ("pyproject.toml", "Makefile", "README.md"):
            shutil.copy(ROOT / file, tree / file)
        # Checked by the source's hash, as a planted fault may have its file's size and second.
        compileall.compile_dir(
            tree / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
        )
        for package in packages:
            found = test_directories(package)
            began = time.monotonic()
            if not found or not tests_pass(tree, found, timeout=1800):
                print(
                    f"{package}:"
                    f" {'its unit tests fail without a fault' if found else 'no unit tests'}",
                    flush=True,
                )
                continue
            timeout = 60 + 3 * (time.monotonic() - began)
            faults = draw(package, seed)
            caught = [is_caught(tree, fault, found, timeout) for fault in faults]
            print(f"{package}: {sum(caught)} of {len(faults)} caught", flush=True)
            for fault, seen in zip(faults, caught, strict=True):
                results.append({"package": package, "caught": seen, **asdict(fault)})
                if not seen:
                    print(
                        f"  not caught: {fault.kind}, {fault.file}:{fault.line}:"
                        f" {fault.replacement}",
                        flush=True,
                    )
    print(f"seed {seed}: {sum(result['caught'] for result in results)} of {len(results)} caught")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"seed": seed, "faults": results}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def test_directories(package: str) -> list[str]:
    """The unit tests of a package, directories and files relative to the root."""
    names = [
        f"tests/unit/{name}"
        for name in (TOP_TESTS if package == TOP else OTHER_TESTS.get(package, [package]))
    ]
    return [found for name in names for found in (name, f"{name}.py") if (ROOT / found).exists()]


def draw(package: str, seed: str) -> list[Fault]:
    """The faults of a package: one of each of KINDS, as far as the package has places for them."""
    places: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for path in sorted(
        PACKAGE.glob("*.py") if package == TOP else (PACKAGE / package).rglob("*.py")
    ):
        for fault in faults_of(path):
            places[fault.kind].append(fault)
    drawn = random.Random(f"{seed} {package}")
    found = []
    for kind in KINDS:
        if places[kind]:
            found.append(places[kind].pop(drawn.randrange(len(places[kind]))))
    return found


def faults_of(path: Path) -> Iterator[Fault]:
    """All faults that can be planted inside of the functions of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    file = str(path.relative_to(ROOT))

    def fault(kind: str, node: ast.expr | ast.stmt, replacement: str) -> Fault:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        return Fault(kind, file, node.lineno, start, end, replacement)

    tree = ast.parse(source)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    within = {
        id(node): node
        for function in functions
        for part in function.body
        for node in ast.walk(part)
    }
    # Python 3.11 gives no true positions inside of f-strings.
    formatted = {
        id(node)
        for node in within.values()
        if isinstance(node, ast.JoinedStr)
        for node in ast.walk(node)
    }
    for node in (within[key] for key in within if key not in formatted):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield fault(
                    "comparison",
                    node,
                    ast.unparse(ast.Compare(left, [NEIGHBOUR[type(operator)]()], [right])),
                )
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield fault("not", test, f"(not ({ast.unparse(test)}))")
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield fault("off by one", node, str(value + 1))
            case ast.Expr(value=ast.Call()):
                yield fault("dropped call", node, "pass")
            case ast.Raise():
                yield fault("dropped raise", node, "pass")


def is_caught(tree: Path, fault: Fault, tests: list[str], timeout: float) -> bool:
    """Whether one of the tests fails, or takes `timeout` seconds, with the fault planted in `tree`,
    then as it was."""
    *packages, name = Path(fault.file).parts[2:]
    mirrored = [
        str(Path(top, *packages[1:], f"test_{name}"))
        for top in tests
        if Path(top).name in packages[:1]
    ]
    mirrored += [] if packages else [f"tests/unit/test_{name}"]
    own = [test for test in mirrored if (tree / test).is_file()]
    path = tree / fault.file
    source = path.read_bytes()
    path.write_bytes(source[: fault.start] + fault.replacement.encode() + source[fault.end :])
    try:
        # Most faults fail the tests of their own file.
        return bool(own and not tests_pass(tree, own, timeout)) or not tests_pass(
            tree, tests, timeout
        )
    finally:
        path.write_bytes(source)


def tests_pass(tree: Path, tests: list[str], timeout: float) -> bool:
    """Whether the tests pass in `tree` within `timeout` seconds."""
    token = uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        _MARK: token,
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return False
    finally:
        # A supervisor or reaper with a fault may leave processes behind.
        end_marked_processes(token, _MARK)


if __name__ == "__main__":
    sys.exit(main())
