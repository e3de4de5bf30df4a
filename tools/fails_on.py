"""Run today's tests against the source of an earlier commit and list which of them fail there, and
why.

A test that guards a fix must fail without the fix. This checks it: the earlier commit goes into a
temporary git worktree, today's `tests/` is copied over it, and each named test runs there.

    python tools/fails_on.py COMMIT tests/unit/data/test_chat_template.py::test_weight ...
    python tools/fails_on.py COMMIT --table fixes.tsv

A table has a row per defect: its name, a tab, and the tests, separated by spaces; further columns
are ignored. A name without brackets stands for all of its parameters; one of them failing is
enough. Exit code 1 when a test passes there or cannot be collected.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--table", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    rows = [("", test) for test in arguments.tests]
    for table in arguments.table:
        for line in table.read_text(encoding="utf-8").splitlines():
            defect, _, rest = line.partition("\t")
            rows += [(defect, test) for test in rest.partition("\t")[0].split()]
    results: dict[str, str] = {}
    directory = Path(tempfile.mkdtemp(prefix="fails-on-")) / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run(
        [*git, "add", "--quiet", "--detach", str(directory), arguments.commit], check=True
    )
    try:
        shutil.rmtree(directory / "tests")
        shutil.copytree(
            ROOT / "tests", directory / "tests", ignore=shutil.ignore_patterns("__pycache__")
        )
        by_file = defaultdict(list)
        for _, test in rows:
            by_file[test.partition("::")[0]].append(test)
        for tests in by_file.values():
            results.update(run(directory, sorted(set(tests))))
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)
        shutil.rmtree(directory.parent, ignore_errors=True)
    for defect, test in rows:
        print(f"{results[test]}\n    {test}" + (f"\n    {defect}" if defect else ""))
    unproven = sum(not result.startswith("fails") for result in results.values())
    print(f"{len(results) - unproven} of {len(results)} tests fail on {arguments.commit}")
    return 1 if unproven else 0


def run(directory: Path, tests: list[str]) -> dict[str, str]:
    """What each of the tests of one file does in `directory`: "fails: REASON", "passes" or "not
    run: REASON"."""
    report = directory.parent / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(directory / "src")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *tests,
    ]
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    failures: dict[str, str] = {}
    passed: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name = case.get("name") or ""
        names = {name, name.partition("[")[0], ""}
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is None:
            passed |= names
        elif case.get("classname"):
            reason = (problem.get("message") or "").strip().split("\n")[0]
            if "RankFailed" in reason:
                # A rank's traceback ends with its cause.
                reason = [
                    line for line in (problem.text or "").splitlines() if line.startswith("E ")
                ][-1][1:].strip()
            reason = reason[:200]
            failures |= dict.fromkeys(names, reason)
    if not failures and not passed and len(tests) > 1:
        # One name that does not exist keeps pytest from running the others.
        return {test: result for one in tests for test, result in run(directory, [one]).items()}
    results = {}
    for test in tests:
        name = test.partition("::")[2].rpartition("::")[2]
        if name in failures:
            results[test] = f"fails: {failures[name]}"
        elif name in passed:
            results[test] = "passes"
        else:
            words = [
                line for line in ended.stdout.splitlines() if line.startswith(("E  ", "ERROR"))
            ]
            results[test] = f"not run: {' '.join(words)[:300] or ended.stderr.strip()[-300:]}"
    return results


if __name__ == "__main__":
    sys.exit(main())
