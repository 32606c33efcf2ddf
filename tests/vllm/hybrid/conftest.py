# SPDX-License-Identifier: Apache-2.0
"""The hybrid of this folder: windows and full attention, as Gemma 3, in steps shorter than prompts."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: Any) -> str:
    from tests.vllm.models import make_gemma3

    return str(make_gemma3(tmp_path_factory.mktemp("gemma3")))


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    return {"max_num_batched_tokens": 256}
