# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA driver (driver.cpp) in this process or in others, and memory of its cards."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvgrpc.api import CudaIpcMemory, Layout, SharedMemory
from kvgrpc.transfer import _native

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "fake-cuda"
FAKES = HERE / "fakes"


@cache
def driver_folder() -> Path:
    """Where libcuda.so.1 lies, built when it is older than its source."""
    source, library = HERE / "driver.cpp", BUILT / "libcuda.so.1"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BUILT.mkdir(parents=True, exist_ok=True)
        made = BUILT / f"making-{os.getpid()}"
        flags = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(made)], check=True)
        made.replace(library)
    return BUILT


def environment(**more: str) -> dict[str, str]:
    """For processes that shall see fake cards."""
    found = {**os.environ, "LD_LIBRARY_PATH": str(driver_folder()), **more}
    found["PYTHONPATH"] = os.pathsep.join([str(FAKES), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return found


@cache
def driver() -> ctypes.CDLL:
    """The driver, loaded into this process under the real one's name."""
    return ctypes.CDLL(str(driver_folder() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def leave() -> None:
    """Ends this process, whose card may be lost, with all that lies on it."""
    for left in Path("/dev/shm").glob(f"kvgrpc-fake-{os.getpid()}-*"):
        left.unlink()
    os._exit(0)


class CardMemory:
    """An allocation on a fake card; ``buffer`` is it, ``pointer`` its address. Freed by ``free``."""

    def __init__(self, size_bytes: int) -> None:
        pointer = ctypes.c_uint64()
        assert driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size_bytes)) == 0
        self.pointer = pointer.value
        self.buffer = (ctypes.c_ubyte * size_bytes).from_address(self.pointer)

    def layout(self, layout: Layout) -> Layout:
        """The layout of an image in this memory, shared by handle."""
        handle, uuid, offset, _ = _native.export_memory(self.pointer)
        assert offset == 0
        pieces = [memory for memory in layout.memory if isinstance(memory, SharedMemory)]
        shared = tuple(CudaIpcMemory(handle, uuid, piece.offset_bytes, piece.size_bytes) for piece in pieces)
        return replace(layout, memory=shared)

    def free(self) -> None:
        del self.buffer
        assert driver().cuMemFree_v2(ctypes.c_uint64(self.pointer)) == 0


class LateWrites:
    """A stream of this process, and an event that others open."""

    def __init__(self) -> None:
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver().cuStreamCreate(ctypes.byref(self._stream), 1) == 0
        assert driver().cuEventCreate(ctypes.byref(self._event), 2 | 4) == 0
        handle = ctypes.create_string_buffer(64)
        assert driver().cuIpcGetEventHandle(handle, self._event) == 0
        self.handle = handle.raw
        self._sources: list[CardMemory] = []

    def write(self, memory: CardMemory, data: bytes, gate: str) -> None:
        """Fills the memory once there is a file ``gate``, and records the event behind that."""
        source = CardMemory(len(data))
        self._sources.append(source)
        source.buffer[:] = data
        target, size = ctypes.c_uint64(memory.pointer), ctypes.c_size_t(len(data))
        assert driver().fakeHold(self._stream, gate.encode()) == 0
        assert driver().cuMemcpyAsync(target, ctypes.c_uint64(source.pointer), size, self._stream) == 0
        assert driver().cuEventRecord(self._event, self._stream) == 0
