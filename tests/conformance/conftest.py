# SPDX-License-Identifier: Apache-2.0
"""Every test of the suite runs in every place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conformance.engine import Engine
from tests.conformance.places import PLACES, Place, server_process


@pytest.fixture(scope="session")
def addresses() -> Iterator[dict[str, str]]:
    with server_process() as found:
        yield found


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    needs, make = PLACES[request.param]
    address = request.getfixturevalue("addresses")[needs] if needs else ""
    async with make(address) as found:
        yield found


@pytest.fixture
async def engine(place: Place) -> AsyncIterator[Engine]:
    """One worker and one scheduler, attached and registered."""
    async with Engine(place) as found:
        yield found
