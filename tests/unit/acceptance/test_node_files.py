"""The node side as it travels: plain files for the Python of any node."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from drillyard.acceptance.job import node_files

SHIPPED = {Path(file.path).name: file.content for file in node_files()}
OF_PYTHON_3_10 = {"pairwise", "TypeAlias", "anext"}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_file_is_for_python_3_9_and_its_standard_library(name: str) -> None:
    tree = ast.parse(SHIPPED[name], feature_version=(3, 9))
    allowed = set(sys.stdlib_module_names)
    if name.startswith("torch_") or name == "ranks.py":
        allowed.add("torch")
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            assert {alias.name.split(".")[0] for alias in each.names} <= allowed
        elif isinstance(each, ast.ImportFrom) and each.level == 0:
            module = (each.module or "").split(".")[0]
            assert module in allowed or f"{module}.py" in SHIPPED
            assert not {alias.name for alias in each.names} & OF_PYTHON_3_10
        elif isinstance(each, ast.ImportFrom) and each.module:
            assert f"{each.module}.py" in SHIPPED
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
            strict = any(keyword.arg == "strict" for keyword in each.keywords)
            assert not (each.func.id == "zip" and strict)
            assert not (each.func.id == "isinstance" and isinstance(each.args[1], ast.BinOp))
