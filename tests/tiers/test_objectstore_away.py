# SPDX-License-Identifier: Apache-2.0
"""An object store in a folder that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.core.types import Versions
from kvgrpc.tiers.base import FaultReason, TierFault
from kvgrpc.tiers.objectstore import ObjectStoreTier, ObjectStoreVersions
from kvgrpc.tiers.versions import begin_at, save_at
from tests.tiers.conformance import data, fault_of, object_name, read, write


async def test_a_folder_that_is_away_is_not_new(tmp_path: Path) -> None:
    """Not mounted, most likely: what is made in its place fills another disk, and takes a Clear that goes with it."""
    folder, away = tmp_path / "store", tmp_path / "away"
    tier, place = ObjectStoreTier(folder.as_uri()), ObjectStoreVersions(folder.as_uri())
    object = object_name("a", 64)

    async def nothing_is_made() -> None:
        assert await fault_of(tier, object) is FaultReason.IO
        for call in (write(tier, "a", 64), tier.exists([object.name]), tier.remove(object.name)):
            with pytest.raises(TierFault, match=r"IO.*is not there"):
                await call
        with pytest.raises(OSError, match="is not there"):
            begin_at(place)
        with pytest.raises(OSError, match="is not there"):
            save_at(place, Versions(), Versions(first=3))
        assert not folder.exists()

    await nothing_is_made()
    folder.mkdir()
    begun = begin_at(place)
    await write(tier, "a", 64)
    folder.rename(away)
    await nothing_is_made()
    away.rename(folder)
    assert (begin_at(place), await read(tier, object)) == (begun, data("a", 64))
    await tier.close()
