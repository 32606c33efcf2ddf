# SPDX-License-Identifier: Apache-2.0
"""One server and one engine for all tests that do not kill either. Run by `make test-vllm`, in an environment with
vLLM; elsewhere these files are not looked at. `make gpu-vllm` runs them on a card."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.served import Served, serving

if TYPE_CHECKING:
    from tests.vllm.bench import Bench

collect_ignore_glob = ["hybrid/*"] if importlib.util.find_spec("vllm") else ["*"]
"""A process has one engine: files of hybrid/ are run one by one, by their names."""

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
)
os.environ.pop("PYTHONHASHSEED", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting an engine of several processes takes minutes on a machine that others use, too."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: Any) -> str:
    from tests.vllm.models import make_llama

    return str(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def model(llama: str) -> str:
    return llama


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """Of the shared engine."""
    return {}


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Chunks of two blocks."""
    with serving("--chunk-tokens", "64", "--l1-size", "256MiB") as server:
        yield server


@pytest.fixture(scope="session")
def shared_bench(model: str, served: Served, options: dict[str, Any]) -> Iterator[Bench]:
    from tests.vllm.bench import Bench

    bench = Bench(model, served, **options)
    yield bench
    bench.engine.close()


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    """The shared engine and server, both empty; at the end nothing may be left over in either."""
    shared_bench.wipe()
    yield shared_bench
    shared_bench.check_nothing_left()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
