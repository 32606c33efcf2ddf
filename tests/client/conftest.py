# SPDX-License-Identifier: Apache-2.0
"""Clients under test, and servers to use them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import LookupBounds, SchedulerClient, SchedulerOptions, WorkerClient, WorkerOptions
from tests.client.fakes import ENGINE, IDENTITY, FakeServer, short_folder
from tests.client.memory import register_request

MakeScheduler = Callable[..., SchedulerClient]
MakeWorker = Callable[..., WorkerClient]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def server(folder: Path) -> Iterator[FakeServer]:
    """Not started yet."""
    fake = FakeServer(folder)
    yield fake
    fake.stop()


@pytest.fixture
def make_scheduler() -> Iterator[MakeScheduler]:
    made: list[SchedulerClient] = []

    def make(address: str, **options: Any) -> SchedulerClient:
        patient = {"bounds": LookupBounds(answer_s=20), **options}  # who tests bounds names them
        client = SchedulerClient(address, ENGINE, IDENTITY, SchedulerOptions(**patient))
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    made: list[WorkerClient] = []

    def make(address: str, **options: Any) -> WorkerClient:
        client = WorkerClient(address, register_request(), WorkerOptions(**options))
        made.append(client)
        return client

    yield make
    for client in made:
        client.close(timeout_s=0.2)
