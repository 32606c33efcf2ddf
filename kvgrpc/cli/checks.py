# SPDX-License-Identifier: Apache-2.0
"""What ``kvgrpc doctor`` looks at."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvgrpc.bench.card import CardEngine, compute_mode
from kvgrpc.bench.processes import BenchError, answer, running, say
from kvgrpc.config.places import mps_folder
from kvgrpc.config.values import format_size
from kvgrpc.core.types import Direction
from kvgrpc.transfer import device
from kvgrpc.transfer.cards import nvidia_devices
from kvgrpc.transfer.kernels import load_kernel
from kvgrpc.transfer.placement import SYSFS, cpus_of_node, node_of_card
from kvgrpc.transfer.room import available_memory, free_huge_pages

SHM = "/dev/shm"  # noqa: S108 - where shm_open puts its objects, not a temporary file
SHARED_BYTES = 64 << 20
SLOW_GB_S = 10.0
MEASURED_BYTES = 256 << 20
MIB = 1 << 20
NO_LIBRARY, NO_DEVICE = "libcuda.so.1", "CUDA_ERROR_NO_DEVICE"
"""In the words of the extension, why there are no cards."""
HIDDEN = "the driver shows none to this process (NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)"


class Verdict(Enum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it."""

    verdict: Verdict
    what: str
    text: str


def _ok(what: str, text: str) -> Finding:
    return Finding(Verdict.OK, what, text)


def _warn(what: str, text: str) -> Finding:
    return Finding(Verdict.WARN, what, text)


def _fail(what: str, text: str) -> Finding:
    return Finding(Verdict.FAIL, what, text)


# ---- the host -------------------------------------------------------------------------------------------------------


def host_findings() -> Iterator[Finding]:
    """Memory and limits."""
    yield _ok("memory", f"{format_size(available_memory() // MIB * MIB)} can be taken")
    try:
        room = os.statvfs(SHM)
        size = room.f_blocks * room.f_frsize // MIB * MIB
        text = f"{format_size(size)}: room for the memory of engines on CPUs; of cards for handles of events only"
        yield _ok(SHM, text) if size > 1 << 30 else _warn(SHM, text + "; give the container more")
    except OSError as error:
        yield _warn(SHM, f"{error.strerror}: engines on CPUs cannot share memory")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield _ok("memlock", "unlimited")
    else:
        text = "NVIDIA's driver does not count it, others may; if pinning fails, raise it (ulimit -l, LimitMEMLOCK)"
        yield _warn("memlock", f"{format_size(locked)}: {text}")
    huge = free_huge_pages()
    yield _ok(
        "huge pages", f"{format_size(huge)} reserved and free" if huge else "none reserved; --huge-pages needs some"
    )


# ---- cards ----------------------------------------------------------------------------------------------------------


def card_findings() -> Iterator[Finding]:
    """Cards, and what the server needs of them."""
    devices = nvidia_devices()
    try:
        cards = device.cards()
    except RuntimeError as error:
        if not devices:
            yield _ok("cards", f"none ({error}); the server serves engines in host memory")
        elif NO_LIBRARY in str(error):
            yield _fail("driver", f"{devices} device files, but {error}: install the driver's libcuda in the container")
        elif NO_DEVICE in str(error):
            yield _warn("cards", HIDDEN)
        else:
            yield _fail("driver", f"{devices} device files, but {error}: see what nvidia-smi and the kernel's log say")
        return
    if not cards:
        yield _warn("cards", HIDDEN)
    for ordinal, uuid, name, bus_id in cards:
        yield _ok(f"card {ordinal}", f"{name}, {uuid}")
        yield numa_finding(ordinal, bus_id)
        try:
            yield from _one_card(ordinal)
        except (BenchError, RuntimeError) as error:
            yield _fail(f"card {ordinal}", str(error))


def numa_finding(ordinal: int, bus_id: str, sysfs: Path = SYSFS) -> Finding:
    """Whether the server's cores are at the card's node."""
    what, node = f"card {ordinal} NUMA", node_of_card(bus_id, sysfs)
    if node is None:
        return _ok(what, "the system names no node for it")
    near = cpus_of_node(node, sysfs)
    if near and not near & os.sched_getaffinity(0):
        return _warn(
            what, f"node {node}, and no core of it is ours: start the server with numactl --cpunodebind={node}"
        )
    return _ok(what, f"node {node}")


def _one_card(ordinal: int) -> Iterator[Finding]:
    yield _mode(ordinal, compute_mode(ordinal))
    try:
        native = device.Card(ordinal)
    except RuntimeError as error:
        text = f"{error}: a process may have it for itself, or have filled it; a server that starts now leaves it out"
        yield _fail(f"card {ordinal} context", text)
        return
    here = CardEngine(ordinal)
    free, _ = native.memory()
    with running("kvgrpc.cli.checks", str(ordinal)) as process:
        handle = bytes.fromhex(answer(process))
        left, _ = native.memory()
        took = max(free - left - SHARED_BYTES, 0) // MIB * MIB
        yield _ok(f"card {ordinal} memory", f"a process that uses it takes {format_size(took)}, so also the server")
        try:
            pointer, size = native.open(handle)
            native.close(pointer)
            yield _ok(f"card {ordinal} IPC", f"memory of another process opens ({format_size(size)})")
        except RuntimeError as error:
            text = f"{error}: server and engines need the same view of the card, and process ids that differ"
            yield _fail(f"card {ordinal} IPC", text)
        yield _event(ordinal, native, process)
    with here.memory(MEASURED_BYTES) as memory:
        for way in Direction:
            seconds = [here.copy(memory, (way,), MEASURED_BYTES) for _ in range(4)]
            rate = MEASURED_BYTES / min(seconds) / 1e9
            text = f"{rate:.1f} GB/s between pinned memory and the card"
            good = rate > SLOW_GB_S
            yield _ok(f"card {ordinal} {way.value}", text) if good else _warn(f"card {ordinal} {way.value}", text)
    try:
        load_kernel(ordinal)
        yield _ok(f"card {ordinal} kernel", "the copy kernel compiles: short runs are staged")
    except RuntimeError as error:
        yield _warn(f"card {ordinal} kernel", f"{error}; short runs are copied slowly until then")


def _mode(ordinal: int, mode: int) -> Finding:
    what = f"card {ordinal} compute mode"
    mps = (mps_folder() / "control").exists()
    if mode == 0:
        return _ok(what, "default" + (", and MPS runs" if mps else ", no MPS"))
    if mode == 3 and mps:
        return _ok(what, "exclusive process, shared through MPS")
    return _fail(what, "one process alone may use it: nvidia-smi -c DEFAULT, or MPS")


def _event(ordinal: int, native: device.Card, process: subprocess.Popen[str]) -> Finding:
    what = f"card {ordinal} events"
    try:
        device.IpcEvent(native, bytes.fromhex(answer(process)))
    except (BenchError, RuntimeError) as error:
        return _warn(what, f"{error}: engines must wait for their events themselves and send no handles of them")
    return _ok(what, f"an event of another process opens; engines that send handles need this {SHM}, too")


def _share(ordinal: int) -> None:
    """The other process: says the handles of memory and of an event, and lives until it is ended."""
    card = CardEngine(ordinal)
    with card.memory(SHARED_BYTES) as pointer:
        say(card.share(pointer, SHARED_BYTES).handle.hex())
        say(card.event_handle().hex())
        input()


if __name__ == "__main__":
    import sys

    _share(int(sys.argv[1]))
