# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker, told the time."""

from __future__ import annotations

from kvgrpc.breaker import Breaker, BreakerSettings, Permit

S = 1_000_000_000


def opened(at_ns: int = 0) -> Breaker:
    breaker = Breaker(BreakerSettings())
    for _ in range(3):
        permit = breaker.admit(at_ns)
        assert permit is not None
        breaker.fail(permit, at_ns)
    assert breaker.is_open
    return breaker


def trial(breaker: Breaker, now_ns: int) -> Permit:
    permit = breaker.admit(now_ns)
    assert permit is not None
    assert permit.trial
    return permit


def test_two_failures_and_a_success_do_not_open_it() -> None:
    breaker = Breaker(BreakerSettings())
    for _ in range(5):
        for _ in range(2):
            breaker.fail(Permit(trial=False), 0)
        assert breaker.admit(0) == Permit(trial=False)
        breaker.succeed()
    assert not breaker.is_open


def test_delays_double_up_to_the_ceiling() -> None:
    breaker, now = opened(), 0
    for delay_s in (1, 2, 4, 8, 16, 30, 30):
        assert breaker.admit(now + delay_s * S - 1) is None
        now += delay_s * S
        breaker.fail(trial(breaker, now), now)
    breaker.retry_now()
    trial(breaker, now)
    breaker.succeed()
    assert not breaker.is_open
    breaker.fail(Permit(trial=False), now)
    assert not breaker.is_open, "it counts from nothing again"


def test_one_trial_at_a_time() -> None:
    breaker = opened()
    permit = trial(breaker, 1 * S)
    assert breaker.admit(100 * S) is None
    breaker.give_up(permit)
    trial(breaker, 100 * S)


def test_late_failures_of_earlier_calls_change_nothing() -> None:
    breaker = opened()
    for _ in range(10):
        breaker.fail(Permit(trial=False), 0)
    trial(breaker, 1 * S)
    breaker.fail(Permit(trial=False), 1 * S)
    assert breaker.admit(2 * S) is None, "the trial is still running"


def test_evidence_lets_one_caller_try_at_once() -> None:
    breaker = opened()
    assert breaker.admit(1) is None
    breaker.retry_now()
    permit = trial(breaker, 1)
    breaker.fail(permit, 1)
    assert breaker.admit(2 * S) is None
    trial(breaker, 2 * S + 1)
