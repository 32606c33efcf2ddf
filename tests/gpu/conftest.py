# SPDX-License-Identifier: Apache-2.0
"""Tests on a real card: `make gpu`. Deselected elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgrpc.transfer.arena import Arena
from tests.cards.engines import EngineProcess, engine_process


@pytest.fixture(scope="session")
def source() -> Iterator[EngineProcess]:
    """An engine whose blocks are stored."""
    with engine_process("cuda") as engine:
        yield engine


@pytest.fixture(scope="session")
def target() -> Iterator[EngineProcess]:
    """Another one, which loads them."""
    with engine_process("cuda") as engine:
        yield engine


@pytest.fixture(scope="session")
def arena() -> Iterator[Arena]:
    arena = Arena(64 << 20)
    yield arena
    arena.close()
