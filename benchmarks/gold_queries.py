"""The judge of SQL on a text-to-SQL data set: every reference query must be right on its schema.

    python benchmarks/gold_queries.py FILE

FILE is JSON Lines with `schema` (CREATE TABLE statements) and `sql`, such as Spider's. Each query
is judged on the schema as it is, with sqlite_sequence in it as databases with AUTOINCREMENT print
it, and as sqlite's `.dump` writes it. Printed: the outcomes, and the CPU seconds. Exit code 1 if
one query is not right.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time

from drillyard.evaluation.sql_scoring import judge

VARIANTS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "with sqlite_sequence": lambda schema: f"{schema}; CREATE TABLE sqlite_sequence(name,seq);",
    "as .dump": lambda schema: (
        f"PRAGMA foreign_keys=OFF;\nBEGIN TRANSACTION;\n{schema};\nDELETE FROM sqlite_sequence;\n"
        "INSERT INTO sqlite_sequence VALUES('a',3);\nCOMMIT;\n"
    ),
}


def main() -> int:
    """Print a line for each variant of the schemas."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FILE")
    try:
        rows = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: is not a readable JSON Lines file: {error}")
    wrong = 0
    for name, change in VARIANTS.items():
        begin, outcomes = process_time(), Counter[str]()
        for number, row in enumerate(rows, 1):
            verdict = judge({**row, "schema": change(row["schema"])}, row["sql"])
            outcomes[verdict.outcome] += 1
            if verdict.outcome != "correct":
                print(f"line {number}: {verdict.outcome}: {verdict.reason}: {row['sql']}")
        wrong += len(rows) - outcomes["correct"]
        seconds = process_time() - begin
        print(f"{name:22} {outcomes['correct']:5} of {len(rows):5} right, {seconds:.1f} s of CPU")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
