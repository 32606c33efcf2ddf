# SPDX-License-Identifier: Apache-2.0
"""What a real server shows: every series from the first scrape on, each moved by the exact amount, none by clients."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path

import pytest

from kvgrpc.api import ClearTarget, Hello, ReadChunksRequest, WatchRequest
from kvgrpc.client.aio import AioClient
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Policy, Reader, Role, SpaceRef, TokenRange
from kvgrpc.service.calls import RULES
from kvgrpc.status import REASON_CODES
from tests.e2e.harness import BLOCK, CHUNK, outcomes, tokens_of, until
from tests.e2e.written import chunks_of, writing
from tests.telemetry.watched import Scrape, Watched, watched

DOCS = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
SERIES, OF_A_TIER, OF_A_STATUS = (
    int(number)
    for number in re.findall(r"(\d+)(?: series| more for each lower tier| more for each method and other status)", DOCS)
)
LOOKUPS = 10_000
ENDED = "grpc_server_call_duration_seconds_count"
CANCELLED = (ENDED, (("grpc_method", "kvgrpc.v1.EngineService/Attach"), ("grpc_status", "CANCELLED")))
"""How a session ends, as soon as the server has seen it."""


async def test_hits_misses_and_loads_of_a_script():
    """The numbers that docs/telemetry.md defines, of a workload whose every number is known."""
    async with watched() as server:
        engine = await server.engine()
        prompt, longer, other = tokens_of(1, 3 * CHUNK), tokens_of(1, 5 * CHUNK + 3), tokens_of(2, 4 * CHUNK + 1)
        blocks = tuple(range(3 * CHUNK // BLOCK))
        before = server.scrape()
        assert outcomes(await engine.store(prompt, blocks)) == ["STORED"] * 3
        full, part, none = await engine.lookup(prompt), await engine.lookup(longer), await engine.lookup(other)
        assert [answer.status.hit_tokens for answer in (full, part, none)] == [3 * CHUNK, 3 * CHUNK, 0]
        repeat = engine.lookup_request(prompt, request_id="request-1")
        assert await engine.scheduler.lookup(repeat) == full  # asked again, not counted again
        await engine.lookup(prompt, policy=Policy(no_lookup=True))  # does not ask
        assert outcomes(await engine.retrieve(full, blocks)) == ["LOADED"] * 3

        assert server.moved(before, "kvgrpc_lookups_total") == {"full": 1, "part": 1, "none": 1}
        assert server.moved(before, "kvgrpc_hit_chunks_total") == {"l1": 6}
        assert server.moved(before, "kvgrpc_hit_bytes_total") == {"l1": 6 * engine.object_bytes}
        assert server.moved(before, "kvgrpc_miss_chunks_total") == {"absent": 6}
        assert server.moved(before, "kvgrpc_hit_tokens_total") == {"": 6 * CHUNK}
        assert server.moved(before, "kvgrpc_lookup_tokens_total") == {"": 3 * CHUNK + 5 * CHUNK + 3 + 4 * CHUNK + 1}
        assert server.moved(before, "kvgrpc_store_chunks_total") == {"stored": 3}
        assert server.moved(before, "kvgrpc_load_chunks_total") == {"loaded": 3}
        moved = 3 * engine.object_bytes
        assert server.moved(before, "kvgrpc_copied_bytes_total") == {"store": moved, "retrieve": moved}
        assert server.moved(before, "kvgrpc_copy_duration_seconds_count") == {"store": 1, "retrieve": 1}
        assert server.scrape()["kvgrpc_chunks", ()] == 3

        # a hit that cannot be loaded any more is a failed load; the hit stays counted
        gone = await engine.lookup(prompt)
        await engine.free(gone)
        await (await server.admin()).clear(ClearTarget(all=True))
        before = server.scrape()
        assert "LOADED" not in outcomes(await engine.retrieve(gone, blocks))
        assert server.moved(before, "kvgrpc_load_chunks_total") == {"failed": 3}
        assert server.moved(before, "kvgrpc_hit_chunks_total") == {}


async def test_refused_chunks_and_evictions_have_their_reasons():
    async with watched("--quota", "small=32KiB") as server:
        engine = await server.engine(salt="small")
        blocks = tuple(range(CHUNK // BLOCK))
        before = server.scrape()
        for seed in range(12):
            await engine.store(tokens_of(seed, CHUNK), blocks)
        await engine.store(tokens_of(99, CHUNK), blocks, policy=Policy(no_store=True))
        stored = server.moved(before, "kvgrpc_store_chunks_total")
        evicted = server.moved(before, "kvgrpc_evicted_chunks_total")[""]
        assert stored == {"stored": 12, "no_store": 1}
        assert evicted == 12 - server.scrape()["kvgrpc_chunks", ()]


async def test_bytes_of_streams_are_copied_bytes_of_their_own():
    async with watched() as server:
        engine = await server.engine()
        prompt, admin, moved = tokens_of(1, 2 * CHUNK), await server.admin(), 2 * engine.object_bytes
        before = server.scrape()
        assert (
            outcomes(await engine.worker.write_objects(writing(engine, prompt), chunks_of(engine, 0, 2)))
            == ["STORED"] * 2
        )
        await engine.worker.write_objects(writing(engine, prompt), chunks_of(engine, 0, 2))  # resident: not copied
        asked = (engine.engine_id, (await engine.lookup(prompt)).job_id, Reader(0, 0), TokenRange(0, 2 * CHUNK))
        found, _ = await engine.worker.read_objects(ReadChunksRequest(*asked))
        assert sum(map(len, found.values())) == moved
        assert server.moved(before, "kvgrpc_copied_bytes_total") == {"write": moved, "read": moved}
        counters = (await admin.get_status()).counters
        assert (counters["write_chunks_bytes"], counters["read_chunks_bytes"]) == (moved, moved)


async def every_call(server: Watched) -> None:
    """One of each RPC that succeeds."""
    engine = await server.engine()
    admin = await server.admin()
    await admin.handshake(Hello())
    prompt, blocks = tokens_of(7, CHUNK), tuple(range(CHUNK // BLOCK))
    await engine.store(prompt, blocks)
    held = await admin.pin(engine.space, prompt, 60_000)
    await admin.unpin(held.pin_id)
    await admin.warm(engine.space, prompt, 1000)
    await admin.inspect(engine.space, prompt)
    recording = admin.record_trace()
    await anext(recording)
    await recording.aclose()
    await admin.set_quota("tenant", 1 << 20)
    await admin.get_quota("tenant")
    await admin.set_write_policy("model", None)
    watching = admin.watch(WatchRequest())
    await anext(watching)
    await watching.aclose()
    answer = await engine.lookup(prompt)
    await engine.worker.read_objects(
        ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, CHUNK))
    )
    await engine.worker.write_objects(writing(engine, prompt), chunks_of(engine, 0, 1))
    await engine.scheduler.query(engine.engine_id, answer.job_id)
    await engine.retrieve(answer, blocks)
    await engine.free(answer)
    await engine.scheduler.end_request(engine.engine_id, "request-1")
    await engine.worker.fence(engine.engine_id, [1, 2])
    await admin.get_status()
    engines = await admin.list_engines()
    await admin.list_spaces()
    await admin.clear(ClearTarget(all=True))
    await admin.bump_generation(model="test-model")
    await engine.worker.unregister(engine.engine_id)
    await admin.drain_engine(engines[0].engine)
    await engine.stop()


async def test_every_series_is_there_from_the_first_scrape_and_moves_with_its_call():
    """Field report 67."""
    async with watched() as server:
        first = server.scrape()
        await every_call(server)
        await until(lambda: len({name.split(",")[0] for name in server.moved(first, ENDED)}) == len(RULES))  # streams
        after = server.scrape()
        new = {name for name in after if name not in first}
        assert {dict(labels)["grpc_status"] for _, labels in new} <= {"CANCELLED"}  # how every stream ends
        growing = {name: value for name, value in first.items() if name[0].endswith(("_total", "_count", "_bucket"))}
        assert {name for name, value in growing.items() if value and not name[0].startswith("process_")} == set()
        started = server.moved(first, "grpc_server_call_started_total")
        calls = dict.fromkeys((path[1:] for path in RULES), 1.0)
        calls["kvgrpc.v1.EngineService/Attach"] = 2  # worker and scheduler
        assert started == calls
        seconds = server.moved(first, ENDED)
        assert {name.split(",")[0] for name in seconds} == set(calls)


async def test_refusals_are_counted_by_reason_and_status():
    async with watched() as server:
        before = server.scrape()
        assert {dict(labels)["reason"] for name, labels in before if name == "kvgrpc_refusals_total"} == {
            reason.value for reason in Reason
        }
        client = server.client("nobody")
        reasons: list[Reason] = []
        for _ in range(3):
            with pytest.raises(Refusal) as refused:
                await client.query("engine-0123456789abcdef", b"0" * 16)
            reasons.append(refused.value.reason)
        (reason,) = set(reasons)
        assert server.moved(before, "kvgrpc_refusals_total") == {reason.value: 3}
        method = "kvgrpc.v1.KvCacheService/QueryPrefetchStatus"
        labels = (("grpc_method", method), ("grpc_status", REASON_CODES[reason].name))
        assert server.scrape()[ENDED, labels] == 3
        assert ours(server.scrape()) - ours(before) == OF_A_STATUS  # streams and operators' calls have fewer


def ours(scrape: Scrape) -> int:
    """How many series are not of the process and the library."""
    return sum(name.startswith(("kvgrpc_", "grpc_server_")) for name, _ in scrape)


async def test_the_docs_say_how_many_series_there_are(tmp_path: Path):
    for flags, tiers in ((), 0), (("--disk-path", str(tmp_path), "--disk-size", "64MiB"), 1):
        async with watched(*flags) as server:
            assert ours(server.scrape()) == SERIES + tiers * OF_A_TIER


def documented() -> set[str]:
    return set(re.findall(r"`((?:kvgrpc|grpc_server)_[a-z_]+)`", DOCS))


async def test_the_docs_name_every_series_and_no_other():
    async with watched() as server:
        families = re.findall(r"^# TYPE (\S+)", server.text(), re.MULTILINE)
    ours = {name for name in families if name.startswith(("kvgrpc_", "grpc_server_"))}
    only_with_tiers = {
        "kvgrpc_tier_healthy",
        "kvgrpc_tier_reads_running",
        "kvgrpc_tier_reads_total",
        "kvgrpc_tier_read_bytes_total",
        "kvgrpc_tier_read_duration_seconds",
        "kvgrpc_tier_written_bytes_total",
        "kvgrpc_tier_writes_failed_total",
    }
    assert documented() == ours | only_with_tiers


async def test_no_client_makes_series():
    """Field report 66: salts, request ids, client ids, models and connections, 10,000 lookups."""
    async with watched("--spaces", "20000") as server:
        engine = await server.engine()
        await engine.hits(tokens_of(1, CHUNK))
        salts = [f"salt-{secrets.token_hex(6)}" for _ in range(LOOKUPS)]
        prompt, base, counts = tokens_of(1, 2 * CHUNK), engine.space.space_base, []
        for begin in range(0, LOOKUPS, 1000):
            async with AioClient(server.address, f"client-{begin}") as client:  # a connection of its own
                stream = await server.attach(client, engine.engine_id, Role.SCHEDULER)
                for at in range(begin, begin + 1000, 100):
                    asks = [
                        engine.lookup_request(prompt, request_id=f"r-{salt}", space=SpaceRef(base, "", salt))
                        for salt in salts[at : at + 100]
                    ]
                    await asyncio.gather(*(client.lookup(ask) for ask in asks))
                await stream.close()
            await until(lambda: server.scrape().get(CANCELLED) == len(counts) + 1, what="the end of its stream")
            counts.append(ours(server.scrape()))
        text = server.text() + server.served.log
    assert len(set(counts)) == 1 and counts[0] <= SERIES + OF_A_STATUS, counts  # Attach was cancelled
    assert not any(salt in text for salt in salts)
    assert engine.engine_id not in text


async def test_a_scrape_says_what_is_wrong_with_its_address():
    async with watched("--metrics-listen", "127.0.0.1:0") as server:
        assert "http://127.0.0.1:" in server.metrics
        assert server.scrape()["kvgrpc_uptime_seconds", ()] > 0


async def test_a_retrieve_of_a_part_counts_whole_chunks():
    async with watched() as server:
        engine = await server.engine()
        prompt, blocks = tokens_of(3, 2 * CHUNK), tuple(range(2 * CHUNK // BLOCK))
        await engine.store(prompt, blocks)
        answer = await engine.lookup(prompt)
        before = server.scrape()
        part = TokenRange(BLOCK, 2 * CHUNK)
        await engine.worker.retrieve(engine.retrieve_request(answer.job_id, blocks[1:], range=part))
        assert server.moved(before, "kvgrpc_load_chunks_total") == {"loaded": 2}
