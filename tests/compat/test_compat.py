# SPDX-License-Identifier: Apache-2.0
"""This version against recorded ones: the contract only grows, old bytes and old clients still work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool, message_factory

from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2  # noqa: F401 - registers the messages
from tests.served import serving

HERE = Path(__file__).resolve().parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and (path / "client.zip").exists())


def test_there_is_a_recorded_version() -> None:
    assert "v0.1" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_only_grew(version: str) -> None:
    """buf's FILE rules: nothing removed, renumbered or retyped since then."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or "buf"
    image = HERE / version / "descriptors.binpb"
    command = [buf, "breaking", "proto", "--against", f"{image}#format=binpb"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_bytes_mean_what_they_meant(version: str) -> None:
    recorded = json.loads((HERE / version / "messages.json").read_text())
    pool = descriptor_pool.Default()
    for name, raw in recorded.items():
        message = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        read = message.FromString(bytes.fromhex(raw))
        assert read.SerializeToString(deterministic=True).hex() == raw, name
        unknown_free = message()
        unknown_free.CopyFrom(read)
        unknown_free.DiscardUnknownFields()
        assert unknown_free == read, f"{name} has recorded fields that this version does not know"


THEN = """
import runpy, sys
client, packages, num_blocks = sys.argv[1], sys.argv[3], int(sys.argv[4])
sys.path[:0], sys.path[len(sys.path):] = [client], [packages]
import kvgrpc
assert kvgrpc.__file__.startswith(client), kvgrpc.__file__
smoke = runpy.run_path(client)
smoke["main"].__globals__["NUM_BLOCKS"] = num_blocks
sys.argv[1:] = [sys.argv[2]]
smoke["main"]()
"""
"""Without ``site``: what is installed for development finds today's kvgrpc before anything else."""


@pytest.mark.parametrize(("chunk_tokens", "num_blocks"), [(256, 64), (2048, 256)])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_of_then_works_with_this_server(version: str, chunk_tokens: int, num_blocks: int) -> None:
    """Its longer prompts are read past protobuf, too."""
    with serving("--l1-size", "64MiB", "--chunk-tokens", str(chunk_tokens)) as server:
        client, packages = str(HERE / version / "client.zip"), sysconfig.get_path("platlib")
        command = [sys.executable, "-I", "-S", "-c", THEN, client, server.address, packages, str(num_blocks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "smoke ok\n", done.stderr
