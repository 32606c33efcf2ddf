# SPDX-License-Identifier: Apache-2.0
"""A server that stands still (SIGSTOP) under clients with deadlines.

Every call ends at its deadline. A copy's blocks are free when the server has answered a Fence or is seen to be dead,
and not before: what an engine writes into a block from that instant on stays there. Engines put canaries into such
blocks and look at them after the server has gone on.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable

import pytest

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.core.calls import SLICES_AHEAD
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Role, SpaceIdentity, SpaceRef, TokenRange
from tests.e2e.harness import tokens_of
from tests.hostile.engine import PER_CHUNK
from tests.hostile.process import EngineProcess
from tests.hostile.stand import Stand, stand, until
from tests.kvdata import LAYERS_OUTERMOST, MHA, Image
from tests.served import stand_still, stop

DEADLINE_S = 0.5
SLACK_S = 2.0
"""What a busy machine may add until the caller runs again."""
SETTLED_S = 30.0
"""Copies of a server that runs again have ended by then, however busy the machine is."""
ROUNDS = 10
STORMS = 30
CALLS = 16
CHUNKS = 4
KEPT = 1_000_000
"""A prompt that is there all the time."""
WAITING = "an-engine-that-waits"
IDENTITY = SpaceIdentity("model", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, "")
ALL = [*range(CALLS * CHUNKS * PER_CHUNK)]
STORED = [("STORED", "")] * CHUNKS


async def seconds(call: Awaitable[object]) -> float:
    """How long a call took that ended at its deadline."""
    began = time.monotonic()
    with pytest.raises(Refusal) as refused:
        await call
    assert refused.value.reason is Reason.DEADLINE
    return time.monotonic() - began


def every_call(client: AioClient) -> dict[str, Awaitable[object]]:
    engine_id, space, tokens, blocks = WAITING, SpaceRef(b"x" * 16), tokens_of(1, 64), ((1, 2, 3, 4),)
    return {
        "handshake": client.handshake(api.Hello()),
        "register": client.register(
            api.RegisterRequest(engine_id, IDENTITY, 0, 0, 1, 1, Image(MHA, LAYERS_OUTERMOST, 4, 8).layout("x"))
        ),
        "unregister": client.unregister(engine_id),
        "lookup": client.lookup(api.LookupRequest(engine_id, "r", space, tokens)),
        "query": client.query(engine_id, bytes(16)),
        "store": client.store(api.StoreRequest(engine_id, 1, space, tokens, blocks)),
        "retrieve": client.retrieve(api.RetrieveRequest(engine_id, 2, bytes(16), TokenRange(0, 16), blocks)),
        "free": client.free(api.FreeRequest(engine_id, bytes(16), 1)),
        "end_request": client.end_request(engine_id, "r"),
        "fence": client.fence(engine_id, [1]),
        "get_status": client.get_status(),
        "list_engines": client.list_engines(),
        "list_spaces": client.list_spaces(),
        "clear": client.clear(api.ClearTarget(all=True)),
        "bump_generation": client.bump_generation(model="m"),
        "pin": client.pin(space, tokens, 1000),
        "unpin": client.unpin(bytes(16)),
        "set_quota": client.set_quota("s", None),
        "set_write_policy": client.set_write_policy("m", None),
        "get_quota": client.get_quota("s"),
        "drain_engine": client.drain_engine(engine_id),
    }


async def test_every_call_ends_at_its_deadline() -> None:
    options = ChannelOptions(call_s=DEADLINE_S, copy_s=DEADLINE_S)
    with stand() as server:
        async with AioClient(server.served.address, "waiting", options) as client:
            session = client.attach(WAITING, Role.WORKER, secrets.token_bytes(16))
            await anext(session)
            stand_still(server.served.process.pid)
            took: list[dict[str, float]] = []
            while not took or (max(took[-1].values()) >= DEADLINE_S + SLACK_S and len(took) < 3):  # a busy machine
                late = every_call(client)
                took.append(dict(zip(late, await asyncio.gather(*map(seconds, late.values())), strict=True)))
            server.served.process.send_signal(signal.SIGCONT)
            assert (await client.handshake(api.Hello(), timeout_s=10)).protocol_major == api.PROTOCOL_MAJOR
            await session.aclose()
        assert min(took[-1].values()) >= DEADLINE_S - 0.01, took
        assert max(took[-1].values()) < DEADLINE_S + SLACK_S, took
        server.assert_well()


def test_lookups_of_an_engine_are_misses_within_their_time() -> None:
    with stand() as server:
        engine = server.engine()
        stand_still(server.served.process.pid)
        times: list[float] = []
        for prompt in range(5):
            began = time.monotonic()
            assert engine.do("lookup", prompt, 8, 0.2)[1:] == (0, b"", "DEADLINE")
            times.append(time.monotonic() - began)
        assert sorted(times)[3] < 0.2 + SLACK_S, times
        server.served.process.send_signal(signal.SIGCONT)
        until(lambda: engine.do("lookup", 99, 8, 1.0)[3] == "", what="an answer")
        server.assert_well()


def kept(server: Stand) -> EngineProcess:
    """An engine that has stored the prompt that is there all the time."""
    engine = server.engine(num_blocks=len(ALL))
    engine.do("store", "kept", KEPT, CHUNKS, ALL[: CHUNKS * PER_CHUNK])
    assert engine.do("ended", "kept") == STORED
    engine.do("forget")
    return engine


@pytest.mark.parametrize("direction", ["STORE", "RETRIEVE"])
def test_blocks_of_a_copy_that_stands_in_the_middle(direction: str) -> None:
    """Server and deadline run out while a copy is in the middle and others wait behind it: no block is free, not even
    when the server goes on, until that copy has ended. Rounds whose server stood still in time count: before that it
    tells of deadlines itself."""
    rounds = 0
    with stand(gated=True) as server:
        witness, engine = kept(server), server.engine(num_blocks=len(ALL))
        for prompt in range(0, 10 * 100 * ROUNDS, 100):
            engine.do("fill")
            hold, began = server.hold(engine, direction, 10), time.monotonic()
            engine.do("storm", KEPT, prompt, CALLS, CHUNKS, DEADLINE_S)
            until(lambda hold=hold: hold.reached() or not engine.do("pending"), what="a copy in the middle")
            if not hold.reached():  # on a machine so busy that all came too late
                hold.release()
                engine.do("settled", SETTLED_S)
                engine.do("forget")
                continue
            stand_still(server.served.process.pid)
            in_time = time.monotonic() - began < DEADLINE_S
            time.sleep(DEADLINE_S + 0.1)
            waiting = engine.do("pending")
            assert len(waiting) >= CALLS // 2 or not in_time, "the deadline gave blocks away"
            server.served.process.send_signal(signal.SIGCONT)
            until(
                lambda: server.calls_of(engine) == len(engine.do("pending")) <= SLICES_AHEAD,
                what="the end of all copies but the one in the middle and one that waits behind it",
            )
            held = engine.do("pending")
            hold.release()
            ended = engine.do("settled", SETTLED_S)
            torn = ("TORN" if direction == "RETRIEVE" else "FAILED", "DEADLINE")
            assert any(torn in ended[name] for name in held)
            assert engine.do("dead_canaries") == []
            for number in range(1, CALLS, 2):
                witness.do("load", prompt + number, CHUNKS, ALL)
            assert engine.do("dead_canaries") == []
            engine.do("forget")
            rounds += in_time
            if rounds == ROUNDS:
                break
        server.assert_well()
    assert rounds == ROUNDS


def test_thirty_stops_under_storms_of_copies() -> None:
    """Stops at any time, of a server that copies as it does in service; deadlines that end before, during and after.
    How many copies a stop meets is the machine's matter: storms go on until every end was seen."""
    chance, outcomes = random.Random(11), Counter[tuple[str, str]]()
    wanted = {("LOADED", ""), ("STORED", ""), ("TORN", "DEADLINE"), ("FAILED", "DEADLINE")}
    with stand() as server:
        witness, engine = kept(server), server.engine(num_blocks=len(ALL))
        for storm in range(20 * STORMS):
            if storm >= STORMS and outcomes.keys() >= wanted:
                break
            engine.do("fill")
            engine.do("storm", KEPT, storm * 100, CALLS, CHUNKS, chance.choice((0.01, 0.05, 0.1, 2 * SETTLED_S)))
            time.sleep(chance.random() * 0.01)
            server.served.process.send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            server.served.process.send_signal(signal.SIGCONT)
            for ended in engine.do("settled", SETTLED_S).values():
                outcomes.update(ended)
            assert engine.do("dead_canaries") == []
            for number in range(1, CALLS, 2):
                witness.do("load", storm * 100 + number, CHUNKS, ALL)
            assert engine.do("dead_canaries") == [], "bytes landed after their client was told"
            engine.do("forget")
        until(lambda: server.counts()["calls"] == server.counts()["pins"] == 0)
        server.assert_well()
    print(outcomes)
    assert ("PENDING", "") not in outcomes
    assert outcomes.keys() >= wanted, "stops came too early or too late"


def test_server_that_dies_while_it_stands_still() -> None:
    """Its death is seen, and then the blocks are free. Its successor touches none of them, and works."""
    with stand() as server:
        engine, process = kept(server), server.served.process
        for _ in range(3):
            engine.do("fill")
            engine.do("storm", KEPT, 100, CALLS, CHUNKS, 0.1)
            stand_still(process.pid)
            time.sleep(1.0)  # ten deadlines, so that all have passed on a busy machine, too
            waiting = engine.do("pending")
            process.kill()
            process.wait()
            ended = engine.do("settled", SETTLED_S)
            assert {outcome for key in waiting for outcome in ended[key]} <= {
                ("FAILED", "DEADLINE"),
                ("TORN", "DEADLINE"),
            }
            until(lambda: engine.do("lost"), 30, "the end of its session")
            process = subprocess.Popen(process.args, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            server.stack.callback(stop, process)
            until(lambda: engine.do("attached"), 30, "a session with the next server")
            assert engine.do("dead_canaries") == []
            engine.do("forget")
            engine.do("store", "kept", KEPT, CHUNKS, ALL[: CHUNKS * PER_CHUNK])
            assert engine.do("ended", "kept") == STORED
            assert engine.do("load", KEPT, CHUNKS, ALL) == CHUNKS
            engine.do("forget")
        assert stop(process) == 0
