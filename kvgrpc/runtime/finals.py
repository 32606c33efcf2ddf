# SPDX-License-Identifier: Apache-2.0
"""How a lookup ended."""

from __future__ import annotations

from kvgrpc.core.types import PrefetchStatus
from kvgrpc.runtime.driver import Driver

LOOK_MS = 10_000


async def final_status(driver: Driver, job_id: bytes) -> PrefetchStatus | None:
    """The final status of a lookup, as soon as it has one; None when it went without. On the driver's loop only."""
    while (job := driver.book.jobs.jobs.get(job_id)) is not None:
        if job.status.done:
            return job.status
        await driver.wait_job(job_id, LOOK_MS)
    return None
