# SPDX-License-Identifier: Apache-2.0
"""docs/security.md keeps up with the code."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from kvgrpc.cli.status import status
from kvgrpc.config.credentials import VARIABLES
from kvgrpc.service.access import ROLES, read_access

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/security.md").read_text()


def test_the_example_is_a_file_of_tenants(tmp_path: Path):
    (example,) = re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "access.json").write_text(example)
    access = read_access(tmp_path / "access.json")
    assert access.quotas() == {"team-a": 64 << 30, "shared": None, "team-b": 16 << 30}
    assert access.socket is not None and access.socket.methods == ROLES["viewer"] | ROLES["admin"]
    assert {tenant.name for tenant in (*access.by_token.values(), *access.by_certificate.values())} == {
        "team-a",
        "team-b",
        "operators",
    }


def test_every_variable_option_and_field_is_named():
    table = TEXT.partition("| variable | option")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(KVGRPC_\w+)`", table)) == set(VARIABLES.values())
    assert set(re.findall(r"`([a-z_]+)`", table)) == set(VARIABLES)
    shown = CliRunner().invoke(status, ["--help"]).output
    assert all(option in shown for option in re.findall(r"`(--[a-z-]+)`", table))
