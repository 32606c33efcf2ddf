# SPDX-License-Identifier: Apache-2.0
"""Slices on their way: to the mover, each client's in their order on its own thread, and their reports back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import structlog

from kvgrpc.core.plans import SKIPPED
from kvgrpc.core.types import RunSlice, SliceReport
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.transfer.base import Mover

log = structlog.get_logger(__name__)


class SliceRunner:
    """``post`` calls a function on the event loop's thread, which all methods belong to."""

    def __init__(self, affinity: AffinityExecutor, mover: Mover, post: Callable[..., None]) -> None:
        self._affinity = affinity
        self._mover = mover
        self._post = post
        self._stopped: dict[str, int] = {}
        """The last slice of a client, where that has stopped early or is under way; its thread writes it."""

    def run(self, work: RunSlice, report: Callable[[RunSlice, SliceReport], None]) -> None:
        """Copies after what the client was given before, then calls ``report`` on the event loop."""
        future = self._affinity.submit(work.client_id, self._copy, work)
        future.add_done_callback(lambda done: self._post(report, work, _report_of(work, done)))

    def _copy(self, work: RunSlice) -> SliceReport:
        skipped = work.after and work.after == self._stopped.get(work.client_id)
        self._stopped[work.client_id] = work.slice_id  # stays if the mover raises
        if skipped:
            return SliceReport(0, SKIPPED)
        report = self._mover.copy(work)
        if report.completed == len(work.pieces):
            del self._stopped[work.client_id]
        return report

    def forget(self, client_id: str) -> None:
        """The client's session has ended, and its last slice before that."""
        self._stopped.pop(client_id, None)


def _report_of(work: RunSlice, done: Future[SliceReport]) -> SliceReport:
    error = done.exception()
    if error is None:
        return done.result()
    log.error("mover failed", slice_id=work.slice_id, client_id=work.client_id, exc_info=error)
    return SliceReport(0, "INTERNAL", torn=True)
