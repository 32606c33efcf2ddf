# SPDX-License-Identifier: Apache-2.0
"""AdminService over the operator's interface: decode, await, encode. Refusals pass through to the guard."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

from kvgrpc.api import AdminApi
from kvgrpc.service.traffic import Traffic, until_closed
from kvgrpc.v1 import admin_pb2, admin_pb2_grpc
from kvgrpc.wire import admin as wire
from kvgrpc.wire.content import decode_write_policy_request, encode_write_policy


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Looks at and changes the cache as a whole."""

    def __init__(self, admin: AdminApi, traffic: Traffic) -> None:
        self._admin = admin
        self._traffic = traffic

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: object) -> admin_pb2.GetStatusResponse:
        status = await self._admin.get_status()
        draining = status.draining or self._traffic.draining.is_set()
        return wire.encode_server_status(dataclasses.replace(status, draining=draining))

    async def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: object
    ) -> admin_pb2.ListEnginesResponse:
        return wire.encode_engines(await self._admin.list_engines())

    async def ListSpaces(self, request: admin_pb2.ListSpacesRequest, context: object) -> admin_pb2.ListSpacesResponse:
        return wire.encode_spaces(await self._admin.list_spaces())

    async def Clear(self, request: admin_pb2.ClearRequest, context: object) -> admin_pb2.ClearResponse:
        return wire.encode_clear_response(await self._admin.clear(wire.decode_clear_request(request)))

    async def BumpGeneration(
        self, request: admin_pb2.BumpGenerationRequest, context: object
    ) -> admin_pb2.BumpGenerationResponse:
        model, space_base = wire.decode_bump_request(request)
        return wire.encode_bump_response(await self._admin.bump_generation(model=model, space_base=space_base))

    async def Pin(self, request: admin_pb2.PinRequest, context: object) -> admin_pb2.PinResponse:
        return wire.encode_pin_response(await self._admin.pin(*wire.decode_pin_request(request)))

    async def Warm(self, request: admin_pb2.WarmRequest, context: object) -> admin_pb2.WarmResponse:
        return wire.encode_warm_response(await self._admin.warm(*wire.decode_warm_request(request)))

    async def Inspect(self, request: admin_pb2.InspectRequest, context: object) -> admin_pb2.InspectResponse:
        return wire.encode_inspect_response(await self._admin.inspect(*wire.decode_inspect_request(request)))

    async def RecordTrace(
        self, request: admin_pb2.RecordTraceRequest, context: object
    ) -> AsyncGenerator[admin_pb2.RecordTraceResponse, None]:
        calls = until_closed(self._admin.record_trace(), self._traffic)
        try:
            async for some in calls:
                yield wire.encode_traced_calls(some)
        finally:
            await calls.aclose()

    async def Unpin(self, request: admin_pb2.UnpinRequest, context: object) -> admin_pb2.UnpinResponse:
        released_chunks = await self._admin.unpin(wire.decode_unpin_request(request))
        return admin_pb2.UnpinResponse(released_chunks=released_chunks)

    async def SetQuota(self, request: admin_pb2.SetQuotaRequest, context: object) -> admin_pb2.SetQuotaResponse:
        quota = await self._admin.set_quota(*wire.decode_set_quota_request(request))
        return admin_pb2.SetQuotaResponse(size_bytes=quota.size_bytes or 0, used_bytes=quota.used_bytes)

    async def GetQuota(self, request: admin_pb2.GetQuotaRequest, context: object) -> admin_pb2.GetQuotaResponse:
        quota = await self._admin.get_quota(wire.decode_get_quota_request(request))
        return admin_pb2.GetQuotaResponse(size_bytes=quota.size_bytes or 0, used_bytes=quota.used_bytes)

    async def SetWritePolicy(
        self, request: admin_pb2.SetWritePolicyRequest, context: object
    ) -> admin_pb2.SetWritePolicyResponse:
        policy = await self._admin.set_write_policy(*decode_write_policy_request(request))
        return admin_pb2.SetWritePolicyResponse(policy=encode_write_policy(policy))

    async def DrainEngine(
        self, request: admin_pb2.DrainEngineRequest, context: object
    ) -> admin_pb2.DrainEngineResponse:
        drained = await self._admin.drain_engine(*wire.decode_drain_request(request))
        return admin_pb2.DrainEngineResponse(drained=drained)
