# SPDX-License-Identifier: Apache-2.0
"""Any connector of vLLM's, timed in its scheduler hooks. Runs in the vLLM environment.

``KVGRPC_BENCH_CONNECTOR`` is module:class of the connector, ``KVGRPC_BENCH_TIMES`` the file that gets, for each request
that ended, a line of JSON: prompt tokens, nanoseconds inside on_new_request and get_num_new_matched_tokens together,
and how often the latter was asked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_module, _, _name = os.environ["KVGRPC_BENCH_CONNECTOR"].partition(":")
_Connector: Any = getattr(import_module(_module), _name)


class Timed(_Connector):  # type: ignore[misc]
    """What the named connector is, and does."""

    _spent: dict[str, list[int]]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._spent = {}

    def _timed(self, request: Any, asked: int, call: Callable[[], T]) -> T:
        began = time.perf_counter_ns()
        answer = call()
        taken = time.perf_counter_ns() - began
        spent = self._spent.setdefault(request.request_id, [0, 0])
        spent[0] += taken
        spent[1] += asked
        return answer

    def on_new_request(self, request: Any) -> None:
        self._timed(request, 0, lambda: super(Timed, self).on_new_request(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        parent = super().get_num_new_matched_tokens
        return self._timed(request, 1, lambda: parent(request, num_computed_tokens))

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._tell(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._tell(request)
        return super().request_finished_all_groups(request, block_ids)

    def _tell(self, request: Any) -> None:
        spent = self._spent.pop(request.request_id, None)
        if spent is None:
            return
        with Path(os.environ["KVGRPC_BENCH_TIMES"]).open("a") as file:
            file.write(json.dumps({"tokens": request.num_prompt_tokens, "ns": spent[0], "asked": spent[1]}) + "\n")
