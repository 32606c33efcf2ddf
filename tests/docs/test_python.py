# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is true: its blocks are a program that prints what it says, and need nothing but the public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.served import serving

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/python.md").read_text()
MARK = "---- end of block ----"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def printed() -> list[str]:
    """What each Python block is said to print: the text block that follows it, or nothing."""
    found = [*re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL), ("", "")]
    pairs = [(kind, *found[at + 1]) for at, (kind, _) in enumerate(found[:-1])]
    return [text if then == "text" else "" for kind, then, text in pairs if kind == "python"]


def test_the_page_is_a_program_that_prints_what_it_says(tmp_path: Path) -> None:
    program = f"print({MARK!r})\n".join([*blocks("python"), ""])
    with serving("--l1-size", "64MiB") as server:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "KVGRPC_SOCKET": str(server.socket)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(f"{MARK}\n")[:-1] == printed()


def test_users_import_from_one_place() -> None:
    texts = [*blocks("python"), *(path.read_text() for path in (ROOT / "examples").glob("*.py"))]
    pattern = re.compile(r"^\s*(?:from|import) (kvgrpc[\w.]*)", re.MULTILINE)
    assert {name for text in texts for name in pattern.findall(text)} == {"kvgrpc.client"}
