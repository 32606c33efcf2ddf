# SPDX-License-Identifier: Apache-2.0
"""What a tier is: it keeps objects below the arena, by name, and never hands out bytes that it cannot vouch for.

Objects are self-describing (``kvgrpc.tiers.envelope``): ``read`` verifies name, length and checksum, so foreign,
short or flipped bytes are faults, never data.

Threads: all methods belong to one event loop and never block it. When ``read`` or ``write`` has ended (returned,
raised, or was cancelled and has raised), nothing touches its buffers any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from kvgrpc.core.types import ObjectName


class FaultReason(Enum):
    """Why a tier could not serve. Closed list."""

    MISSING = "MISSING"
    SHORT = "SHORT"
    FOREIGN = "FOREIGN"
    CORRUPT = "CORRUPT"
    IO = "IO"
    TIMEOUT = "TIMEOUT"
    FULL = "FULL"
    """There is no room for what is to be written."""
    SKIPPED = "SKIPPED"
    """The tier was not asked: it has failed lately."""


DAMAGED = frozenset({FaultReason.SHORT, FaultReason.FOREIGN, FaultReason.CORRUPT})
"""What says that an object is of no use, and nothing about the tier's health."""


class TierFault(Exception):  # noqa: N818 -- a miss is a fault too, and no error
    """A read or write that failed, with one reason of the closed list."""

    def __init__(self, reason: FaultReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message


class TierMiss(TierFault):
    """The object is not there. An answer, not a sign of ill health."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultReason.MISSING, message)


class OtherLength(TierFault):
    """The object is there with another length than was asked for: of no use here, but whole."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultReason.FOREIGN, message)


class Tier(Protocol):
    """Keeps objects by name."""

    @property
    def name(self) -> str:
        """Short name in answers and metrics, e.g. "disk"."""
        ...

    @property
    def healthy(self) -> bool:
        """What operators are shown: False while it fails. Asked all the same, it says SKIPPED at once."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What it wants operators to see, by name: counts since the start, and what is now (``limit_bytes``)."""
        ...

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether ``read`` would probably find it. May be wrong either way. Raises TierFault (IO,
        TIMEOUT).
        """
        ...

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        """Fills ``into``, whose lengths add up to ``object.size_bytes``, with the object's bytes.

        Raises TierMiss or TierFault; then ``into`` may hold anything. A damaged object that the tier may remove is not
        found again.
        """
        ...

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        """Keeps the object; once it has returned, ``read`` finds it, until the tier needs its room. A write that fails
        leaves no readable object behind, except an earlier whole one. Raises TierFault (IO, TIMEOUT, FULL).
        """
        ...

    async def remove(self, name: str) -> None:
        """Forgets the object; harmless when it is not there. Raises TierFault (IO, TIMEOUT)."""
        ...

    async def usage(self) -> int:
        """Bytes that the tier's objects take, headers included. Raises TierFault (IO, TIMEOUT)."""
        ...

    async def close(self) -> None:
        """Gives everything back. No other method is called afterwards."""
        ...
