# SPDX-License-Identifier: Apache-2.0
"""An engine at a desk: a scheduler and its workers, whose calls are one line each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgrpc.core import types as t

if TYPE_CHECKING:
    from tests.core.desk import Desk

CHUNK = 16
BLOCK = 4
BLOCKS_A_CHUNK = CHUNK // BLOCK
BLOCK_BYTES = 256
OBJECT = BLOCKS_A_CHUNK * BLOCK_BYTES


def show(results: Sequence[t.ChunkResult] | None) -> str:
    """Results as one reads them: ``3 STORED, 1 REFUSED NO_ROOM``; ``waiting`` for a call that still runs."""
    if results is None:
        return "waiting"
    return ", ".join(f"{r.count} {r.outcome.value} {r.reason}".strip() for r in results)


def key_of(prompt: str, chunk: int) -> bytes:
    """Key of one chunk of a prompt. ``a/2/x`` begins with the first 2 chunks of ``a``."""
    head, _, rest = prompt.partition("/")
    if rest and chunk < int(rest.partition("/")[0]):
        prompt = head
    return hashlib.sha256(f"{prompt}:{chunk}".encode()).digest()


@dataclass
class EngineDesk:
    """One engine: its scheduler ``NAME/s`` and its workers ``NAME/0``, ``NAME/1``, … in (stage, tp_rank) order."""

    desk: Desk
    name: str
    tp_size: int = 1
    kv_tp_size: int = 1
    stages: int = 1
    salt: str = ""
    model: str = "llama"
    revision: str = "r1"
    block_bytes: int = BLOCK_BYTES
    num_blocks: int = 1024
    groups: int = 1
    register: bool = True
    stored_form: str = "opaque:x:y:4"

    @property
    def engine_id(self) -> str:
        return f"{self.name}-secret"

    @property
    def scheduler(self) -> str:
        return f"{self.name}/s"

    @property
    def identity(self) -> t.SpaceIdentity:
        world = self.kv_tp_size * self.stages
        return t.SpaceIdentity(self.model, self.revision, "bfloat16", world, "engine-hash", self.stored_form)

    def open(self) -> None:
        self.base = self.desk.book.space_base(self.desk.now, self.identity)
        self.attach(self.scheduler, t.Role.SCHEDULER)
        for worker in range(self.tp_size * self.stages):
            self.attach(self.worker(worker), t.Role.WORKER)
            if self.register:
                self.share(worker)

    def attach(self, client_id: str, role: t.Role, session: bytes = b"s1") -> bool:
        resumed = self.desk.book.attach(self.desk.now, client_id, self.engine_id, role, session)
        self.desk.step()
        return resumed

    def die(self, client_id: str, session: bytes = b"s1") -> None:
        """The client's stream breaks."""
        self.desk.book.detach(self.desk.now, client_id, session)
        self.desk.step()

    def worker(self, number: int) -> str:
        return f"{self.name}/{number}"

    def reader(self, number: int) -> t.Reader:
        stage, tp_rank = divmod(number, self.tp_size)
        return t.Reader(stage * self.kv_tp_size + tp_rank // (self.tp_size // self.kv_tp_size), tp_rank)

    def registration(self, worker: int = 0, **changes: object) -> t.Registration:
        reader = self.reader(worker)
        group = t.GroupGeometry(BLOCK, self.num_blocks, self.block_bytes // self.groups)
        plain = t.Registration(
            engine_id=self.engine_id,
            identity=self.identity,
            kv_rank=reader.kv_rank,
            tp_rank=reader.tp_rank,
            tp_size=self.tp_size,
            kv_tp_size=self.kv_tp_size,
            geometry=t.Geometry((group,) * self.groups),
            memory_bytes=self.num_blocks * self.block_bytes,
            mapping_id=self.desk.number(),
            layout_digest=b"layout",
        )
        return replace(plain, **changes)  # type: ignore[arg-type]

    def share(self, worker: int = 0, **changes: object) -> t.Registered:
        answer = self.desk.book.register(self.desk.now, self.worker(worker), self.registration(worker, **changes))
        self.desk.step()
        return answer

    @property
    def space(self) -> t.SpaceRef:
        return t.SpaceRef(self.base, "", self.salt)

    def content(self, prompt: str, chunks: int, tokens: int | None = None) -> t.ChunkKeys:
        keys = [key_of(prompt, chunk) for chunk in range(chunks)]
        return t.ChunkKeys(keys, chunks * CHUNK if tokens is None else tokens)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def store(
        self,
        prompt: str = "a",
        chunks: int = 4,
        *,
        worker: int = 0,
        start: int = 0,
        end: int | None = None,
        block: int = 0,
        call_id: int | None = None,
        policy: t.Policy = t.DEFAULT_POLICY,
    ) -> str:
        """Stores chunks [0, chunks) of a prompt, or the tokens [start, end), from blocks ``block`` on."""
        end = chunks * CHUNK if end is None else end
        ids = tuple(range(block, block + (end - start) // BLOCK))
        command = t.StoreCommand(
            self.engine_id,
            self.desk.number() if call_id is None else call_id,
            self.space,
            self.content(prompt, chunks),
            t.TokenRange(start, end),
            (ids,) * self.groups,
            policy,
        )
        return self._call(worker, command, self.desk.book.store(self.desk.now, self.worker(worker), command))

    def store_all(self, prompt: str = "a", chunks: int = 4, policy: t.Policy = t.DEFAULT_POLICY) -> None:
        """One store by the first worker of each KV rank; all must succeed."""
        for rank in range(self.kv_tp_size * self.stages):
            worker = next(w for w in range(self.tp_size * self.stages) if self.reader(w).kv_rank == rank)
            assert self.store(prompt, chunks, worker=worker, policy=policy) in (
                f"{chunks} STORED",
                f"{chunks} RESIDENT",
            )

    def lookup(
        self,
        prompt: str = "a",
        chunks: int = 4,
        *,
        request: str | None = None,
        attempt: int = 0,
        client: str | None = None,
        kv_ranks: tuple[int, ...] = (),
        tp_size: int | None = None,
        wait_ns: int = 0,
        policy: t.Policy = t.DEFAULT_POLICY,
    ) -> t.LookupAnswer:
        command = t.LookupCommand(
            engine_id=self.engine_id,
            request_id=f"r{self.desk.number()}" if request is None else request,
            attempt=attempt,
            space=self.space,
            content=self.content(prompt, chunks),
            tp_size=self.tp_size if tp_size is None else tp_size,
            job_id=self.desk.number().to_bytes(16, "big"),
            kv_ranks=kv_ranks,
            prefetch_wait_ns=wait_ns,
            policy=policy,
        )
        answer = self.desk.book.lookup(self.desk.now, client or self.scheduler, command)
        self.desk.step()
        return answer

    def hits(self, prompt: str = "a", chunks: int = 4) -> int:
        """How many chunks a lookup finds; it is freed at once."""
        answer = self.lookup(prompt, chunks)
        if answer.job_id:
            self.free(answer)
        return answer.status.hit_tokens // CHUNK

    def retrieve(
        self,
        job: t.LookupAnswer,
        *,
        worker: int = 0,
        start: int = 0,
        end: int | None = None,
        block: int = 512,
        call_id: int | None = None,
    ) -> str:
        """Reads the tokens [start, end) of a job, by default all of its hit, into blocks ``block`` on."""
        end = self.query(job).hit_tokens if end is None else end
        ids = tuple(range(block, block + (end - start) // BLOCK))
        command = t.RetrieveCommand(
            self.engine_id,
            self.desk.number() if call_id is None else call_id,
            job.job_id,
            t.TokenRange(start, end),
            (ids,) * self.groups,
        )
        return self._call(worker, command, self.desk.book.retrieve(self.desk.now, self.worker(worker), command))

    def _call(
        self, worker: int, command: t.StoreCommand | t.RetrieveCommand, results: tuple[t.ChunkResult, ...] | None
    ) -> str:
        self.last_call = command
        self.desk.step()
        return show(results if results is not None else self.desk.ended.get((self.worker(worker), command.call_id)))

    def ended(self, call_id: int | None = None, worker: int = 0) -> str:
        """What became of a call, by default the last one."""
        call_id = self.last_call.call_id if call_id is None else call_id
        return show(self.desk.ended.get((self.worker(worker), call_id)))

    def query(self, job: t.LookupAnswer) -> t.PrefetchStatus:
        return self.desk.book.query(self.desk.now, self.scheduler, self.engine_id, job.job_id)

    def free(
        self,
        job: t.LookupAnswer,
        *,
        start: int | None = None,
        end: int = 0,
        readers: Sequence[t.Reader] = (),
        tp_size: int | None = None,
    ) -> int:
        """Frees all of a job, or chunks [start, end)."""
        tokens = None if start is None else t.TokenRange(start * CHUNK, end * CHUNK)
        size = self.tp_size if tp_size is None else tp_size
        command = t.FreeCommand(self.engine_id, job.job_id, size, tokens, tuple(readers))
        released = self.desk.book.free(self.desk.now, self.scheduler, command)
        self.desk.step()
        return released

    def end(self, request: str) -> t.Ended:
        ended = self.desk.book.end_request(self.desk.now, self.scheduler, self.engine_id, request)
        self.desk.step()
        return ended

    def fence(self, *call_ids: int, worker: int = 0) -> tuple[int, ...]:
        running = self.desk.book.fence(self.desk.now, self.worker(worker), self.engine_id, call_ids)
        self.desk.step()
        return running

    def revoke(self, call_id: int, worker: int = 0) -> None:
        self.desk.book.revoke(self.desk.now, self.worker(worker), call_id)
        self.desk.step()

    def pin(self, prompt: str = "a", chunks: int = 4, ttl_ns: int = 60 * t.S, pin_id: bytes = b"pin") -> t.Held:
        held = self.desk.book.pin(self.desk.now, self.space, self.content(prompt, chunks), ttl_ns, pin_id)
        self.desk.step()
        return held

    def clear(self) -> t.Cleared:
        cleared = self.desk.book.clear(self.desk.now, space=self.space)
        self.desk.step()
        return cleared
