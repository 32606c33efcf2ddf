# SPDX-License-Identifier: Apache-2.0
"""A card as the benchmark's engine uses it: memory, and copies between it and pinned memory, by the driver alone."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from kvgrpc import api
from kvgrpc.bench.processes import BenchError
from kvgrpc.core.types import Direction
from kvgrpc.transfer import device

PIECE_BYTES = 64 << 20
CEILING_BYTES = 1 << 30
FILL = 0x5A17C3E9
WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ"""
WITHOUT_TIMING, BETWEEN_PROCESSES = 2, 4
"""CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS"""
COMPUTE_MODE = 20
"""CU_DEVICE_ATTRIBUTE_COMPUTE_MODE"""


def compute_mode(ordinal: int) -> int:
    """CUcomputemode: 0 default, 2 prohibited, 3 exclusive process. Opens no card; ``device.cards`` came before."""
    mode = ctypes.c_int()
    if result := ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, ordinal):
        raise BenchError(f"cuDeviceGetAttribute answered {result}")
    return mode.value


class CardEngine:
    """A card, in this process."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            cards = device.cards()
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except (RuntimeError, OSError) as error:
            raise BenchError(str(error)) from None
        if len(cards) <= ordinal:
            raise BenchError(f"the driver shows {len(cards)} cards")
        self._ordinal, self.uuid, self.name, _ = cards[ordinal]
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxSetCurrent", context)
        self._streams = [ctypes.c_void_p() for _ in Direction]
        for stream in self._streams:
            self._call("cuStreamCreate", ctypes.byref(stream), 1)
        self._host = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(self._host), ctypes.c_size_t(2 * PIECE_BYTES), 1)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            raise BenchError(f"{name} answered {result}")

    @property
    def driver(self) -> str:
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def event_handle(self) -> bytes:
        """Of a new event that other processes may open."""
        event, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        self._call("cuEventCreate", ctypes.byref(event), WITHOUT_TIMING | BETWEEN_PROCESSES)
        self._call("cuIpcGetEventHandle", handle, event)
        return handle.raw

    @contextmanager
    def memory(self, size_bytes: int) -> Generator[int, None, None]:
        """Address of memory that holds something."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        try:
            self._call("cuMemsetD32_v2", pointer, FILL, ctypes.c_size_t(size_bytes // 4))
            self._call("cuCtxSynchronize")
            yield pointer.value
        finally:
            self._call("cuMemFree_v2", pointer)

    def share(self, pointer: int, size_bytes: int) -> api.CudaIpcMemory:
        handle, uuid, offset, _ = device.export_memory(pointer)
        return api.CudaIpcMemory(handle, uuid, offset, size_bytes)

    @contextmanager
    def awaiting_word(self, pointer: int) -> Generator[Callable[[], float], None, None]:
        """From here on, until the first word there is what ``memory`` fills with again: it is overwritten at once. What
        comes gives the seconds that this took, by the card's own clock, once somebody has written there."""
        stream = self._streams[0]
        word, value = ctypes.c_uint64(pointer), ctypes.c_uint32(FILL)
        began, ended = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuMemsetD32_v2", word, 0, ctypes.c_size_t(1))
        self._call("cuCtxSynchronize")
        for event in (began, ended):
            self._call("cuEventCreate", ctypes.byref(event), 0)

        def seconds() -> float:
            took = ctypes.c_float()
            self._call("cuEventSynchronize", ended)
            self._call("cuEventElapsedTime", ctypes.byref(took), began, ended)
            return took.value / 1e3

        try:
            self._call("cuEventRecord", began, stream)
            self._call("cuStreamWaitValue32_v2", stream, word, value, WAIT_EQUAL)
            self._call("cuEventRecord", ended, stream)
            yield seconds
        finally:  # nobody waits for ever, whatever became of the copy
            self._call("cuMemsetD32Async", word, value, ctypes.c_size_t(1), self._streams[1])
            for each in self._streams:
                self._call("cuStreamSynchronize", each)
            for event in (began, ended):
                self._call("cuEventDestroy_v2", event)

    def copy(self, pointer: int, directions: tuple[Direction, ...], size_bytes: int = CEILING_BYTES) -> float:
        """Seconds that a plain copy of so many bytes takes between pinned memory and the card, each way named."""
        began = time.perf_counter()
        for at in range(0, size_bytes, PIECE_BYTES):
            for direction in directions:
                stream = self._streams[list(Direction).index(direction)]
                place, size = ctypes.c_uint64(pointer + at), ctypes.c_size_t(min(PIECE_BYTES, size_bytes - at))
                half = PIECE_BYTES if direction is Direction.RETRIEVE else 0
                host = ctypes.c_uint64((self._host.value or 0) + half)
                pair = (host, place) if direction is Direction.STORE else (place, host)
                self._call("cuMemcpyAsync", *pair, size, stream)
        for stream in self._streams:
            self._call("cuStreamSynchronize", stream)
        return time.perf_counter() - began
