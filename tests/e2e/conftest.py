# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests make many calls; a line of log for each would cost more than the calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(scope="package", autouse=True)
def warnings_only() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()
