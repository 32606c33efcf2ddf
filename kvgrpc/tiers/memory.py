# SPDX-License-Identifier: Apache-2.0
"""A tier in the process's own memory, shipped for tests and demonstrations; every way in which a tier can fail can be
asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, check_header, check_payload, seal


class Damage(Enum):
    """What may have happened to a kept object."""

    SHORT = "its last byte is gone"
    FLIPPED = "one bit of its last byte is another"
    FOREIGN = "another object's bytes are in its place"
    VANISHED = "it is gone, but exists still says yes"


class MemoryTier:
    """Keeps objects in a dict, sealed as in any tier.

    Steered by: ``delay_s`` (of each read and write), ``hang`` / ``resume`` (reads and writes wait), ``damage``,
    ``fault`` (raised by every call while set), ``healthy``. Counts ``probes`` (names asked for), ``reads`` begun,
    ``reads_in_flight`` and ``writes``.

    Threads: one event loop, that of its first hanging call.
    """

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._kept: dict[str, bytes] = {}
        self._vanished: set[str] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.healthy = True
        self.delay_s = 0.0
        self.fault: FaultReason | None = None
        self.probes = 0
        self.reads = 0
        self.reads_in_flight = 0
        self.writes = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def counters(self) -> Mapping[str, int]:
        return {}

    # ---- steering ----

    def hang(self) -> None:
        """Makes reads and writes wait until ``resume``."""
        self._flowing.clear()

    def resume(self) -> None:
        """Ends ``hang``."""
        self._flowing.set()

    def damage(self, name: str, how: Damage) -> None:
        """Does that to a kept object."""
        kept = self._kept[name]
        if how is Damage.SHORT:
            self._kept[name] = kept[:-1]
        elif how is Damage.FLIPPED:
            self._kept[name] = kept[:-1] + bytes([kept[-1] ^ 1])
        elif how is Damage.FOREIGN:
            payload = memoryview(kept)[HEADER_BYTES:]
            other = ObjectName("0" * len(name), len(payload))
            self._kept[name] = seal(other, [payload]) + bytes(payload)
        else:
            del self._kept[name]
            self._vanished.add(name)

    def get_raw(self, name: str) -> bytes:
        """What is kept, header included."""
        return self._kept[name]

    def put_raw(self, name: str, kept: bytes) -> None:
        """Keeps these bytes in place of an object."""
        self._kept[name] = kept

    @property
    def names(self) -> frozenset[str]:
        """Names of what is kept."""
        return frozenset(self._kept)

    # ---- Tier ----

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if not self.healthy:
            raise TierFault(FaultReason.SKIPPED, f"{self._name} was told to be unhealthy")
        self.probes += len(names)
        self._fail_if_told("exists")
        return [name in self._kept or name in self._vanished for name in names]

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        self.reads += 1
        self.reads_in_flight += 1
        try:
            await self._flow("read")
            self._read(object, into)
        finally:
            self.reads_in_flight -= 1

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        self.writes += 1
        await self._flow("write")
        self._kept[object.name] = seal(object, data) + b"".join(data)
        self._vanished.discard(object.name)

    async def remove(self, name: str) -> None:
        self._fail_if_told("remove")
        self._kept.pop(name, None)
        self._vanished.discard(name)

    async def usage(self) -> int:
        self._fail_if_told("usage")
        return sum(map(len, self._kept.values()))

    async def close(self) -> None:
        self._kept.clear()
        self._vanished.clear()
        self.resume()

    def _read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        kept = self._kept.get(object.name)
        if kept is None:
            raise TierMiss(f"{object.name}: not kept in {self._name}")
        check_header(object, kept)
        payload = memoryview(kept)[HEADER_BYTES:]
        if len(payload) < object.size_bytes:
            raise TierFault(FaultReason.SHORT, f"{object.name}: {len(payload)} of {object.size_bytes} bytes are there")
        at = 0
        for part in into:
            part[:] = payload[at : at + len(part)]
            at += len(part)
        check_payload(object, kept, into)

    async def _flow(self, what: str) -> None:
        await self._flowing.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self._fail_if_told(what)

    def _fail_if_told(self, what: str) -> None:
        if self.fault is not None:
            raise TierFault(self.fault, f"{what} of {self._name} was told to fail")
