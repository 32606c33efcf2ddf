# SPDX-License-Identifier: Apache-2.0
"""The connector of vLLM; docs/engines/vllm.md is the manual. Only ``connector`` imports vLLM."""

from __future__ import annotations

MODULE = "kvgrpc.engines.vllm.connector"
CLASS = "KvgrpcConnector"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: makes the connector known by its name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # pyright: ignore

    KVConnectorFactory.register_connector(CLASS, MODULE, CLASS)  # pyright: ignore
