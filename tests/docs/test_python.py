# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is true: its blocks are a program that prints what it says, and need nothing but the public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    BlockForm,
    Client,
    GroupKind,
    Hello,
    KvGroup,
    Layout,
    Role,
    Runs,
    SpaceIdentity,
    SpaceRef,
    Tokens,
    WriteChunksRequest,
    object_forms,
    stored_form,
)
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


def test_the_lines_about_bytes_of_hybrid_models() -> None:
    """With the model that they speak of: group 0 needs everything, 1 and 4 the same window, 2 and 3 another."""
    windows = (0, 256, 64, 64, 256)
    groups = tuple(
        KvGroup(
            16,
            8,
            (Runs(0, 0, 1, 0, 1, 0, 64, 64),),
            BlockForm.OPAQUE,
            GroupKind.SLIDING_WINDOW if window else GroupKind.FULL,
            window,
            backend="b",
            layout="l",
        )
        for window in windows
    )
    chunk_tokens, engine_id = 256, "e" * 32
    sizes = {one.groups: one.object_bytes for one in object_forms(groups, chunk_tokens)}
    identity = SpaceIdentity("m", "r", "bfloat16", 1, OWN_HASH_ALGORITHM, stored_form(groups))
    (lines,) = re.findall(r"^ {4}(request = .*objects=.*)\n {4}(.*)$", TEXT, re.MULTILINE)
    with serving("--l1-size", "64MiB") as server, Client(server.address) as client:
        session = client.attach(engine_id, Role.SCHEDULER, bytes(16))
        next(session)
        names: dict[str, Any] = {
            "WriteChunksRequest": WriteChunksRequest,
            "object_forms": object_forms,
            "client": client,
            "engine_id": engine_id,
            "chunk_tokens": chunk_tokens,
            "layout": Layout((), groups),
            "space": SpaceRef(client.handshake(Hello(identity=identity)).space_base),
            "tokens": Tokens.from_ids(range(2 * chunk_tokens)),
            "full": bytes(sizes[0b00001]),
            "more": bytes(sizes[0b00001]),
            "window": bytes(sizes[0b10010]),
        }
        exec("\n".join(lines), names)
        session.close()
    stored = [(one.first_chunk, one.count, one.outcome.name, one.groups) for one in names["results"]]
    assert stored == [(0, 1, "STORED", 0b00001), (1, 1, "STORED", 0b10011)]


def test_users_import_from_one_place() -> None:
    texts = [*blocks("python"), *(path.read_text() for path in (ROOT / "examples").glob("*.py"))]
    pattern = re.compile(r"^\s*(?:from|import) (kvgrpc[\w.]*)", re.MULTILINE)
    assert {name for text in texts for name in pattern.findall(text)} == {"kvgrpc.client"}
