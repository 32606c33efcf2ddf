# SPDX-License-Identifier: Apache-2.0
"""The composition root: turns settings into a running server. Everything is built here and nowhere else."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvgrpc import __version__
from kvgrpc.config.credentials import offer_variables, plain_http, valkey_login
from kvgrpc.config.memory import choose_l1_size
from kvgrpc.config.settings import Settings, SettingsError
from kvgrpc.config.values import split_address
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.types import NO_VERSIONS, PrefetchStatus, Versions
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.driver import Driver, Hands, ServerFacts
from kvgrpc.runtime.finals import final_status
from kvgrpc.runtime.garbage import Freezer
from kvgrpc.runtime.recorder import Recorder
from kvgrpc.service.admission import Admission
from kvgrpc.service.calls import CURRENT
from kvgrpc.service.server import Server, ServerOptions, Signals, caught_signals, run
from kvgrpc.service.tls import TlsFiles
from kvgrpc.telemetry.hands import CountedTier
from kvgrpc.telemetry.running import Telemetry, TelemetryOptions
from kvgrpc.telemetry.series import Sources
from kvgrpc.tiers.base import Tier
from kvgrpc.tiers.disk import DiskTier
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.version_file import UnreadableVersionsError, keep, load, new_step
from kvgrpc.tiers.versions import KeptVersions, VersionPlace
from kvgrpc.transfer.arena import PART_BYTES, Arena, ArenaError
from kvgrpc.transfer.arena_file import left_behind
from kvgrpc.transfer.base import Mover
from kvgrpc.transfer.cards import Cards, nvidia_devices
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.room import available_memory, free_huge_pages
from kvgrpc.transfer.routed import RoutedMover
from kvgrpc.transfer.shm import SharedMemoryMover

SWITCH_S = 0.0005
"""The interpreter's switch interval. With its own 5 ms a client's thread waits until the loop has planned what comes
behind the slice that the thread is to copy: 2.4 ms in a Store of 512 chunks, now 0.8. The loop waits as long for
threads that hash."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the server runs with where nobody said, for the person who started it."""

    addresses: tuple[str, ...]
    socket_mode: int
    l1_bytes: int
    available_bytes: int
    arena_path: Path | None
    tiers: tuple[str, ...]
    chunk_tokens: int
    gpu_workers: int
    cards: int
    cpu_workers: int
    reflection: bool
    metrics: str
    health: str
    tls: bool
    tenants: bool


def telemetry_options(settings: Settings, facts: ServerFacts) -> TelemetryOptions:
    return TelemetryOptions(
        listen=None if settings.metrics_listen is None else split_address(settings.metrics_listen),
        collector=settings.otlp_endpoint,
        interval_s=settings.otlp_interval_ms / 1000,
        trace_share=settings.trace_share,
        version=facts.server_version,
        instance=facts.server_epoch.hex(),
    )


def server_options(settings: Settings) -> ServerOptions:
    tls = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return ServerOptions(
        socket=settings.socket_path(),
        socket_mode=settings.socket_mode,
        socket_group=settings.socket_group,
        listen=settings.listen,
        insecure=settings.insecure,
        tls=tls,
        health_listen=settings.health_listen or "",
        reflection=settings.serves_reflection(),
        message_bytes=settings.message_size,
        deadline_s=settings.deadline_ms / 1000,
        copy_deadline_s=settings.copy_deadline_ms / 1000,
        drain_s=settings.drain_ms / 1000,
        stall_s=settings.stall_ms / 1000,
    )


@contextmanager
def extra(flag: str, package: str, name: str) -> Generator[None]:
    """Around imports of what an extra brings. Raises SettingsError: it is not installed."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(f"{flag} needs {package} ({error}): pip install 'kvgrpc[{name}]'") from error


def make_tiers(settings: Settings) -> tuple[dict[str, Tier], KeptVersions]:
    """The lower tiers, in the order to ask them, and where versions of spaces outlive the server. Raises SettingsError:
    what a tier needs is not installed."""
    found: list[Tier] = []
    guard = GuardSettings(deadline_s=settings.tier_deadline_ms / 1000)
    beside_disk = None if settings.disk_path is None else settings.disk_path / "versions.json"
    beside_arena = None if settings.arena_path is None else arena_versions(settings.arena_path)
    kept = KeptVersions(shared_versions(settings), beside_disk, beside_arena)
    if settings.disk_path is not None and settings.disk_size is not None:
        disk = DiskTier(settings.disk_path, settings.disk_size, direct=settings.disk_direct, admit=kept.check_disk)
        disk.start()
        found.append(disk)
    if settings.mooncake_master is not None:
        with extra("--mooncake-master", "Mooncake and the system's libibverbs1, libcurl4 and libnuma1", "mooncake-cpu"):
            from kvgrpc.tiers.mooncake import MooncakeTier, bounds
        offer_variables(bounds(guard.deadline_s))
        how = {"protocol": settings.mooncake_protocol, "devices": settings.mooncake_devices}
        store = MooncakeTier(settings.mooncake_master, guard.deadline_s, **how)
        store.start()
        found.append(store)
    if settings.valkey_url is not None:
        with extra("--valkey-url", "redis", "valkey"):
            from kvgrpc.tiers.valkey import Login, ValkeyTier
        login = Login(*valkey_login(), settings.valkey_ca)
        found.append(ValkeyTier(settings.valkey_url, settings.valkey_ttl_ms, guard.deadline_s, login))
    if settings.object_store_url is not None:
        with extra("--object-store-url", "obstore", "objectstore"):
            from kvgrpc.tiers.objectstore import ObjectStoreTier
        found.append(ObjectStoreTier(settings.object_store_url, guard.deadline_s, plain_http=plain_http()))
    return {tier.name: Guarded(tier, guard) for tier in found}, kept


def shared_versions(settings: Settings) -> VersionPlace | None:
    """Where servers share them: where that is said, else in the tier that lasts longest."""
    asked = {
        "--versions-url": settings.versions_url,
        "--object-store-url": settings.object_store_url,
        "--valkey-url": settings.valkey_url,
    }
    flag, url = next(((flag, url) for flag, url in asked.items() if url), ("", None))
    if url is None:
        return None
    if url.startswith(("valkey", "redis")):
        with extra(flag, "redis", "valkey"):
            from kvgrpc.tiers.valkey import Login, ValkeyVersions
        return ValkeyVersions(url, login=Login(*valkey_login(), settings.valkey_ca))
    with extra(flag, "obstore", "objectstore"):
        from kvgrpc.tiers.objectstore import ObjectStoreVersions
    return ObjectStoreVersions(url, plain_http=plain_http())


def arena_versions(arena: Path) -> Path:
    return arena.with_name(arena.name + ".versions")


class Shown:
    """Telemetry around hands that no driver has yet. ``telemetry`` is None when none is wanted."""

    driver: Driver

    def __init__(self, options: TelemetryOptions, hands: Hands) -> None:
        self.telemetry: Telemetry | None = None
        self._tiers: tuple[CountedTier, ...] = ()
        if options.wanted:
            self.telemetry = Telemetry(options, lambda: CURRENT.get().traceparent, self._final)
            hands.mover, self._mover = self.telemetry.counted(hands.mover)
            self._tiers = tuple(self.telemetry.counted_tier(tier) for tier in hands.tiers.values())
            hands.tiers |= {tier.name: tier for tier in self._tiers}

    async def _final(self, job_id: bytes) -> PrefetchStatus | None:
        return await final_status(self.driver, job_id)

    async def start(self, server: Server) -> str:
        """Address of the scrape endpoint, if there is one."""
        if self.telemetry is None:
            return ""
        admin, affinity = DriverAdmin(self.driver), self.driver.hands.affinity
        sources = Sources(
            status=await admin.get_status(),
            rpcs=server.rpcs,
            lookups=self.driver.figures,
            mover=self._mover,
            waited=affinity.waited,
            busy_s=affinity.longest_busy_s,
            draining=server.traffic.draining.is_set,
            tiers=self._tiers,
            spans=self.telemetry.spans,
        )
        return self.telemetry.start(sources, admin.get_status)


def set_quotas(book: Bookkeeper, quotas: dict[str, int | None]) -> None:
    for cache_salt, size_bytes in quotas.items():
        book.set_quota(cache_salt, size_bytes)


def make_book(settings: Settings, arena_bytes: int, tiers: tuple[str, ...], kept: KeptVersions) -> Bookkeeper:
    versions, step = (kept.begin(), new_step()) if kept.outlive else (NO_VERSIONS, 1)
    book = Bookkeeper(settings.core_limits(), arena_bytes, tiers, versions, step)
    for model, policy in {"": settings.write_policy, **settings.write_policy_of}.items():
        book.set_write_policy(model, policy)
    set_quotas(book, dict(settings.quota))
    return book


def take_over(path: Path, arena: Arena, book: Bookkeeper, left: Versions | None) -> Recorder:
    """What an earlier server left in the arena is the book's. Raises ArenaError."""
    recorder = Recorder(book, arena, path)
    recorder.take_over(left)
    try:
        keep(arena_versions(path), book.versions.snapshot())
    except OSError as error:
        raise ArenaError(f"beside the arena {path} nothing can be written: {error.strerror}") from error
    return recorder


def left_versions(path: Path | None) -> Versions | None:
    """What lies beside the arena; None when that is lost."""
    try:
        return None if path is None else load(arena_versions(path))
    except (OSError, UnreadableVersionsError):
        return None


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


def make_mover(settings: Settings, arena: Arena, cards: Cards | None) -> Mover:
    """For engines in host memory; with ``cards``, for those on cards too."""
    uids, threads = {os.geteuid(), *settings.allow_uid}, settings.copy_threads or 0
    host = SharedMemoryMover(arena, settings.chunk_tokens, uids, threads=threads)
    if cards is None:
        return host
    return RoutedMover(host, CudaMover(cards, settings.chunk_tokens, CopyMode(settings.copy_mode)))


def make_arena(settings: Settings) -> tuple[Arena, int]:
    """The arena, and the bytes that were available for it. Raises SettingsError, ArenaError."""
    path, huge_pages = settings.arena_path, settings.huge_pages
    left_bytes, taken_bytes = (0, 0) if path is None or settings.fresh else left_behind(path)
    available_bytes = free_huge_pages() if huge_pages else available_memory() + taken_bytes
    asked_bytes = settings.l1_size or left_bytes or None
    l1_bytes = choose_l1_size(asked_bytes, available_bytes, settings.page_size, huge_pages=huge_pages)
    first_bytes = l1_bytes if huge_pages else PART_BYTES  # huge pages are there or not; nobody waits for them
    arena = Arena(l1_bytes, path=path, fresh=settings.fresh, huge_pages=huge_pages, first_bytes=first_bytes)
    return arena, available_bytes


def make_hands(
    settings: Settings,
    mover: Mover,
    arena: Arena,
    affinity: AffinityExecutor,
    tiers: dict[str, Tier],
    kept: KeptVersions,
) -> Hands:
    return Hands(
        mover=mover,
        arena=arena,
        affinity=affinity,
        cpu_pool=ThreadPoolExecutor(settings.cpu_workers(), thread_name_prefix="kvgrpc-cpu"),
        tiers=tiers,
        save_versions=kept.save if kept.outlive else None,
        flush_s=settings.flush_ms / 1000,
        chunk_streams=settings.chunk_streams,
        watchers=settings.watchers,
    )


async def close_all(driver: Driver, recorder: Recorder | None, arena: Arena) -> None:
    """Harmless when repeated; whoever may start next waits for all of it."""
    await driver.close()
    if recorder is not None:
        await recorder.end()
    arena.close()


async def _serve(settings: Settings, announce: Callable[[Choices], None], signals: Signals) -> None:
    limits, path = settings.core_limits(), settings.arena_path
    arena, available_bytes = make_arena(settings)
    found = nvidia_devices() if settings.cards else 0
    cards = Cards(arena) if found else None
    left, (tiers, kept) = left_versions(path), make_tiers(settings)
    book = make_book(settings, arena.ready_bytes, tuple(tiers), kept)
    recorder = None if path is None else take_over(path, arena, book, left)
    affinity = AffinityExecutor(settings.gpu_workers(found))
    hands = make_hands(settings, make_mover(settings, arena, cards), arena, affinity, tiers, kept)
    facts = ServerFacts(__version__, host_id(), settings.message_size)
    shown = Shown(telemetry_options(settings, facts), hands)
    driver = shown.driver = Driver(book, limits, hands, facts)
    driver.recorder = recorder
    client_for = shown.telemetry.traced(driver.client) if shown.telemetry is not None else driver.client
    admission = None
    if settings.access is not None:
        admission = Admission(settings.access, partial(set_quotas, book), settings.reattach_grace_ms / 1000)
        admission.check_quotas(settings.quota)
        client_for = admission.bound(client_for)
    server = Server(
        server_options(settings),
        client_for,
        DriverAdmin(driver),
        busy_s=affinity.longest_busy_s,
        at_rest=partial(close_all, driver, recorder, arena),
    )
    server.admit = None if admission is None else admission.admit

    def started() -> None:
        announce(
            Choices(
                addresses=server.addresses,
                socket_mode=settings.socket_mode,
                l1_bytes=arena.size_bytes,
                available_bytes=available_bytes,
                arena_path=path,
                tiers=tuple(tiers),
                chunk_tokens=limits.chunk_tokens,
                gpu_workers=settings.gpu_workers(found),
                cards=found,
                cpu_workers=settings.cpu_workers(),
                reflection=settings.serves_reflection(),
                metrics=metrics,
                health=server.health_address,
                tls=settings.tls_cert is not None,
                tenants=settings.access is not None,
            )
        )

    sys.setswitchinterval(SWITCH_S)
    metrics, loop = "", asyncio.get_running_loop()
    arena.fill(partial(loop.call_soon_threadsafe, book.grow), cards.pin if cards is not None else None)
    freezer = Freezer(lambda: server.traffic.limited_calls == 0)
    freezing = asyncio.create_task(freezer.run())
    try:
        metrics = await shown.start(server)
        if recorder is not None:
            recorder.start(driver)
        await run(server, started, signals)
    finally:
        freezing.cancel()
        freezer.close()
        if shown.telemetry is not None:
            await shown.telemetry.stop()
        await close_all(driver, recorder, arena)
