# SPDX-License-Identifier: Apache-2.0
"""The closed list of refusals. The core raises nothing else on purpose; anything else that leaves it is a bug."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a call was refused. The value is the ErrorInfo reason on the wire; ``kvgrpc/status.py`` maps it to a code."""

    # the request is wrong, whatever the state
    INVALID_FIELD = "INVALID_FIELD"
    CLIENT_ID_MISSING = "CLIENT_ID_MISSING"
    CONTENT_KIND = "CONTENT_KIND"
    RANGE = "RANGE"
    BLOCK_IDS = "BLOCK_IDS"
    TP_SIZE_MISMATCH = "TP_SIZE_MISMATCH"
    READER_UNKNOWN = "READER_UNKNOWN"
    RANK = "RANK"
    LAYOUT = "LAYOUT"
    MEMORY = "MEMORY"
    GEOMETRY_MISMATCH = "GEOMETRY_MISMATCH"
    STORED_FORM_MISMATCH = "STORED_FORM_MISMATCH"
    # something named is not there
    ENGINE_UNKNOWN = "ENGINE_UNKNOWN"
    JOB_UNKNOWN = "JOB_UNKNOWN"
    PIN_UNKNOWN = "PIN_UNKNOWN"
    # the state does not allow it
    NOT_ATTACHED = "NOT_ATTACHED"
    NOT_REGISTERED = "NOT_REGISTERED"
    SPACE_UNKNOWN = "SPACE_UNKNOWN"
    SPACE_MISMATCH = "SPACE_MISMATCH"
    JOB_PENDING = "JOB_PENDING"
    HOST_MISMATCH = "HOST_MISMATCH"
    PROTOCOL_VERSION = "PROTOCOL_VERSION"
    MEMORY_OWNER = "MEMORY_OWNER"
    CLIENT_EXISTS = "CLIENT_EXISTS"
    CALL_REVOKED = "CALL_REVOKED"
    CALL_ID_REUSED = "CALL_ID_REUSED"
    # the caller may not
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_ALLOWED = "NOT_ALLOWED"
    # limits
    JOB_LIMIT = "JOB_LIMIT"
    CALL_LIMIT = "CALL_LIMIT"
    CLIENT_LIMIT = "CLIENT_LIMIT"
    SPACE_LIMIT = "SPACE_LIMIT"
    HOLD_LIMIT = "HOLD_LIMIT"
    PIN_LIMIT = "PIN_LIMIT"
    RECORD_LIMIT = "RECORD_LIMIT"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    # not built, or not here
    CUDA_UNSUPPORTED = "CUDA_UNSUPPORTED"
    GROUP_KIND_UNSUPPORTED = "GROUP_KIND_UNSUPPORTED"
    READY_EVENT_UNSUPPORTED = "READY_EVENT_UNSUPPORTED"
    # going away, or out of reach
    CARD_FAILED = "CARD_FAILED"
    ENGINE_DRAINING = "ENGINE_DRAINING"
    SERVER_DRAINING = "SERVER_DRAINING"
    SERVER_UNREACHABLE = "SERVER_UNREACHABLE"
    DEADLINE = "DEADLINE"
    INTERNAL = "INTERNAL"


class Refusal(Exception):  # noqa: N818 - a refusal is an answer by name, not a fault
    """A call that is refused by name.

    ``field`` names the request field at fault (for BadRequest), ``retry_after_ms`` says when trying again makes sense
    (for RetryInfo), ``resource`` names what is missing or used up (for ResourceInfo).
    """

    def __init__(
        self, reason: Reason, message: str, *, field: str = "", retry_after_ms: int | None = None, resource: str = ""
    ) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.resource = resource
