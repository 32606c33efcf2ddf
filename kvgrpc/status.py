# SPDX-License-Identifier: Apache-2.0
"""Refusals on the wire: one table from reasons to gRPC codes, and rich errors both ways (AIP-193)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs] - it has none

from kvgrpc.core.errors import Reason, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

DOMAIN = "kvgrpc.dev"
DETAILS_KEY = "grpc-status-details-bin"

_C = grpc.StatusCode

REASON_CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: _C.INVALID_ARGUMENT,
    Reason.CLIENT_ID_MISSING: _C.INVALID_ARGUMENT,
    Reason.CONTENT_KIND: _C.INVALID_ARGUMENT,
    Reason.RANGE: _C.INVALID_ARGUMENT,
    Reason.BLOCK_IDS: _C.INVALID_ARGUMENT,
    Reason.TP_SIZE_MISMATCH: _C.INVALID_ARGUMENT,
    Reason.READER_UNKNOWN: _C.INVALID_ARGUMENT,
    Reason.RANK: _C.INVALID_ARGUMENT,
    Reason.LAYOUT: _C.INVALID_ARGUMENT,
    Reason.MEMORY: _C.INVALID_ARGUMENT,
    Reason.GEOMETRY_MISMATCH: _C.INVALID_ARGUMENT,
    Reason.STORED_FORM_MISMATCH: _C.INVALID_ARGUMENT,
    Reason.ENGINE_UNKNOWN: _C.NOT_FOUND,
    Reason.JOB_UNKNOWN: _C.NOT_FOUND,
    Reason.PIN_UNKNOWN: _C.NOT_FOUND,
    Reason.NOT_ATTACHED: _C.FAILED_PRECONDITION,
    Reason.NOT_REGISTERED: _C.FAILED_PRECONDITION,
    Reason.SPACE_UNKNOWN: _C.FAILED_PRECONDITION,
    Reason.SPACE_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.JOB_PENDING: _C.FAILED_PRECONDITION,
    Reason.HOST_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.PROTOCOL_VERSION: _C.FAILED_PRECONDITION,
    Reason.MEMORY_OWNER: _C.PERMISSION_DENIED,
    Reason.CLIENT_EXISTS: _C.ALREADY_EXISTS,
    Reason.CALL_REVOKED: _C.ABORTED,
    Reason.CALL_ID_REUSED: _C.INVALID_ARGUMENT,
    Reason.UNAUTHENTICATED: _C.UNAUTHENTICATED,
    Reason.NOT_ALLOWED: _C.PERMISSION_DENIED,
    Reason.JOB_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.CALL_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.CLIENT_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.SPACE_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.HOLD_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.PIN_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.RECORD_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.MESSAGE_TOO_LARGE: _C.RESOURCE_EXHAUSTED,
    Reason.CUDA_UNSUPPORTED: _C.UNIMPLEMENTED,
    Reason.CARD_FAILED: _C.UNAVAILABLE,
    Reason.GROUP_KIND_UNSUPPORTED: _C.UNIMPLEMENTED,
    Reason.READY_EVENT_UNSUPPORTED: _C.UNIMPLEMENTED,
    Reason.ENGINE_DRAINING: _C.UNAVAILABLE,
    Reason.SERVER_DRAINING: _C.UNAVAILABLE,
    Reason.SERVER_UNREACHABLE: _C.UNAVAILABLE,
    Reason.DEADLINE: _C.DEADLINE_EXCEEDED,
    Reason.INTERNAL: _C.INTERNAL,
}

_CODE_REASONS: dict[grpc.StatusCode, Reason] = {
    _C.UNAVAILABLE: Reason.SERVER_UNREACHABLE,
    _C.DEADLINE_EXCEEDED: Reason.DEADLINE,
    _C.CANCELLED: Reason.CALL_REVOKED,
    _C.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
}
"""What an error without our details means: gRPC itself makes these."""


def rich_status(refusal: Refusal) -> status_pb2.Status:
    """The google.rpc.Status of a refusal: one ErrorInfo, and the details that it has, each type at most once."""
    details: list[any_pb2.Any] = []

    def add(detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | object) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=refusal.reason.value, domain=DOMAIN))
    if refusal.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=refusal.message)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(refusal.retry_after_ms)
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    if refusal.resource:
        add(error_details_pb2.ResourceInfo(resource_name=refusal.resource, description=refusal.message))
    code: int = REASON_CODES[refusal.reason].value[0]
    return status_pb2.Status(code=code, message=refusal.message, details=details)


def _refusal_from_details(raw: bytes) -> Refusal | None:
    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        return None
    reason: Reason | None = None
    field = resource = ""
    retry_after_ms: int | None = None
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        missing = error_details_pb2.ResourceInfo()
        if packed.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            reason = Reason[info.reason]
        elif packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif packed.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
        elif packed.Unpack(missing):
            resource = missing.resource_name
    if reason is None:
        return None
    return Refusal(reason, status.message, field=field, retry_after_ms=retry_after_ms, resource=resource)


def refusal_from_status(
    code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> Refusal:
    """The refusal behind a failed call. Errors that gRPC itself made become SERVER_UNREACHABLE, DEADLINE, CALL_REVOKED
    or MESSAGE_TOO_LARGE; anything else of a foreign or newer server becomes INTERNAL with its code and message."""
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            refusal = _refusal_from_details(value)
            if refusal is not None:
                return refusal
    reason = _CODE_REASONS.get(code, Reason.INTERNAL)
    return Refusal(reason, f"{code.name}: {message or ''}".rstrip(": "))
