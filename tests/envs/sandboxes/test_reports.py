"""The page of public reports names tests that exist, and leaves no report without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[2] / "docs" / "sandbox-reports.md"
ROWS = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "|---" not in line]
REPORTS = [row for row in ROWS if not row.startswith("| report |")]


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions}


def test_all_reports_are_there() -> None:
    assert len(REPORTS) == 25 + 14


@pytest.mark.parametrize("row", REPORTS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_report_names_tests_that_exist(row: str) -> None:
    named = re.findall(r"`([./\w]+\.py)::(\w+)`", row)
    assert named
    for file, name in named:
        assert name in functions_of(HERE / file), f"{file} has no {name}"
