# SPDX-License-Identifier: Apache-2.0
"""The composition root: turns settings into a running server. Everything is built here and nowhere else."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvgrpc import __version__
from kvgrpc.config.memory import choose_l1_size
from kvgrpc.config.settings import Settings
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.types import NO_VERSIONS
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.driver import Driver, Hands, ServerFacts
from kvgrpc.service.server import Server, ServerOptions, Signals, caught_signals, run
from kvgrpc.tiers.base import Tier
from kvgrpc.tiers.disk import DiskTier
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.version_file import begin, new_step, save
from kvgrpc.transfer.arena import PART_BYTES, Arena
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.room import available_memory, free_huge_pages
from kvgrpc.transfer.shm import SharedMemoryMover


@dataclass(frozen=True, slots=True)
class Choices:
    """What the server runs with where nobody said, for the person who started it."""

    addresses: tuple[str, ...]
    socket_mode: int
    l1_bytes: int
    available_bytes: int
    chunk_tokens: int
    gpu_workers: int
    cpu_workers: int
    reflection: bool


def server_options(settings: Settings) -> ServerOptions:
    return ServerOptions(
        socket=settings.socket_path(),
        socket_mode=settings.socket_mode,
        socket_group=settings.socket_group,
        listen=settings.listen,
        insecure=settings.insecure,
        reflection=settings.serves_reflection(),
        message_bytes=settings.message_size,
        deadline_s=settings.deadline_ms / 1000,
        copy_deadline_s=settings.copy_deadline_ms / 1000,
        drain_s=settings.drain_ms / 1000,
        stall_s=settings.stall_ms / 1000,
    )


def make_tiers(settings: Settings) -> tuple[dict[str, Tier], Path | None]:
    """The lower tiers, in the order to ask them, and the file of versions if any of them outlives the server."""
    tiers: dict[str, Tier] = {}
    path: Path | None = None
    if settings.disk_path is not None and settings.disk_size is not None:
        disk = DiskTier(settings.disk_path, settings.disk_size, direct=settings.disk_direct)
        disk.start()
        tiers[disk.name] = Guarded(disk, GuardSettings(deadline_s=settings.tier_deadline_ms / 1000))
        path = settings.disk_path / "versions.json"
    return tiers, path


def raise_file_limit() -> None:
    """As many descriptors as the system lets this process have: each connection and each shared object takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(settings: Settings, announce: Callable[[Choices], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Main thread only.

    ``announce`` is called once, when every listener is bound. Raises SettingsError, ArenaError or ListenError when the
    server cannot start; each says why in one sentence.
    """
    raise_file_limit()
    with caught_signals() as signals:
        await _serve(settings, announce, signals)


async def _serve(settings: Settings, announce: Callable[[Choices], None], signals: Signals) -> None:
    limits = settings.core_limits()
    available_bytes = free_huge_pages() if settings.huge_pages else available_memory()
    l1_bytes = choose_l1_size(settings.l1_size, available_bytes, limits.page_bytes, huge_pages=settings.huge_pages)
    first_bytes = l1_bytes if settings.huge_pages else PART_BYTES  # huge pages are there or not; nobody waits for them
    arena = Arena(l1_bytes, path=settings.arena_path, huge_pages=settings.huge_pages, first_bytes=first_bytes)
    tiers, versions_path = make_tiers(settings)
    versions = NO_VERSIONS if versions_path is None else begin(versions_path)
    book = Bookkeeper(limits, arena.ready_bytes, tuple(tiers), versions, 1 if versions_path is None else new_step())
    for model, policy in {"": settings.write_policy, **settings.write_policy_of}.items():
        book.set_write_policy(model, policy)
    for cache_salt, size_bytes in settings.quota.items():
        book.set_quota(cache_salt, size_bytes)
    hands = Hands(
        mover=SharedMemoryMover(
            arena, limits.chunk_tokens, {os.geteuid(), *settings.allow_uid}, threads=settings.copy_threads or 0
        ),
        arena=arena,
        affinity=AffinityExecutor(settings.gpu_workers()),
        cpu_pool=ThreadPoolExecutor(settings.cpu_workers(), thread_name_prefix="kvgrpc-cpu"),
        tiers=tiers,
        save_versions=None if versions_path is None else partial(save, versions_path),
        flush_s=settings.flush_ms / 1000,
    )
    driver = Driver(book, limits, hands, ServerFacts(__version__, host_id(), settings.message_size))
    server = Server(
        server_options(settings),
        driver.client,
        DriverAdmin(driver),
        busy_s=hands.affinity.longest_busy_s,
        at_rest=driver.close,
    )

    def started() -> None:
        announce(
            Choices(
                addresses=server.addresses,
                socket_mode=settings.socket_mode,
                l1_bytes=l1_bytes,
                available_bytes=available_bytes,
                chunk_tokens=limits.chunk_tokens,
                gpu_workers=settings.gpu_workers(),
                cpu_workers=settings.cpu_workers(),
                reflection=settings.serves_reflection(),
            )
        )

    loop = asyncio.get_running_loop()
    arena.fill(partial(loop.call_soon_threadsafe, book.grow))
    try:
        await run(server, started, signals)
    finally:
        await driver.close()
        arena.close()
