# SPDX-License-Identifier: Apache-2.0
"""The cache in process, as one client sees it: CacheApi over the driver."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ParamSpec, TypeVar

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.fillings import begin
from kvgrpc.core.types import (
    MS,
    ChunkKeys,
    ChunkResult,
    Ended,
    LookupAnswer,
    LookupCommand,
    ObjectForm,
    PrefetchStatus,
    Registration,
    Role,
    StoreCommand,
    TokenRange,
)
from kvgrpc.runtime.driver import Driver
from kvgrpc.runtime.trace import Asked
from kvgrpc.runtime.writing import fill
from kvgrpc.transfer.layout import check_layout, stored_form

P = ParamSpec("P")
T = TypeVar("T")


class DriverSession:
    """CacheApi of the client ``client_id``. Holds no state of its own: make as many as you like."""

    def __init__(self, driver: Driver, client_id: str) -> None:
        self._driver = driver
        self._client_id = client_id

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def handshake(self, hello: api.Hello) -> api.ServerInfo:
        if hello.protocol_major != api.PROTOCOL_MAJOR:
            text = (
                f"the client speaks protocol {hello.protocol_major}.{hello.protocol_minor}, this server "
                f"{api.PROTOCOL_MAJOR}.{api.PROTOCOL_MINOR}; the major versions must be equal"
            )
            raise Refusal(Reason.PROTOCOL_VERSION, text, field="protocol_major")
        driver = self._driver
        space_base = b""
        if hello.identity is not None:
            space_base = driver.book.space_base(driver.now(), hello.identity)
        limits = driver.limits
        arena_bytes = driver.hands.arena.size_bytes  # also while parts of it are still missing
        return api.ServerInfo(
            protocol_major=api.PROTOCOL_MAJOR,
            protocol_minor=api.PROTOCOL_MINOR,
            server_version=driver.facts.server_version,
            server_epoch=driver.facts.server_epoch,
            chunk_tokens=limits.chunk_tokens,
            hash_algorithm=api.OWN_HASH_ALGORITHM,
            limits=api.Limits(
                keys_per_call=limits.keys_per_call,
                jobs_per_engine=limits.jobs_per_engine,
                message_bytes=driver.facts.message_bytes,
                clients=limits.clients,
                calls_per_client=limits.calls_per_client,
                lease_ms=limits.lease_ns // MS,
                record_ms=limits.record_ns // MS,
                reattach_grace_ms=limits.reattach_grace_ns // MS,
                pin_bytes=int(arena_bytes * limits.pin_share),
                hold_bytes=int(arena_bytes * limits.hold_share),
            ),
            host_id=driver.facts.host_id,
            space_base=space_base,
        )

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[api.AttachEvent]:
        driver = self._driver
        resumed = driver.book.attach(driver.now(), self._client_id, engine_id, role, session_id)
        driver.pump()  # the end of an earlier session of this name comes before the new stream
        queue = driver.open_stream(self._client_id)
        if role is Role.WORKER:  # others copy nothing
            driver.hands.affinity.bind(self._client_id)
        try:
            yield api.AttachEvent(False, driver.facts.server_epoch, resumed)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            if driver.close_stream(self._client_id, queue):
                driver.book.detach(driver.now(), self._client_id, session_id)
                driver.pump()

    # ---- memory -----------------------------------------------------------------------------------------------------

    async def register(self, request: api.RegisterRequest) -> api.RegisterAnswer:
        driver = self._driver
        self._check_host(request.host_id)
        geometry = check_layout(request.layout, driver.limits.chunk_tokens)
        form = stored_form(request.layout.groups)
        if request.identity.stored_form not in ("", form):
            text = f"the layout's stored form is {form!r}, the identity says {request.identity.stored_form!r}"
            raise Refusal(Reason.STORED_FORM_MISMATCH, text, field="identity.stored_form")
        driver.book.check_client(self._client_id, request.engine_id)
        mapping_id = driver.next_mapping_id()
        digest = await self._map(mapping_id, request.layout)
        registration = Registration(
            engine_id=request.engine_id,
            identity=replace(request.identity, stored_form=form),
            kv_rank=request.kv_rank,
            tp_rank=request.tp_rank,
            tp_size=request.tp_size,
            kv_tp_size=request.kv_tp_size,
            geometry=geometry,
            memory_bytes=sum(memory.size_bytes for memory in request.layout.memory),
            mapping_id=mapping_id,
            layout_digest=digest,
        )
        try:
            registered = driver.book.register(driver.now(), self._client_id, registration)
        except Refusal:
            await self._unmap(mapping_id)
            raise
        if registered.changed:
            driver.mapped[mapping_id] = self._client_id
            driver.current[self._client_id] = mapping_id
            driver.block_sizes[self._client_id] = geometry.block_size
        else:
            await self._unmap(mapping_id)
        await driver.wait_unmapped(self._client_id)
        return api.RegisterAnswer(
            space_base=registered.space_base,
            chunk_tokens=driver.limits.chunk_tokens,
            registration_epoch=registered.registration_epoch,
            stored_form=form,
            object_bytes=registered.object_bytes,
        )

    def _check_host(self, host_id: str) -> None:
        if not host_id:
            text = "host_id is empty; send the host_id that Handshake answers on the client's own host"
            raise Refusal(Reason.INVALID_FIELD, text, field="host_id")
        own = self._driver.facts.host_id
        if host_id != own:
            text = f"the client's memory is on host {host_id}, this server is on host {own}; use the node's own server"
            raise Refusal(Reason.HOST_MISMATCH, text, field="host_id", resource=host_id)

    def _submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._driver.hands.affinity.submit(self._client_id, work, *args, **kwargs)

    async def _map(self, mapping_id: int, layout: api.Layout) -> bytes:
        mapped = asyncio.wrap_future(self._submit(self._driver.hands.mover.map, mapping_id, layout))
        try:
            return await asyncio.shield(mapped)
        except asyncio.CancelledError:
            mapped.add_done_callback(lambda done: self._give_up(mapping_id, done))
            raise

    def _give_up(self, mapping_id: int, mapped: asyncio.Future[bytes]) -> None:
        """Nobody waits for the mapping any more, and it is there now. A driver that is closing unmaps everything."""
        if mapped.exception() is None and not self._driver.closing:
            self._submit(self._driver.hands.mover.unmap, mapping_id)

    async def _unmap(self, mapping_id: int) -> None:
        """Of a mapping that came to nothing: when its call is answered, its memory is not open any more."""
        await asyncio.shield(asyncio.wrap_future(self._submit(self._driver.hands.mover.unmap, mapping_id)))

    async def unregister(self, engine_id: str) -> None:
        driver = self._driver
        driver.book.unregister(driver.now(), self._client_id, engine_id)
        driver.current.pop(self._client_id, None)
        await driver.wait_unmapped(self._client_id)

    # ---- lookup -----------------------------------------------------------------------------------------------------

    async def lookup(self, request: api.LookupRequest) -> LookupAnswer:
        driver = self._driver
        driver.book.check_client(self._client_id, request.engine_id)
        content = await driver.chunk_keys(request.space, request.content)
        job_id = secrets.token_bytes(16)
        answer = driver.book.lookup(
            driver.now(),
            self._client_id,
            LookupCommand(
                engine_id=request.engine_id,
                request_id=request.request_id,
                attempt=request.attempt,
                space=request.space,
                content=content,
                tp_size=request.tp_size,
                job_id=job_id,
                kv_ranks=request.kv_ranks,
                prefetch_wait_ns=request.prefetch_wait_ms * MS,
                policy=request.policy,
                fingerprint=_fingerprint(request, content, driver.limits.chunk_tokens),
            ),
        )
        repeated = answer.job_id not in (b"", job_id)
        if not request.policy.no_lookup and not repeated:
            forms = driver.book.index.facts(request.space.space_base).forms if answer.job_id else {}
            chunk_bytes = sum(forms[rank][0].object_bytes for rank in request.kv_ranks or forms if rank in forms)
            driver.figures.asked(answer, len(content.keys), chunk_bytes)
            if driver.recordings.wanted:
                self._record_lookup(request, content, answer, chunk_bytes)
        driver.pump()
        return answer

    def _record_lookup(
        self, request: api.LookupRequest, content: ChunkKeys, answer: LookupAnswer, chunk_bytes: int
    ) -> None:
        driver, status = self._driver, answer.status
        hits = status.hit_tokens // driver.limits.chunk_tokens
        asked = Asked(api.CallKind.LOOKUP, request.space, content.num_tokens, content.keys, hits, chunk_bytes)
        if status.done:
            driver.recordings.asked(asked)
        else:
            driver.recordings.pending(answer.job_id, asked)

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        driver = self._driver
        status = driver.book.query(driver.now(), self._client_id, engine_id, job_id)
        if wait_ms and not status.done:
            await driver.wait_job(job_id, wait_ms)
            status = driver.book.query(driver.now(), self._client_id, engine_id, job_id)
        return status

    async def free(self, request: api.FreeRequest) -> int:
        driver = self._driver
        released = driver.book.free(driver.now(), self._client_id, request)
        driver.pump()
        return released

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        driver = self._driver
        ended = driver.book.end_request(driver.now(), self._client_id, engine_id, request_id)
        driver.pump()
        return ended

    # ---- copies -----------------------------------------------------------------------------------------------------

    async def store(self, request: api.StoreRequest) -> tuple[ChunkResult, ...]:
        driver = self._driver
        driver.book.check_client(self._client_id, request.engine_id)
        forgets, mapping_id = driver.forgets, driver.current.get(self._client_id)
        if request.ready_event:
            await driver.ready.wait(self._client_id, request)
        content = await driver.chunk_keys(request.space, request.content)
        if driver.current.get(self._client_id) != mapping_id:
            text = "the memory of its blocks was unregistered before the call had begun"
            raise Refusal(Reason.CALL_REVOKED, text, field="blocks")
        tokens = request.range
        if tokens is None:
            block_size = driver.block_sizes.get(self._client_id, 1)
            tokens = TokenRange(0, content.num_tokens // block_size * block_size)
        command = StoreCommand(
            engine_id=request.engine_id,
            call_id=request.call_id,
            space=request.space,
            content=content,
            range=tokens,
            blocks=request.blocks,
            policy=request.policy,
            cleared=driver.forgets != forgets,
        )
        results, call_id = driver.book.store(driver.now(), self._client_id, command), request.call_id
        if driver.recordings.wanted and not command.cleared and not content.first_chunk:
            self._record_store(command)
        del request, content, command  # the bookkeeper has kept what it needs
        return await self._results(call_id, results)

    def _record_store(self, command: StoreCommand) -> None:
        driver, content, chunk_tokens = self._driver, command.content, self._driver.limits.chunk_tokens
        keys = content.keys[: command.range.end // chunk_tokens]
        first = min(-(-command.range.start // chunk_tokens), len(keys))
        forms = driver.book.index.facts(command.space.space_base).forms
        chunk_bytes = sum(part.object_bytes for parts in forms.values() for part in parts)
        facts = (command.space, content.num_tokens, keys, first, chunk_bytes)
        driver.recordings.asked(Asked(api.CallKind.STORE, *facts))

    async def retrieve(self, request: api.RetrieveRequest) -> tuple[ChunkResult, ...]:
        results = self._driver.book.retrieve(self._driver.now(), self._client_id, request)
        call_id = request.call_id
        del request  # the bookkeeper has kept what it needs
        return await self._results(call_id, results)

    def read_chunks(self, request: api.ReadChunksRequest) -> AsyncIterator[api.ReadChunksAnswer]:
        return self._driver.reads.read(self._driver, self._client_id, request)

    async def write_chunks(
        self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]
    ) -> tuple[ChunkResult, ...]:
        driver = self._driver
        with driver.writes.one_more(self._client_id):
            driver.book.check_client(self._client_id, request.engine_id)
            forgets = driver.forgets
            content = await driver.chunk_keys(request.space, request.content)
            chunk_tokens, last = driver.limits.chunk_tokens, content.first_chunk + len(content.keys)
            command = StoreCommand(
                engine_id=request.engine_id,
                call_id=0,
                space=request.space,
                content=content,
                range=request.range or TokenRange(content.first_chunk * chunk_tokens, last * chunk_tokens),
                blocks=(),
                policy=request.policy,
                cleared=driver.forgets != forgets,
            )
            objects = request.objects or (ObjectForm(0, request.object_bytes, request.order),)
            filling = begin(driver.book, self._client_id, command, objects, request.kv_rank)
            if driver.recordings.wanted and not command.cleared and not content.first_chunk:
                self._record_store(command)
            return await fill(driver, filling, parts)

    def watch(self, request: api.WatchRequest) -> AsyncIterator[api.WatchEvent]:
        return self._driver.watching.watch(request)

    async def _results(self, call_id: int, results: tuple[ChunkResult, ...] | None) -> tuple[ChunkResult, ...]:
        if results is not None:
            self._driver.pump()
            return results
        return await self._driver.wait_call(self._client_id, call_id)

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        driver = self._driver
        running = driver.book.fence(driver.now(), self._client_id, engine_id, call_ids)
        driver.ready.fence(self._client_id, call_ids)
        await driver.wait_calls_ended(self._client_id, running)


def _fingerprint(request: api.LookupRequest, keys: ChunkKeys, chunk_tokens: int) -> int:
    """Stands for what a lookup asks for, so that a request id that is used again for another prompt is noticed. Tokens
    are in the keys, but for those behind the last full chunk."""
    content = request.content
    tail = bytes(content.data[len(keys.keys) * chunk_tokens * 4 :]) if isinstance(content, api.Tokens) else b""
    return hash((request.space, tuple(keys.keys), keys.num_tokens, tail, request.tp_size, request.kv_ranks))
