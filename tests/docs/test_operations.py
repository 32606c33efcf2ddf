# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md and docs/field-reports.md keep up with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvgrpc.config.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
REPORTS = (ROOT / "docs/field-reports.md").read_text()


def test_every_flag_is_described_and_no_other():
    described = re.findall(r"^\| `--([a-z0-9-]+)` \|", OPERATIONS, re.MULTILINE)
    assert described == [name.replace("_", "-") for name in Settings.model_fields]


def test_every_counter_is_described_and_no_other():
    described = set(re.findall(r"^\| `([a-z]+_?[a-z]*)` \|", OPERATIONS, re.MULTILINE))
    core = "\n".join(path.read_text() for path in (ROOT / "kvgrpc/core").glob("*.py"))
    counted = set(re.findall(r'counters\["([a-z_]+)"\]', core))
    assert counted <= described
    assert [name for name in described if f'"{name}"' not in core] == []


def test_all_field_reports_are_mapped():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", REPORTS, re.MULTILINE)]
    assert numbers == list(range(1, 73))


def test_the_tests_that_field_reports_name_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", REPORTS)
    functions = {
        (file, node.name)
        for file in {file for file, _ in named}
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [name for name in named if name not in functions] == []
