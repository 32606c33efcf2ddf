# SPDX-License-Identifier: Apache-2.0
"""Server reflection, so that grpcurl needs no proto files: v1, and v1alpha for older tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def reflection_handlers(services: Sequence[str]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Both versions over one servicer (their messages are equal on the wire), listing ``services`` and themselves."""
    library: Any = reflection
    servicer: Any = library.aio.ReflectionServicer((*services, *REFLECTION_SERVICES))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in REFLECTION_SERVICES
    )
