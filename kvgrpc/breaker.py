# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker, of clients and of tiers: after some failures in a row, ask only now and then.

closed -- failures in a row reach the limit --> open -- its delay is over, one caller may try --> trying
trying -- success --> closed;  trying -- failure --> open, with twice the delay up to the ceiling
"""

from __future__ import annotations

from dataclasses import dataclass

S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Defaults are the design's."""

    failures: int = 3
    first_delay_ns: int = 1 * S
    longest_delay_ns: int = 30 * S


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call; whoever got it reports how the call went. ``trial``: the breaker was open."""

    trial: bool


class Breaker:
    """Told the time and what happened, says whether to ask. No clock, no threads: one owner calls it."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._delay_ns = 0
        self._retry_at_ns = 0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """True from the opening until a success."""
        return self._delay_ns > 0

    def admit(self, now_ns: int) -> Permit | None:
        """Leave to call, or None. While open, one caller at a time gets it, and only when the delay is over."""
        if not self._delay_ns:
            return Permit(trial=False)
        if self._trying or now_ns < self._retry_at_ns:
            return None
        self._trying = True
        return Permit(trial=True)

    def succeed(self) -> None:
        """A call was answered."""
        self._failures = 0
        self._delay_ns = 0
        self._trying = False

    def fail(self, permit: Permit, now_ns: int) -> None:
        """A call was not answered, or by an internal error. Late reports of earlier calls change nothing."""
        if permit.trial:
            self._open(now_ns, min(self._delay_ns * 2, self._settings.longest_delay_ns))
        elif not self._delay_ns:
            self._failures += 1
            if self._failures >= self._settings.failures:
                self._open(now_ns, self._settings.first_delay_ns)

    def give_up(self, permit: Permit) -> None:
        """The call ended without telling anything about the server."""
        if permit.trial:
            self._trying = False

    def retry_now(self) -> None:
        """There is evidence that the server is back: the next caller may try."""
        self._retry_at_ns = 0

    def _open(self, now_ns: int, delay_ns: int) -> None:
        self._trying = False
        self._delay_ns = delay_ns
        self._retry_at_ns = now_ns + delay_ns
