# SPDX-License-Identifier: Apache-2.0
"""The background thread of a blocking client: one event loop that owns the channel and all that hangs on it.

Thread rule: ``run``, ``submit``, ``post`` and ``stop`` may be called from any thread but the loop's own; everything
that they are given runs on the loop's thread, in the order in which it was handed over, and nothing else touches what
lives there. What was handed over before ``stop`` has begun is begun, and then cancelled; what comes later is refused.
So nobody waits for what never runs.

``post`` costs its caller, an engine's main thread, a few microseconds. To wake an event loop is a system call that
gives the interpreter lock away, and the caller would have it back when the loop has done its work, or after the
interpreter's switch interval. So a second thread wakes the loop, as soon as the caller waits for something by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from kvgrpc.client.fork import ForkedProcessError, claim_process

T = TypeVar("T")

STOP_S = 5.0


class LoopThread:
    """Starts at its first use. A daemon: it never keeps a process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._posted: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finalizer may call in while its thread holds it
        self._stopped = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine. Raises ForkedProcessError in a forked child, RuntimeError after stop."""
        try:
            self.check_process()
            with self._lock:
                loop = self._running()
                loop.call_soon_threadsafe(self._do_posted)
                return asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for it; if the caller is interrupted, the coroutine is cancelled.

        RuntimeError also when the loop is stopped meanwhile.
        """
        try:
            self.check_thread()
        except RuntimeError:
            work.close()
            raise
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the client was closed meanwhile") from None
        finally:
            future.cancel()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Calls a function on the loop's thread, in the order of the posts. Does not wake it: see above."""
        self.check_process()
        with self._lock:
            self._running()
            self._posted.append((callback, args))
            self._bell.put(True)

    def check(self) -> None:
        """Raises ForkedProcessError in a forked child, RuntimeError after stop."""
        self.check_process()
        if self._loop is None:
            with self._lock:
                self._running()

    @property
    def has_started(self) -> bool:
        return self._loop is not None

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the thread the parent's."""
        return self._pid not in (0, os.getpid())

    def stop(self) -> None:
        """Cancels what still runs and ends the thread. Harmless when repeated, and in a forked child."""
        if self.is_inherited:
            return
        with self._lock:
            self._stopped = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is None or thread is None:
                return
            self._bell.put(False)
            loop.call_soon_threadsafe(self._end, loop)
        thread.join(STOP_S)

    def check_process(self) -> None:
        """Raises ForkedProcessError in a forked child. Call it before any lock is taken: a thread of the parent may
        have held that when the child was forked."""
        if self.is_inherited:
            claim_process()
            raise ForkedProcessError("this client was made in another process; make one in this process")

    def check_thread(self) -> None:
        """Raises RuntimeError on the loop's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of this client's futures must not wait for the client")

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop; under the lock only."""
        if self._stopped:
            raise RuntimeError("the client is closed")
        if self._loop is None:
            claim_process()
            self._pid = os.getpid()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            ringing = threading.Thread(target=self._ring, args=(self._loop,), name=f"{self._name}-bell", daemon=True)
            ringing.start()
        return self._loop

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._bell.get():
            with contextlib.suppress(RuntimeError):  # it has been stopped, and had done what was posted
                loop.call_soon_threadsafe(self._do_posted)

    def _do_posted(self) -> None:
        loop = asyncio.get_running_loop()
        while self._posted:
            callback, args = self._posted.popleft()
            loop.call_soon(callback, *args)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._do_posted()
        loop.call_soon(loop.stop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(_report)
        try:
            loop.run_forever()
        finally:
            end = loop.time() + STOP_S
            while (left := asyncio.all_tasks(loop)) and loop.time() < end:
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=end - loop.time()))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As usual, but for what grpc.aio says when several loops of a process wait for its one poller: the event is there
    for all, and whoever comes second finds nothing to read; or it was for a client that has been closed. Nothing is
    lost."""
    error = context.get("exception")
    of_closed_client = isinstance(error, RuntimeError) and error.args == ("Event loop is closed",)
    if not (of_closed_client or isinstance(error, BlockingIOError)):
        loop.default_exception_handler(context)
