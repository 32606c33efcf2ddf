# SPDX-License-Identifier: Apache-2.0
"""What a lookup grants: pins on chunks, and for each chunk the set of readers that may still read it.

A reader is one (kv_rank, tp_rank). An object of KV rank k is read by R = tp_size / kv_tp_size tensor-parallel ranks,
from (k % kv_tp_size) * R on. The readers of a chunk are bits: position of the KV rank among the wanted ones, times R,
plus the reader's place. A chunk is pinned once while any of its bits is left: a lookup costs by chunks, not by ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.types import Reader

if TYPE_CHECKING:
    from kvgrpc.core.jobs import Job


class Lease:
    """The pins of one job: ``chunks`` part after part, ``remaining`` reader bits of each; ``starts`` has the first
    chunk of each part and its place."""

    __slots__ = ("chunks", "full", "kv_tp_size", "ranks", "readers", "remaining", "starts")

    def __init__(self, ranks: tuple[int, ...], kv_tp_size: int, readers: int) -> None:
        self.ranks = ranks
        self.kv_tp_size = kv_tp_size
        self.readers = readers
        self.full = (1 << len(ranks) * readers) - 1
        self.chunks: list[Chunk] = []
        self.remaining: list[int] = []
        self.starts: tuple[tuple[int, int], ...] = ((0, 0),)

    def bit(self, reader: Reader) -> int:
        """The reader's bit. Refuses: READER_UNKNOWN."""
        place = reader.tp_rank - reader.kv_rank % self.kv_tp_size * self.readers
        if reader.kv_rank not in self.ranks or not 0 <= place < self.readers:
            text = f"kv_rank {reader.kv_rank}, tp_rank {reader.tp_rank} is no reader of this lookup"
            raise Refusal(Reason.READER_UNKNOWN, text, field="readers")
        return 1 << self.ranks.index(reader.kv_rank) * self.readers + place

    @property
    def pins(self) -> int:
        """Reader bits left."""
        return sum(bits.bit_count() for bits in self.remaining)


class Leases:
    """Grants and releases pins; ``pins`` is their sum over all leases."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._ledger = ledger
        self._index = index
        self.pins = 0
        self.reading: list[Chunk] = []
        """Pinned once each by streams that read them, beside all leases."""

    def fits(self, chunks: list[Chunk], coming_bytes: int = 0) -> bool:
        """Whether the pin budget has room for these chunks, and for what is still being read for pending lookups."""
        budget = self._index.slots.total_bytes * self._ledger.limits.pin_share
        more = sum([chunk.ready_bytes for chunk in chunks if not chunk.pins])
        return self._index.pinned_bytes + more + coming_bytes <= budget

    def grant(self, lease: Lease, chunks: list[Chunk]) -> None:
        """Adds chunks to the lease, all readers; the caller has pinned each once."""
        lease.chunks += chunks
        lease.remaining += [lease.full] * len(chunks)
        self.pins += len(chunks) * lease.full.bit_count()

    def renew(self, lease: Lease, chunks: list[Chunk]) -> None:
        """The lease is for these from now on, and pins them itself; who has let go of one of them has still done so."""
        known = dict(zip(lease.chunks, lease.remaining, strict=True))
        left = [known.get(chunk, lease.full) for chunk in chunks]
        self._index.pin([chunk for chunk, bits in zip(chunks, left, strict=True) if bits])
        self.end(lease)
        lease.chunks += chunks
        lease.remaining += left
        self.pins += lease.pins

    def free(self, lease: Lease, start: int, end: int, mask: int) -> int:
        """Takes the readers ``mask`` off all parts of chunks [start, end); how many pins that released."""
        ends = [*(place for _, place in lease.starts[1:]), len(lease.chunks)]
        return sum([
            self.release(lease, max(place + start - first, place), min(place + end - first, last), mask)
            for (first, place), last in zip(lease.starts, ends, strict=True)
        ])  # fmt: skip

    def release(self, lease: Lease, start: int, end: int, mask: int) -> int:
        """Takes the readers ``mask`` off the places [start, end); how many pins that released."""
        chunks, remaining, count = lease.chunks, lease.remaining, len(lease.chunks)
        if mask == lease.full and start <= 0 and end >= count and remaining.count(mask) == count:
            released, ended = count * mask.bit_count(), chunks
            remaining[:] = [0] * count
        else:
            released, ended = 0, list[Chunk]()
            for at in range(start, min(end, count)):
                bits = remaining[at]
                if bits & mask:
                    released += (bits & mask).bit_count()
                    remaining[at] = bits & ~mask
                    if not bits & ~mask:
                        ended.append(chunks[at])
        self.pins -= released
        self._index.unpin(ended)
        return released

    def end(self, lease: Lease) -> int:
        """Releases whatever is left; how many pins that were."""
        released = self.release(lease, 0, len(lease.chunks), lease.full)
        lease.chunks.clear()
        lease.remaining.clear()
        return released


def finish_read(leases: Leases, job: Job, place: int, bit: int) -> None:
    """A reader has its bytes of a chunk: under one lease it reads once, whatever it repeats."""
    leases.release(job.lease, place, place + 1, bit)
