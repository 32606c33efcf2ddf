# SPDX-License-Identifier: Apache-2.0
"""A server's status as one screen for people, or as JSON for programs."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvgrpc.api import ArenaStatus, EngineStatus, ServerStatus, SpaceStatus
from kvgrpc.config.values import format_size
from kvgrpc.operators import RestartStatus

WIDTH_LEAST = 170
"""In a narrower terminal its lines wrap, and no id is broken into pieces that cannot be copied."""


def named(text: str) -> str:
    """What a client has named, as markup: only what can be seen, so that nobody steers the terminal of an operator."""
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def wide() -> Console:
    return Console(width=max(Console().width, WIDTH_LEAST))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `kvgrpc status` shows: three answers of AdminService, one after the other."""

    server: ServerStatus
    engines: tuple[EngineStatus, ...]
    spaces: tuple[SpaceStatus, ...]


def as_json(snapshot: Snapshot) -> str:
    """The snapshot with the protocol's field names; bytes are hexadecimal."""
    return json.dumps(dataclasses.asdict(snapshot), default=plain_value, indent=2, sort_keys=True)


def as_screen(snapshot: Snapshot) -> RenderableType:
    parts: list[RenderableType] = [_head(snapshot.server), Text(), _memory(snapshot.server.arena)]
    if snapshot.server.restart.refused or snapshot.server.restart.checking:
        parts += [_restart(snapshot.server.restart)]
    if snapshot.server.tiers:
        parts += [Text(), _tiers(snapshot.server)]
    parts += [Text(), _engines(snapshot), Text(), _spaces(snapshot), Text(), _counters(snapshot.server.counters)]
    return Group(*parts)


def plain_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _head(server: ServerStatus) -> RenderableType:
    seconds = server.uptime_ms // 1000
    up = (
        f"{seconds // 86400} d " * (seconds >= 86400)
        + f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    )
    state = "[yellow]draining[/]" if server.draining else "[green]serving[/]"
    rate = _hit_rate(server.counters)
    return Text.from_markup(
        f"[bold]kvgrpc {server.server_version}[/]  {state}  up {up}  epoch {server.server_epoch.hex()[:8]}  "
        f"chunk {server.chunk_tokens} tokens\n"
        f"{server.engines} engines  {server.clients} clients  {server.spaces} spaces  {server.chunks} chunks  "
        f"{server.jobs} lookups  {server.pins} pins  {server.calls_in_flight} copies running{rate}"
    )


def _hit_rate(counters: dict[str, int]) -> str:
    asked = counters.get("lookup_tokens", 0)
    return f"  hit rate {counters.get('hit_tokens', 0) / asked:.1%} of tokens" if asked else ""


def _memory(arena: ArenaStatus) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    used = arena.total_bytes - arena.free_bytes
    table.add_row(
        "[bold]L1[/]", f"{format_size(used)} of {format_size(arena.total_bytes)}", _bar(used, arena.total_bytes)
    )
    rows = {
        "ready": arena.ready_bytes,
        "pinned": arena.pinned_bytes,
        "being written": arena.writing_bytes,
        "cleared, still in use": arena.doomed_bytes,
        "waiting for a copy's end": arena.settling_bytes,
        "held by retention or Pin": arena.held_bytes,
    }
    for name, size_bytes in rows.items():
        if size_bytes:
            table.add_row(f"  {name}", format_size(size_bytes), _bar(size_bytes, arena.total_bytes))
    return table


def _restart(restart: RestartStatus) -> Text:
    """Of a named arena; when all is checked, the counters say it."""
    if restart.refused:
        return Text(f"  it began empty: {restart.refused}", style="yellow")
    done = restart.restored_objects + restart.dropped_objects
    return Text(f"  {done:,} of {restart.found_objects:,} objects of an earlier server are checked", style="yellow")


def _bar(part: int, whole: int) -> ProgressBar:
    return ProgressBar(total=max(whole, 1), completed=part, width=32)


def _tiers(server: ServerStatus) -> RenderableType:
    table = _table("tier", "state", "used", "of", "reads", "writes", "waiting")
    for tier in server.tiers:
        state = "[green]healthy[/]" if tier.healthy else "[red]failing[/]"
        limit = format_size(tier.counters["limit_bytes"]) if tier.counters.get("limit_bytes") else "-"
        flights = (tier.reads_in_flight, tier.writes_in_flight, tier.writes_queued)
        table.add_row(tier.name, state, format_size(tier.used_bytes), limit, *map(str, flights))
    return table


def _engines(snapshot: Snapshot) -> RenderableType:
    table = _table("engine", "client", "role", "state", "rank kv/tp", "memory", "thread", "copies")
    for engine in snapshot.engines:
        name = engine.engine + (" (draining)" if engine.draining else "")
        for client in engine.clients:
            state = "attached" if client.attached else "[yellow]broken stream[/]"
            rank = f"{client.kv_rank}/{client.tp_rank}" if client.registered else "-"
            memory = format_size(client.memory_bytes) if client.registered else "-"
            thread = str(client.thread) if client.registered else "-"
            row = (named(client.client_id), client.role.value, state, rank, memory, thread, str(client.calls_in_flight))
            table.add_row(name, *row)
            name = ""
    return table if snapshot.engines else Text("no engine is attached", style="dim")


def _spaces(snapshot: Snapshot) -> RenderableType:
    table = _table("model", "revision", "lora", "salt", "dtype", "ranks", "chunks", "pinned", "size", "generation")
    if snapshot.server.tiers:
        table.add_column("copied down", justify="right")
    for space in snapshot.spaces:
        known = space.identity
        table.add_row(
            named(known.model),
            named(known.revision[:12]) or "-",
            named(space.lora) or "-",
            space.salt_fingerprint or "-",
            named(known.kv_dtype),
            str(known.kv_world_size),
            str(space.chunks),
            str(space.pinned_chunks),
            format_size(space.bytes),
            str(space.generation),
            *([space.write_policy.value if space.write_policy else "?"] if snapshot.server.tiers else ()),
        )
    return table if snapshot.spaces else Text("no data yet", style="dim")


def _counters(counters: dict[str, int]) -> RenderableType:
    shown = [f"{name} {count:,}" for name, count in sorted(counters.items()) if count]
    return Text("  ".join(shown) if shown else "nothing happened yet", style="dim")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
