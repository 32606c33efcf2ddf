# SPDX-License-Identifier: Apache-2.0
"""No room: in /dev/shm, in a file system for the arena, in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.config.memory import choose_l1_size
from kvgrpc.config.settings import SettingsError
from kvgrpc.transfer.room import available_memory
from tests.hostile.engine import PER_CHUNK
from tests.hostile.process import NOT_REFUSED
from tests.hostile.room import can_mount, memory_group
from tests.hostile.stand import refusal_of, stand, until
from tests.kvdata import MHA, Kv

CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
STORED = [("STORED", "")] * CHUNKS
ROUNDS = 10
"""Of another engine's traffic, at the least."""
MIB = 1 << 20
LARGE = Kv(layers=8, planes=2, heads=8, head_dim=16)
"""64 KiB a chunk."""

needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting needs CAP_SYS_ADMIN")


@needs_mounts
def test_shared_memory_is_full() -> None:
    """An engine whose memory has no pages yet finds the file system full: its copies fail by name, in both directions.
    Another engine, and what the arena (in the same file system) holds, stay right; with room again all is well."""
    flags = ("--l1-size", "16MiB", "--arena-path", "/dev/shm/arena")
    with stand(*flags, room=("shm=32m",)) as server:
        facts = {"mounts_of": server.served.process.pid}
        engine, other, witness = (server.engine(**facts) for _ in range(3))
        witness.do("store", "kept", 1, CHUNKS, BLOCKS)
        assert witness.do("ended", "kept") == STORED
        other.tell("traffic", 1_000_000, ROUNDS)
        engine.do("punch")
        assert witness.do("take_room") > 8 * MIB
        for prompt in range(10, 40):
            engine.do("retrieve", "load", 1, CHUNKS, BLOCKS)
            (outcome, reason), *others = engine.do("ended", "load")
            assert (outcome in ("TORN", "FAILED"), reason) == (True, "MEMORY_IO")
            assert others == [("FAILED", "AFTER_FAILURE")] * (CHUNKS - 1)
            engine.do("store_as_it_is", "store", prompt, CHUNKS, BLOCKS)
            (outcome, reason), *others = engine.do("ended", "store")
            assert (outcome in ("TORN", "FAILED"), reason) == (True, "MEMORY_IO")
            assert witness.do("hits", prompt, CHUNKS) == 0
            assert witness.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        witness.do("give_room")
        engine.do("store", "store", 30, CHUNKS, BLOCKS)
        assert engine.do("ended", "store") == STORED
        assert engine.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        rounds, longest_s = other.stop_traffic()
        assert rounds >= ROUNDS and longest_s < 4
        assert witness.do("load", 30, CHUNKS, BLOCKS) == CHUNKS
        server.assert_well(apart_from="the arena's index cannot be written")


@needs_mounts
def test_the_arenas_file_system_is_full(tmp_path: Path) -> None:
    """Refused at start with what is needed and what is there; other files stay, and none is left behind."""
    small = tmp_path / "small"
    small.mkdir()
    script = f"""
        mount -t tmpfs -o size=16m tmpfs {small} && echo precious > {small}/precious && "$@"; code=$?
        ls {small} >&2; cat {small}/precious >&2; exit $code
    """
    prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    said = refusal_of("--l1-size", "64MiB", "--arena-path", f"{small}/arena", folder=tmp_path, prefix=prefix)
    assert f"the arena {small}/arena needs {64 * MIB} bytes; its file system has" in said
    assert said.endswith("precious\nprecious\n") and "arena\n" not in said


def test_the_control_group_is_full(tmp_path: Path) -> None:
    """An L1 beyond the group's limit is refused at start with both numbers."""
    with memory_group(512 * MIB) as group:
        if group is None:  # this user may make no group: one of files, and the sizing alone
            (tmp_path / "cgroup").write_text("0::/\n")
            (tmp_path / "memory.max").write_text(f"{512 * MIB}\n")
            (tmp_path / "memory.current").write_text(f"{100 * MIB}\n")
            with pytest.raises(SettingsError, match=r"--l1-size: 600 MiB do not fit, 412 MiB are available"):
                choose_l1_size(600 * MIB, available_memory(tmp_path, tmp_path / "cgroup"), 4096)
            return
        join = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        said = refusal_of("--l1-size", "600MiB", folder=tmp_path, prefix=join)
        assert "--l1-size: 600 MiB do not fit" in said
        available = float(said.split(" MiB are available")[0].split()[-1])
        assert 256 < available < 512


def test_all_of_l1_under_a_limit() -> None:
    """By default a server takes half of what its group leaves; it lives while that is written again and again."""
    with memory_group(400 * MIB) as group:
        room = (f"cgroup={group}",) if group is not None else ()
        with stand("--slice-size", "8MiB", room=room, l1="190MiB" if group is None else "") as server:
            total = server.operator.get_status().arena.total_bytes
            assert 100 * MIB < total < 200 * MIB
            engine = server.engine(model="large", kv=LARGE, tinted=True, num_blocks=2048)
            for prompt in range(3 * total // (16 * MIB)):
                engine.do("store", "s", prompt, 128, list(range(0, 1024, 2)))
                assert engine.do("ended", "s") == [("STORED", "")] * 128
                assert engine.do("load", prompt, 128, list(range(1, 1024, 2))) == 128
            assert server.operator.get_status().counters["evicted_chunks"] > 0
            server.assert_well()


def test_memory_without_pages_beyond_the_limit() -> None:
    """Pages that an engine never wrote would be the server's: more of them than there is room for are refused, instead
    of the kernel ending the server later. Less of them, or the same memory once it is written, is taken."""
    with memory_group(300 * MIB) as group:
        room = (f"cgroup={group}",) if group is not None else ()
        tensor_bytes, facts = MHA.token_bytes // 3 * 1024, {"model": "large", "kv": LARGE, "tinted": True}
        claim = (500 * MIB if group is not None else 2 * available_memory()) // tensor_bytes + 1
        with stand("--slice-size", "8MiB", room=room) as server:
            good = server.engine()
            good.do("store", "kept", 1, CHUNKS, BLOCKS)
            assert good.do("ended", "kept") == STORED
            before = server.counts()
            hollow = server.stranger(claim=claim)
            hollow.do("truncate", (claim + 3) * tensor_bytes)
            assert not hollow.do("start", 0.05)
            until(lambda: hollow.do("problem")[0] not in NOT_REFUSED, 20)
            reason, sentence = hollow.do("problem")
            assert (reason, "have no pages yet" in sentence) == ("MEMORY", True), sentence
            until(lambda: server.memory_of(hollow) == 0, what="the end of an attempt to map it")
            hollow.kill()
            small = server.stranger(num_blocks=2048, **facts)
            small.do("punch")
            assert small.do("start"), small.do("problem")
            small.do("store", "s", 7, 128, list(range(0, 1024, 2)))
            assert small.do("ended", "s") == [("STORED", "")] * 128
            assert small.do("load", 7, 128, list(range(1, 1024, 2))) == 128
            if group is not None:
                whole = server.engine(num_blocks=12_800, **facts)
                for first in range(0, 12_800, 512):
                    whole.do("retrieve", "all", 7, 128, list(range(first, first + 512)))
                    assert whole.do("ended", "all") == [("LOADED", "")] * 128
                assert whole.do("wrong", 7, list(range(512))) == []
                whole.kill()
            small.kill()
            until(lambda: server.counts() == before)
            assert good.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
            server.assert_well()
