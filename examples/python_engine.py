# SPDX-License-Identifier: Apache-2.0
"""An engine of three processes: a scheduler, and two workers with half of the KV heads each (tensor parallelism).

    python examples/python_engine.py    # beside kvgrpc serve; with its address behind it if that is not the default

Lookups that are polled, stores after computing, requests that are aborted or lose their blocks while a copy runs, a
server that is not there. The "KV" is made-up bytes that name prefix, rank and plane. docs/python.md has the calls.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import sys
from collections.abc import Generator, Iterator
from multiprocessing import connection, get_context, shared_memory
from typing import cast

import kvgrpc.client as kv

WORKERS, BLOCK_SIZE, NUM_BLOCKS, PLANES, HEADS, HEAD_DIM = 2, 16, 128, 2, 2, 8  # heads of one worker
RUN_BYTES = BLOCK_SIZE * HEADS * HEAD_DIM  # a block in one plane; one layer, elements of one byte
POOL_BYTES = PLANES * NUM_BLOCKS * RUN_BYTES
RUNS = kv.Runs(0, 0, 1, 0, PLANES, NUM_BLOCKS * RUN_BYTES, RUN_BYTES, RUN_BYTES)
GROUPS = (kv.KvGroup(BLOCK_SIZE, NUM_BLOCKS, (RUNS,), kv.BlockForm.TOKEN_MAJOR, heads=HEADS, head_dim=HEAD_DIM),)
IDENTITY = kv.SpaceIdentity("example", "2", "uint8", WORKERS, kv.OWN_HASH_ALGORITHM, kv.stored_form(GROUPS))
GOOD = (kv.ChunkOutcome.STORED, kv.ChunkOutcome.RESIDENT, kv.ChunkOutcome.LOADED)


def work(pipe: connection.Connection, address: str, engine_id: str, rank: int) -> None:
    """A worker process. Each order (number, verb, arguments) is answered by (number, result): a copy's when it ends."""
    memory = shared_memory.SharedMemory(f"kvgrpc-example-{secrets.token_hex(8)}", create=True, size=POOL_BYTES)
    pool = cast(memoryview, memory.buf)
    pool[:] = bytes(POOL_BYTES)  # so that all of its pages are there
    layout = kv.Layout((kv.SharedMemory(memory.name, 0, POOL_BYTES),), GROUPS)
    # Each worker has objects of its own, so its KV rank is its rank; ParallelStrategy knows MLA, replicas and stages.
    client = kv.WorkerClient(address, kv.RegisterRequest(engine_id, IDENTITY, rank, rank, WORKERS, WORKERS, layout))
    client.start(wait_s=5)  # False: no server yet; until it is there copies fail at once, and the engine computes
    running: dict[int, kv.CopyFuture] = {}

    def spots(prompt: list[int], blocks: list[int], first: int) -> Iterator[tuple[slice, bytes]]:
        for at, plane in itertools.product(range(first, len(blocks)), range(PLANES)):
            start = (plane * NUM_BLOCKS + blocks[at]) * RUN_BYTES
            prefix = f"{prompt[: (at + 1) * BLOCK_SIZE]} {rank} {plane}".encode()
            yield slice(start, start + RUN_BYTES), hashlib.shake_128(prefix).digest(RUN_BYTES)

    while (order := pipe.recv() if pipe.poll(0.001) else ()) is not None:
        for number in [number for number, copy in running.items() if copy.done()]:  # its blocks are the engine's again
            good = itertools.takewhile(lambda one: one.outcome in GOOD, running.pop(number).result())
            pipe.send((number, sum(one.count for one in good) * client.chunk_tokens))  # so many tokens are there
        number, verb, *arguments = order or (0, "")
        if verb == "compute":  # what was not loaded; answers how much is wrong then, of what was loaded too
            prompt, blocks, first = arguments
            for place, content in spots(prompt, blocks, first):
                pool[place] = content
            pipe.send((number, sum(pool[place] != content for place, content in spots(prompt, blocks, 0))))
        elif verb == "fence":  # the copy itself is answered, when its blocks are free
            client.fence([running[copy].call_id for copy in arguments if copy in running])
        elif verb:  # a copy: "store" and "retrieve" are the client's methods
            running[number] = getattr(client, verb)(*arguments)
    client.close()  # before the memory goes
    memory.unlink()


class Engine:
    """The scheduler: who has which blocks, and what each request waits for."""

    def __init__(self, address: str) -> None:
        engine_id = secrets.token_hex(16)  # a secret of this engine, the same in its three processes
        self.lookups = kv.SchedulerClient(address, engine_id, IDENTITY, kv.SchedulerOptions(tp_size=WORKERS))
        self.free, self.numbers, self.pipes = list(range(NUM_BLOCKS)), itertools.count(1), list[connection.Connection]()
        self.answers, self.lent = dict[int, list[int]](), dict[int, list[int]]()  # both by an order's number
        spawn = get_context("spawn")  # gRPC does not survive a fork
        for rank in range(WORKERS):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=work, args=(theirs, address, engine_id, rank)).start()
            self.pipes.append(ours)
        self.lookups.start(wait_s=5)

    def step(self, requests: dict[str, Generator[None, None, None]]) -> None:
        """Takes answers in; then each request does what it can do without waiting."""
        for pipe in connection.wait(self.pipes, timeout=0.005):
            number, result = cast(connection.Connection, pipe).recv()
            self.answers.setdefault(number, []).append(result)
            if number in self.lent and len(self.answers[number]) == WORKERS:
                self.free += self.lent.pop(number)
        for name, request in [*requests.items()]:
            if next(request, self) is self:
                del requests[name]

    def order(self, verb: str, *arguments: object) -> int:
        number = next(self.numbers)
        for pipe in self.pipes:
            pipe.send((number, verb, *arguments))
        return number

    def answered(self, number: int) -> Generator[None, None, list[int]]:
        while len(self.answers.get(number, ())) < WORKERS:
            yield
        return self.answers[number]

    def request(self, name: str, prompt: list[int], attempt: int = 0) -> Generator[None, None, None]:
        """One request's life. Closed, it is aborted, or preempted: then it comes again with another ``attempt``."""
        tokens, blocks, copy, good = kv.Tokens.from_ids(prompt), list[int](), 0, 0
        try:
            while (hit := self.lookups.try_lookup(name, tokens, attempt=attempt)) is None:
                yield
            while len(self.free) < len(prompt) // BLOCK_SIZE:
                yield
            blocks = [self.free.pop() for _ in range(len(prompt) // BLOCK_SIZE)]
            if end := hit.hit_tokens:
                copy = self.order("retrieve", hit.job_id, kv.TokenRange(0, end), [blocks[: end // BLOCK_SIZE]])
                good = min((yield from self.answered(copy)))  # what every worker has loaded; the rest is computed
            wrong = yield from self.answered(self.order("compute", prompt, blocks, good // BLOCK_SIZE))
            assert not any(wrong), f"{name}: wrong bytes"
            yield from self.answered(copy := self.order("store", tokens, [blocks]))
            print(f"{name}: {good} of {len(prompt)} tokens loaded", self.lookups.problem or "", flush=True)
        finally:
            self.lookups.discard(name)  # gives back what is still pinned
            if copy and len(self.answers.get(copy, ())) < WORKERS:
                self.order("fence", copy)
                self.lent[copy] = blocks  # the server's, until both workers have answered
            else:
                self.free += blocks

    def play(self, turn: int) -> None:
        """Three requests for one prompt; one is aborted, one preempted, wherever they are."""
        prompt = list(range(1000, 1608))
        requests = {f"{name}-{turn}": self.request(f"{name}-{turn}", prompt) for name in ("a", "b", "c")}
        _, aborted, preempted = requests.values()
        for _ in range(5):
            self.step(requests)
        aborted.close()
        preempted.close()
        requests[f"c-{turn}"] = self.request(f"c-{turn}", prompt, attempt=1)
        while requests or self.lent:
            self.step(requests)
        assert sorted(self.free) == list(range(NUM_BLOCKS)), "blocks are lost"

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        self.lookups.close()


if __name__ == "__main__":
    example = Engine(*(sys.argv[1:] or [kv.default_address()]))
    for number in range(3):
        example.play(number)
    example.close()
