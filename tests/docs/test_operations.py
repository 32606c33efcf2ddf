# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md and docs/field-reports.md keep up with the code."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import tempfile
from pathlib import Path

import click

from kvgrpc.cli.root import main
from kvgrpc.config.places import default_socket_path
from kvgrpc.config.settings import Settings
from kvgrpc.runtime.recorder import END_S

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
REPORTS = (ROOT / "docs/field-reports.md").read_text()


def test_every_flag_is_described_and_no_other():
    described = re.findall(r"^\| `--([a-z0-9-]+)` \|", OPERATIONS, re.MULTILINE)
    assert described == [name.replace("_", "-") for name in Settings.model_fields]


def test_every_counter_is_described_and_no_other():
    described = set(re.findall(r"^\| `([a-z]+_?[a-z]*)` \|", OPERATIONS, re.MULTILINE))
    core = "\n".join(path.read_text() for path in (ROOT / "kvgrpc/core").glob("*.py"))
    core += (ROOT / "kvgrpc/runtime/admin.py").read_text()
    counted = set(re.findall(r'counters\["([a-z_]+)"\]', core))
    assert counted <= described
    assert [name for name in described if f'"{name}"' not in core] == []


def test_every_reason_of_a_refused_chunk_is_described_and_no_other():
    described = re.findall(r"`refused_([a-z_]+)`", OPERATIONS)
    core = "\n".join(path.read_text() for path in (ROOT / "kvgrpc/core").glob("*.py"))
    at_once = re.findall(r'Outcome\.REFUSED, "([A-Z_]+)"', core)
    for_room = re.findall(r'return "([A-Z_]+)"', (ROOT / "kvgrpc/core/index.py").read_text())
    assert sorted(described) == sorted(reason.lower() for reason in {*at_once, *for_room})


def test_the_three_default_places_are_described(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert f"`{default_socket_path({})}`" in OPERATIONS
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid)
    own = default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert f"`$XDG_RUNTIME_DIR/{own.relative_to(tmp_path)}`" in OPERATIONS
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda *_: False)
    temporary = str(default_socket_path({}).relative_to(tempfile.gettempdir()))
    assert f"`{temporary.replace('12345', 'UID')}`" in OPERATIONS


def test_the_unit_of_systemd_is_one_that_starts_and_ends():
    """Its command is understood, the default socket is in its folder, and it ends before it is killed."""
    unit = configparser.ConfigParser()
    unit.read_string(re.findall(r"^```ini\n(.*?)^```$", OPERATIONS, re.MULTILINE | re.DOTALL)[0])
    service = unit["Service"]
    _, *words = shlex.split(service["ExecStart"])
    context = click.Context(main)
    command = main.get_command(context, words[0])
    assert command is not None and command.make_context(words[0], words[1:])
    assert f"/run/{service['RuntimeDirectory']}/kvgrpc.sock" in OPERATIONS
    settings = Settings()
    ends_s = (settings.drain_ms + settings.flush_ms) / 1000 + END_S
    assert int(service["TimeoutStopSec"]) > ends_s


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
