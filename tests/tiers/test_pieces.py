# SPDX-License-Identifier: Apache-2.0
"""What tiers with a blocking client have in common, where no real server does it on demand: removing fails."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault
from kvgrpc.tiers.pieces import BlockingTier, Draining, Filling, TornObject
from tests.tiers.conformance import fault_of, object_name, parts


class Client:
    def close(self) -> None:
        pass


class Stuck(BlockingTier):
    """Keeps one damaged object that cannot be removed; what is written anew is well."""

    def __init__(self, fault: TierFault) -> None:
        super().__init__("stuck", "nowhere", (OSError,))
        self.fault: TierFault | None = fault
        self.reads = 0

    def _connect(self) -> Any:
        return Client()

    def _exists(self, names: Sequence[str]) -> Sequence[bool]:
        return [True for _ in names]

    def _read(self, object: ObjectName, filling: Filling) -> None:
        self.reads += 1
        if self.fault is not None:
            raise self.fault

    def _write(self, object: ObjectName, draining: Draining) -> int:
        self.fault = None
        return 0

    def _remove(self, name: str) -> int:
        raise PermissionError("no right to remove")


@pytest.mark.parametrize(
    ("fault", "counter"), [(TierFault(FaultReason.CORRUPT, "x"), "damaged_objects"), (TornObject("x"), "torn_objects")]
)
async def test_what_cannot_be_removed_is_passed_over_until_it_is_written_anew(fault: TierFault, counter: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        tier = Stuck(fault)
        stack.push_async_callback(tier.close)
        object = object_name("a", 8)
        assert await tier.exists([object.name]) == [True]
        assert await fault_of(tier, object) is fault.reason, "and not that of the removal"
        assert dict(tier.counters) == {counter: 1}
        assert await tier.exists([object.name, object_name("b", 8).name]) == [False, True]
        assert await fault_of(tier, object) is FaultReason.MISSING
        assert tier.reads == 1
        await tier.write(object, parts(bytes(8)))
        assert await tier.exists([object.name]) == [True]
        await tier.read(object, parts(bytearray(8)))
