# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md is true: golden values, the table of errors, and every call by hand against a running server."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.core.keys import chunk_keys, object_name, space_base, space_digest
from kvgrpc.core.types import SpaceIdentity, SpaceRef
from kvgrpc.status import REASON_CODES
from kvgrpc.v1 import admin_pb2, cache_pb2, engine_pb2
from tests.served import serving

TEXT = (Path(__file__).resolve().parents[2] / "docs/protocol.md").read_text()
IDENTITY = SpaceIdentity("llama", "r1", "bfloat16", 1, "sha256-u32le", "token-major:8:128:2")


def golden() -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+) \| `([0-9a-f]{32,64})` \|$", TEXT, re.MULTILINE))


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def test_golden_values():
    base = space_base(IDENTITY, 16)
    plain = space_digest(SpaceRef(base))
    first, second = chunk_keys(plain, tokens(*range(32)), 16)
    order, short = "1x2x2048", "8x2x2048"
    extreme = chunk_keys(plain, tokens(0, 2**31 - 1, 2**32 - 1, *[7] * 13), 16)[0]
    assert golden() == {
        "space_base": base.hex(),
        "space, no lora, no salt": plain.hex(),
        "space, lora `a@v1`": space_digest(SpaceRef(base, lora="a@v1")).hex(),
        "space, salt `a@v1`": space_digest(SpaceRef(base, cache_salt="a@v1")).hex(),
        "key of tokens 0..15, no lora, no salt": first.hex(),
        "key of tokens 16..31 after them": second.hex(),
        "key of tokens 0, 2147483647, 4294967295, then thirteen times 7": extreme.hex(),
        "object of tokens 0..15, generation 0, KV rank 0, order `1x2x2048`": object_name(plain, 0, first, 0, order),
        "object of tokens 0..15, generation 1, KV rank 3, order `8x2x2048`": object_name(plain, 1, first, 3, short),
    }


def test_the_table_of_errors_is_the_servers():
    rows = {reason: code for code, reason in re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| .+ \|$", TEXT, re.MULTILINE)}
    assert rows == {reason.value: code.name for reason, code in REASON_CODES.items()}


def walkthrough() -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def test_the_walkthrough_names_every_method():
    files = (cache_pb2, engine_pb2, admin_pb2)
    methods = [m.name for file in files for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods]
    assert [name for name in methods if not re.search(rf"(Service/|admin ){name}\b", walkthrough())] == []


@pytest.mark.timeout(180)
def test_every_call_by_hand(tmp_path: Path):
    grpcurl = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")
    assert grpcurl is not None, "grpcurl is a development dependency"
    command = re.search(r"^    kvgrpc serve --socket \S+ (.*)$", TEXT, re.MULTILINE)
    assert command is not None
    with serving(*command[1].split()) as server:
        script = (
            f"set -euo pipefail; PATH={Path(grpcurl).parent}:$PATH; SOCKET={server.socket}\n"
            "trap 'kill $(jobs -p) 2>/dev/null || true; rm -f \"/dev/shm/${MEMORY:-none}\"' EXIT\n" + walkthrough()
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"hit_tokens": 16' in done.stdout
    assert '"drained": true' in done.stdout
    assert '"status": "SERVING"' in done.stdout
