# SPDX-License-Identifier: Apache-2.0
"""The deadline of calls that bring none."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal

if TYPE_CHECKING:
    from types import TracebackType


class Deadline:
    """Cancels the task inside the ``async with`` after ``seconds`` and turns that into DEADLINE; None = never.

    Unlike ``asyncio.wait_for`` it makes no second task, so a call costs no more for having a deadline.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._expired = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._seconds is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        assert self._task is not None
        self._expired = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._expired or self._task is None:
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise Refusal(
                Reason.DEADLINE,
                f"the call took longer than the server's default of {self._seconds:g} s; set a deadline to wait longer",
            ) from None
