# SPDX-License-Identifier: Apache-2.0
"""Saves of the versions of spaces to where they outlive the server, one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kvgrpc.core.errors import Reason, Refusal

if TYPE_CHECKING:
    from kvgrpc.runtime.driver import Driver

log = structlog.get_logger(__name__)


class Saves:
    """Those of a driver. Lives on its loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._saving = asyncio.Lock()
        self._saved = driver.book.versions.snapshot()

    async def save(self) -> None:
        """Returns when what was cleared will stay so after a restart. Refuses: STATE_UNSAVED.

        Whoever is cancelled meanwhile leaves the save to itself: its thread goes on, and one that nobody waited for
        might end behind the next one, and put back what was there before that.
        """
        saving = asyncio.ensure_future(self._save())
        saving.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody is left to tell
        await asyncio.shield(saving)

    async def _save(self) -> None:
        driver = self._driver
        async with self._saving:
            before, after, save = self._saved, driver.book.versions.snapshot(), driver.hands.save_versions
            if save is None or after == before:
                return
            try:
                await asyncio.get_running_loop().run_in_executor(driver.hands.cpu_pool, save, before, after)
            except OSError as error:
                log.warning("versions of spaces were not saved", reason=str(error))
                text = f"it is cleared, but not for lower tiers after a restart ({error.strerror}); do it again"
                raise Refusal(Reason.STATE_UNSAVED, text, retry_after_ms=1000) from error
            self._saved = after

    async def close(self) -> None:
        """Returns when nothing is saved any more."""
        async with self._saving:
            pass
