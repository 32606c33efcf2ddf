# SPDX-License-Identifier: Apache-2.0
"""Slices on their way: to the mover, each client's in their order on its own thread, and their reports back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

import structlog

from kvgrpc.core.slicing import SKIPPED
from kvgrpc.core.types import RunSlice, SliceReport
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.transfer.base import Flight, LaunchingMover, Mover

log = structlog.get_logger(__name__)


class SliceRunner:
    """``post`` calls a function on the event loop's thread, which all methods belong to.

    Where the mover launches, a client's first thread launches slice after slice and its second one waits for them.
    """

    def __init__(self, affinity: AffinityExecutor, mover: Mover, post: Callable[..., None]) -> None:
        self._affinity = affinity
        self._mover = mover
        self._launch = mover.launch if isinstance(mover, LaunchingMover) else mover.copy
        self._post = post
        self._stopped: dict[str, int] = {}
        """The last slice of a client, while that is begun and if it stopped early then; its first thread writes it."""
        self._failed: dict[str, int] = {}
        """The last slice of a client, where that was launched in vain; its second thread writes it."""
        self._given: dict[str, int] = {}
        """How many slices its second thread was given."""
        self._landed: dict[str, int] = {}
        """How many of them were reported; the event loop writes it, which may ``forget`` the client with a report."""

    def launches(self, work: RunSlice) -> bool:
        """Whether the slice runs by itself once it is launched."""
        return isinstance(self._mover, LaunchingMover) and self._mover.launches(work.mapping_id)

    def run(
        self, work: RunSlice, report: Callable[[RunSlice, SliceReport], None], launched: Callable[[RunSlice], None]
    ) -> None:
        """Copies after what the client was given before, then calls ``report`` on the event loop; before that
        ``launched``, if it runs by itself and does so now."""
        began = self._affinity.submit(work.client_id, self._begin, work)
        began.add_done_callback(lambda done: self._go_on(work, done, report, launched))

    def _begin(self, work: RunSlice) -> Flight | SliceReport:
        client = work.client_id
        skipped = work.after and work.after in (self._stopped.get(client), self._failed.get(client))
        self._stopped[client] = work.slice_id  # stays if the mover raises
        if skipped:
            return SliceReport(0, SKIPPED)
        begun = self._launch(work)
        if not isinstance(begun, SliceReport) or begun.completed == len(work.pieces):
            del self._stopped[client]
        return begun

    def _go_on(
        self,
        work: RunSlice,
        done: Future[Flight | SliceReport],
        report: Callable[[RunSlice, SliceReport], None],
        launched: Callable[[RunSlice], None],
    ) -> None:
        """On the first thread, so in the order of launches; nothing is reported before what is still waited for."""
        client = work.client_id
        ended = done.exception() is not None or isinstance(done.result(), SliceReport)
        if ended and self._given.get(client, 0) == self._landed.get(client, 0):
            self._post(report, work, _report_of(work, cast("Future[SliceReport]", done)))
            return
        if not ended:
            self._post(launched, work)
        self._given[client] = self._given.get(client, 0) + 1
        waited = self._affinity.submit_wait(client, self._end, work, done)
        waited.add_done_callback(lambda landed: self._post(self._land, work, _report_of(work, landed), report))

    def _land(self, work: RunSlice, ended: SliceReport, report: Callable[[RunSlice, SliceReport], None]) -> None:
        """On the event loop: what the first thread posts from here on comes behind this."""
        self._landed[work.client_id] = self._landed.get(work.client_id, 0) + 1
        report(work, ended)

    def _end(self, work: RunSlice, launched: Future[Flight | SliceReport]) -> SliceReport:
        """Raises what the launch raised."""
        begun = launched.result()
        report = begun if isinstance(begun, SliceReport) else begun.wait()
        if work.after and work.after == self._failed.get(work.client_id):
            report = SliceReport(0, SKIPPED)
        if report.completed < len(work.pieces):
            self._failed[work.client_id] = work.slice_id
        return report

    def forget(self, client_id: str) -> None:
        """The client's session has ended, and its last slice before that."""
        for kept in (self._stopped, self._failed, self._given, self._landed):
            kept.pop(client_id, None)


def _report_of(work: RunSlice, done: Future[SliceReport]) -> SliceReport:
    error = done.exception()
    if error is None:
        return done.result()
    log.error("mover failed", slice_id=work.slice_id, client_id=work.client_id, exc_info=error)
    return SliceReport(0, "INTERNAL", torn=len(work.pieces))
