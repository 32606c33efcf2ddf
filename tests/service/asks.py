# SPDX-License-Identifier: Apache-2.0
"""Requests that are well formed, and what tests look at in errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvgrpc.v1 import cache_pb2, common_pb2, engine_pb2
from tests.service.conftest import ENGINE

JOB = b"j" * 16
SPACE = common_pb2.SpaceRef(space_base=b"s" * 16)


def tokens(count: int) -> common_pb2.Content:
    return common_pb2.Content(tokens=common_pb2.TokenIds(ids=range(count)))


def lookup(**fields: Any) -> cache_pb2.LookupRequest:
    return cache_pb2.LookupRequest(
        **{"engine_id": ENGINE, "request_id": "r", "space": SPACE, "content": tokens(512), "tp_size": 1, **fields}
    )


def store(**fields: Any) -> cache_pb2.StoreRequest:
    blocks = [cache_pb2.BlockIds(ids=range(32))]
    return cache_pb2.StoreRequest(
        **{"engine_id": ENGINE, "call_id": 1, "space": SPACE, "content": tokens(512), "blocks": blocks, **fields}
    )


def retrieve(**fields: Any) -> cache_pb2.RetrieveRequest:
    return cache_pb2.RetrieveRequest(
        **{
            "engine_id": ENGINE,
            "call_id": 2,
            "job_id": JOB,
            "range": common_pb2.TokenRange(start=0, end=512),
            "blocks": [cache_pb2.BlockIds(ids=range(32))],
            **fields,
        }
    )


def query(wait_ms: int = 0) -> cache_pb2.QueryPrefetchStatusRequest:
    return cache_pb2.QueryPrefetchStatusRequest(engine_id=ENGINE, job_id=JOB, wait_ms=wait_ms)


def free() -> cache_pb2.FreeLookupLocksRequest:
    return cache_pb2.FreeLookupLocksRequest(engine_id=ENGINE, job_id=JOB, tp_size=1)


def end_request() -> cache_pb2.EndRequestRequest:
    return cache_pb2.EndRequestRequest(engine_id=ENGINE, request_id="r")


def fence() -> cache_pb2.FenceRequest:
    return cache_pb2.FenceRequest(engine_id=ENGINE, call_ids=[1])


def attach(session: bytes = b"t" * 16) -> engine_pb2.AttachRequest:
    return engine_pb2.AttachRequest(engine_id=ENGINE, role=engine_pb2.CLIENT_ROLE_WORKER, session_id=session)


async def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true in time"
        await asyncio.sleep(0.005)


class Details:
    """The rich status of a failed call: exactly one ErrorInfo, each other detail at most once."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.text = error.details() or ""
        trailers = dict(error.trailing_metadata() or ())
        self.request_id = trailers.get("kvgrpc-request-id")
        raw = trailers["grpc-status-details-bin"]
        assert isinstance(raw, bytes)
        self.status = status_pb2.Status.FromString(raw)
        assert self.status.code == self.code.value[0]
        assert self.status.message == self.text
        names = [packed.TypeName() for packed in self.status.details]
        assert names.count("google.rpc.ErrorInfo") == 1
        assert len(names) == len(set(names))
        info = self._get(error_details_pb2.ErrorInfo())
        assert info is not None
        assert info.domain == "kvgrpc.dev"
        self.reason: str = info.reason
        self.bad_request = self._get(error_details_pb2.BadRequest())
        self.retry = self._get(error_details_pb2.RetryInfo())
        self.resource = self._get(error_details_pb2.ResourceInfo())

    def _get(self, message: Any) -> Any:
        for packed in self.status.details:
            if packed.Unpack(message):
                return message
        return None


async def refused(call: Awaitable[Any]) -> Details:
    """The details of a call that must fail with ours."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return Details(error)
    raise AssertionError(f"it was answered: {answer}")
