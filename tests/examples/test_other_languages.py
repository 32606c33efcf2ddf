# SPDX-License-Identifier: Apache-2.0
"""The examples in TypeScript, Go, Java and C++: each finds in a running server what the Python client finds there.

`make examples` builds them; without it these tests fail and say so.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvgrpc.client import (
    Client,
    Hashes,
    Hello,
    LookupRequest,
    ReadChunksRequest,
    Reader,
    Role,
    SpaceRef,
    TokenRange,
    Tokens,
)
from tests.examples.engine import HASHES, IDENTITY, PROMPT, stored
from tests.served import Served, serving, wait_until

BUILD = Path(__file__).resolve().parents[2] / "build/examples"
PROGRAMS = {
    "typescript": ("node", str(BUILD / "typescript/out/client.js")),
    "go": (str(BUILD / "go/client"),),
    "java": (str(BUILD / "java/client"),),
    "cpp": (str(BUILD / "cpp/client"),),
}
COPIES = ("typescript", "go")
"""They read and store bytes, too."""
JAVA_UNIX = ("java", "unix")
"""Debian's netty has no native transport; a test of its own holds what is said then."""


@dataclass(frozen=True)
class Place:
    """A server that holds the prompt's chunks under both identities, and where it listens."""

    served: Served
    tcp: str


def loopback_of(served: Served) -> str:
    found = re.search(r"127\.0\.0\.1:\d+", served.log)
    assert found is not None, served.log
    return found.group()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with serving("--l1-size", "64MiB", "--listen", "127.0.0.1:0") as served:
        with stored(served.address):
            yield Place(served, loopback_of(served))


def run(language: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS[language]
    assert Path(program[-1]).is_file(), f"{program[-1]} is not built: run make examples"
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=100, check=False)


def as_python_sees_it(address: str) -> dict[str, object]:
    """What the examples report, by the Python client."""
    engine_id = secrets.token_hex(16)
    with Client(address) as client:
        hello = client.handshake(Hello(identity=IDENTITY))
        hashed = client.handshake(Hello(identity=replace(IDENTITY, hash_algorithm="example-hashes")))
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        next(session)
        tokens = Tokens.from_ids(PROMPT)
        by_tokens = client.lookup(LookupRequest(engine_id, "by-tokens", SpaceRef(hello.space_base), tokens))
        own = Hashes(HASHES, len(PROMPT))
        by_hashes = client.lookup(LookupRequest(engine_id, "by-hashes", SpaceRef(hashed.space_base), own))
        chunks = client.get_status().chunks
        session.close()
    return {
        "server_version": hello.server_version,
        "server_epoch": hello.server_epoch.hex(),
        "chunk_tokens": hello.chunk_tokens,
        "hit_tokens": by_tokens.status.hit_tokens,
        "hit_l1_chunks": by_tokens.status.hit_chunks_by_tier["l1"],
        "freed_pins": [2, 0],
        "hash_hit_tokens": by_hashes.status.hit_tokens,
        "error": {"code": "FAILED_PRECONDITION", "reason": "SPACE_UNKNOWN", "domain": "kvgrpc.dev"},
        "chunks": chunks,
    }


@pytest.mark.parametrize(
    ("language", "transport"), [(name, to) for name in PROGRAMS for to in ("unix", "tcp") if (name, to) != JAVA_UNIX]
)
def test_each_sees_what_python_sees(place: Place, language: str, transport: str) -> None:
    address = place.served.address if transport == "unix" else place.tcp
    expected = as_python_sees_it(address)
    assert expected["hit_tokens"] == expected["hash_hit_tokens"] == 512
    done = run(language, address)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    said = json.loads(line)
    copied = said.pop("copied", None)
    assert said == expected
    assert (copied is not None) == (language in COPIES)
    if copied is not None:
        first_token = copied.pop("first_token")
        original, copy = objects_of(address, PROMPT), objects_of(address, range(first_token, first_token + len(PROMPT)))
        assert original == copy
        assert copied == {"read_bytes": sum(map(len, original)), "stored_chunks": 2, "hit_tokens": 512}


def objects_of(address: str, prompt: Iterable[int]) -> list[bytes]:
    """Its chunks, as the Python client reads them."""
    engine_id = secrets.token_hex(16)
    with Client(address) as client:
        space = SpaceRef(client.handshake(Hello(identity=IDENTITY)).space_base)
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        next(session)
        answer = client.lookup(LookupRequest(engine_id, "r", space, Tokens.from_ids(prompt)))
        whole = TokenRange(0, answer.status.hit_tokens)
        found, _ = client.read_objects(ReadChunksRequest(engine_id, answer.job_id, Reader(0, 0), whole))
        session.close()
    assert sorted(found) == [0, 1]
    return [found[0], found[1]]


def test_java_needs_a_netty_with_its_native_transport_for_unix_sockets(place: Place) -> None:
    done = run("java", place.served.address)
    assert done.returncode == 1 and "no native transport for Unix sockets: use host:port" in done.stderr


@pytest.mark.parametrize("language", PROGRAMS)
def test_each_says_why_it_fails(language: str) -> None:
    nobody = run(language, "127.0.0.1:1")
    assert nobody.returncode == 1 and nobody.stderr.strip() and not nobody.stdout
    assert run(language).returncode == 2
    with serving("--l1-size", "64MiB", "--listen", "127.0.0.1:0") as empty:
        missed = run(language, loopback_of(empty))
    assert missed.returncode == 1 and "a miss" in missed.stderr


def test_none_leaves_a_session(place: Place) -> None:
    """The stream's end ends the client, whichever library holds it."""
    for language in PROGRAMS:
        assert run(language, place.tcp).returncode == 0
    with Client(place.served.address) as client:

        def ours() -> list[str]:
            names = [one.client_id for engine in client.list_engines() for one in engine.clients]
            return [name for name in names if name.startswith(tuple(f"{language}-" for language in PROGRAMS))]

        wait_until(lambda: not ours(), 10)
