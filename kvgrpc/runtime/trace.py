# SPDX-License-Identifier: Apache-2.0
"""Recordings of lookups and stores, for whoever asks what another size of cache would have found.

A recording has no contents: chunk keys are hashed with a salt that nobody learns, so that a prompt cannot be guessed
and tried. Lives on the driver's loop. With nobody recording, a call costs one look at an empty list.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from kvgrpc.api import CallKind, TracedCall, TracedCalls
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import space_digest
from kvgrpc.core.types import MS, PrefetchStatus, SpaceRef
from kvgrpc.runtime.clock import Clock

RECORDINGS_MOST = 4
QUEUED_CHUNKS_MOST = 1 << 20
"""8 MiB that a reader may be behind."""
BATCH_CHUNKS = 1 << 16
"""About so many chunks go into one message: half a MiB."""
SPACES_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Asked:
    """A call as it came. ``prefix_chunks`` as in TracedCall."""

    kind: CallKind
    space: SpaceRef
    num_tokens: int
    keys: Sequence[bytes]
    prefix_chunks: int
    chunk_bytes: int


class _Recording:
    """What one reader has not taken yet."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._salt = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=8)
        self._spaces: dict[bytes, int] = {}
        self._queue: deque[TracedCall] = deque()
        self._queued_chunks = 0
        self._dropped = 0
        self.filled = asyncio.Event()

    def note(self, asked: Asked, now: int) -> None:
        digest = space_digest(asked.space)
        full = digest not in self._spaces and len(self._spaces) >= SPACES_MOST
        if full or (self._queue and self._queued_chunks + len(asked.keys) > QUEUED_CHUNKS_MOST):
            self._dropped += 1
            return
        salted = self._salt.copy()
        salted.update(digest)
        chunks = array("Q")
        for key in asked.keys:
            hashed = salted.copy()
            hashed.update(key)
            chunks.frombytes(hashed.digest())
        space = self._spaces.setdefault(digest, len(self._spaces))
        at_ms = (now - self._began_ns) // MS
        facts = (asked.num_tokens, chunks, asked.prefix_chunks, asked.chunk_bytes)
        self._queue.append(TracedCall(asked.kind, at_ms, space, *facts))
        self._queued_chunks += len(chunks)
        self.filled.set()

    def take(self, chunk_tokens: int) -> TracedCalls:
        calls: list[TracedCall] = []
        taken = 0
        while self._queue and (not calls or taken + len(self._queue[0].chunks) <= BATCH_CHUNKS):
            calls.append(self._queue.popleft())
            taken += len(calls[-1].chunks)
        self._queued_chunks -= taken
        dropped, self._dropped = self._dropped, 0
        if not self._queue:
            self.filled.clear()
        return TracedCalls(tuple(calls), dropped, chunk_tokens)


class Recordings:
    """All that run."""

    def __init__(self, clock: Clock, chunk_tokens: int) -> None:
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._running: list[_Recording] = []
        self._pending: dict[bytes, tuple[Asked, int]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anybody records."""
        return bool(self._running)

    def asked(self, asked: Asked) -> None:
        """A call whose outcome is known."""
        self._note(asked, self._clock())

    def pending(self, job_id: bytes, asked: Asked) -> None:
        """A lookup that is not final."""
        self._pending[job_id] = asked, self._clock()

    def ended(self, job_id: bytes, status: PrefetchStatus | None) -> None:
        """A lookup became final, or went (None). Harmless for one that is not known here."""
        known = self._pending.pop(job_id, None) if self._pending else None
        if known is not None:
            hit_tokens = status.hit_tokens if status is not None else 0
            self._note(replace(known[0], prefix_chunks=hit_tokens // self._chunk_tokens), known[1])

    def _note(self, asked: Asked, at_ns: int) -> None:
        for recording in self._running:
            recording.note(asked, at_ns)

    async def record(self) -> AsyncGenerator[TracedCalls, None]:
        """Calls from now on; first, at once, none. Refuses: CALL_LIMIT."""
        if len(self._running) >= RECORDINGS_MOST:
            text = f"{RECORDINGS_MOST} recordings run already; end one"
            raise Refusal(Reason.CALL_LIMIT, text, resource="recordings")
        recording = _Recording(self._clock())
        self._running.append(recording)
        try:
            yield TracedCalls((), 0, self._chunk_tokens)
            while True:
                await recording.filled.wait()
                yield recording.take(self._chunk_tokens)
        finally:
            self._running.remove(recording)
            if not self._running:
                self._pending.clear()
