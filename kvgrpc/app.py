# SPDX-License-Identifier: Apache-2.0
"""The composition root: turns settings into a running server. Everything is built here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvgrpc import __version__
from kvgrpc.config.memory import available_memory, choose_l1_size
from kvgrpc.config.settings import Settings
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.driver import Driver, Hands, ServerFacts
from kvgrpc.service.server import Server, ServerOptions, run
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.host import host_id
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


async def serve(settings: Settings, announce: Callable[[Choices], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Main thread only.

    ``announce`` is called once, when every listener is bound. Raises SettingsError, ArenaError or ListenError when the
    server cannot start; each says why in one sentence.
    """
    limits = settings.core_limits()
    available_bytes = available_memory()
    l1_bytes = choose_l1_size(settings.l1_size, available_bytes, limits.page_bytes)
    arena = Arena(l1_bytes, path=settings.arena_path, huge_pages=settings.huge_pages)
    book = Bookkeeper(limits, l1_bytes)
    for cache_salt, size_bytes in settings.quota.items():
        book.set_quota(cache_salt, size_bytes)
    hands = Hands(
        mover=SharedMemoryMover(
            arena, limits.chunk_tokens, {os.geteuid(), *settings.allow_uid}, threads=settings.copy_threads or 0
        ),
        arena=arena,
        affinity=AffinityExecutor(settings.gpu_workers()),
        cpu_pool=ThreadPoolExecutor(settings.cpu_workers(), thread_name_prefix="kvgrpc-cpu"),
    )
    driver = Driver(book, limits, hands, ServerFacts(__version__, host_id(), settings.message_size))
    server = Server(
        server_options(settings),
        driver.client,
        DriverAdmin(driver),
        busy_s=hands.affinity.longest_busy_s,
        at_rest=driver.close,
    )
    arena.warm()
    try:
        await server.start()
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
        await run(server)
    finally:
        await driver.close()
        arena.close()
