# SPDX-License-Identifier: Apache-2.0
"""Logs: one event a line, for people on a terminal and as JSON anywhere else.

What never appears: token ids, salts and engine ids in clear (a fingerprint stands for them), and values of local
variables in tracebacks. ``REQUEST_ID`` carries the id of the call that a coroutine works for into every line it logs,
``TRACE_ID`` that of its trace, if it is traced.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("auto", "console", "json")

REQUEST_ID: ContextVar[str] = ContextVar("kvgrpc_request_id", default="")
TRACE_ID: ContextVar[str] = ContextVar("kvgrpc_trace_id", default="")

_SECRETS = ("engine_id", "cache_salt")


def logger(name: str) -> FilteringBoundLogger:
    """The log of one part of the program; ``name`` becomes the field ``part``."""
    return structlog.get_logger(part=name)


def fingerprint(secret: str) -> str:
    """What stands for an engine id or a salt: the first 16 hex digits of its SHA-256 (as in AdminService)."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


def _add_ids(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for name, value in (("request_id", REQUEST_ID.get()), ("trace_id", TRACE_ID.get())):
        if value:
            event.setdefault(name, value)
    return event


def _hide_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for name in _SECRETS:
        if event.get(name):
            event[name] = fingerprint(str(event[name]))
    return event


class _Out:
    """A stream whose lines are lost where it takes none: nobody reads the pipe any more, or the disk is full. A line of
    the log must fail no call, and nothing that a call waits for."""

    def __init__(self, stream: TextIO | None) -> None:
        """``stream`` None: the process began without one."""
        self._stream = stream

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()


def configure(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Sets up logging of the whole process: this program's lines and those of libraries, in one form on one stream.

    ``level`` is one of ``LEVELS``; ``form`` one of ``FORMS``, where auto is console on a terminal and JSON elsewhere;
    ``stream`` defaults to stderr, and what that does not take is lost. ValueError names what is unknown.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    if form not in FORMS:
        raise ValueError(f"log format {form!r} is not one of {', '.join(FORMS)}")
    out: Any = _Out(sys.stderr if stream is None else stream)
    terminal = out.isatty()
    console = form == "console" or (form == "auto" and terminal)
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
        _add_ids,
        _hide_secrets,
    ]
    last: list[Processor]
    if console:
        # the default formatter of the console prints local variables, which hold prompts and secrets
        last = [structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    _adopt_libraries(level, shared, last, out)


def _adopt_libraries(level: str, shared: list[Processor], last: list[Processor], out: TextIO) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
    )
    target = logging.StreamHandler(out)
    target.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [target]
    # libraries talk at length about every connection below this
    root.setLevel(logging.ERROR if level == "error" else logging.WARNING)
