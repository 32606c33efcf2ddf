# SPDX-License-Identifier: Apache-2.0
"""One frame of ``kvgrpc top``: what has happened between two looks at a server, as lines that fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from kvgrpc.api import ArenaStatus, EngineStatus, TierStatus
from kvgrpc.cli.screen import Snapshot
from kvgrpc.config.values import format_size

STATES = (
    ("ready", "#", "green", "ready_bytes"),
    ("pinned", "p", "yellow", "pinned_bytes"),
    ("being written", "w", "cyan", "writing_bytes"),
    ("cleared, in use", "d", "magenta", "doomed_bytes"),
    ("settling", "s", "red", "settling_bytes"),
    ("free", ".", "dim", "free_bytes"),
)
"""Name, letter and colour of what a byte of L1 may be; letters, since not every terminal has colours."""
MAP_ROWS = 2
TIERS_MOST = 4


@dataclass(frozen=True, slots=True)
class Look:
    """What is there, and what was there ``seconds`` earlier (None: nothing to compare with)."""

    address: str
    now: Snapshot
    before: Snapshot | None
    seconds: float

    def grown(self, *counters: str) -> int:
        """By how much these counters together have grown."""
        if self.before is None:
            return 0
        now, before = self.now.server.counters, self.before.server.counters
        return sum(now.get(name, 0) - before.get(name, 0) for name in counters)

    def rate(self, *counters: str) -> float:
        """Their growth a second."""
        return self.grown(*counters) / self.seconds if self.seconds > 0 else 0.0


def compared(address: str, now: Snapshot, before: Snapshot | None, seconds: float) -> Look:
    """A look; a server that was started anew has nothing to compare with."""
    if before is not None and before.server.server_epoch != now.server.server_epoch:
        before = None
    return Look(address, now, before, seconds)


def frame(look: Look, width: int, height: int, last: Text) -> Text:
    """At most ``height`` lines of at most ``width`` cells."""
    lines = [*_lines(look, width, height - 1)][: height - 1] + [last] * bool(last)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def waiting(note: str, width: int) -> Text:
    """Before there was anything to show."""
    line = Text(note)
    line.truncate(width, overflow="ellipsis")
    return line


def _lines(look: Look, width: int, height: int) -> Iterator[Text]:
    server = look.now.server
    seconds = server.uptime_ms // 1000
    up = (
        f"{seconds // 86400} d " * (seconds >= 86400)
        + f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    )
    state = ("draining", "yellow") if server.draining else ("serving", "green")
    head = Text.assemble(
        (f"kvgrpc {server.server_version}", "bold"), "  ", state, f"  up {up}  ", (look.address, "dim")
    )
    fixed = [head, *_traffic(look), Text(), *_memory(server.arena, width)]
    yield from fixed
    tiers = [*_tiers(server.tiers)]
    yield from tiers
    yield from _engines(look.now.engines, height - len(fixed) - len(tiers))


def _traffic(look: Look) -> Iterator[Text]:
    server = look.now.server
    counters = server.counters
    yield Text(
        f"engines {server.engines}  clients {server.clients}  spaces {server.spaces}  chunks {server.chunks:,}  "
        f"copies running {server.calls_in_flight}"
    )
    asked, found = look.grown("lookup_tokens"), look.grown("hit_tokens")
    since = _share(counters.get("hit_tokens", 0), counters.get("lookup_tokens", 0))
    yield Text.assemble(
        f"lookups {look.rate('lookups'):6.1f}/s   hit rate ",
        (f"{_share(found, asked):>6}", "bold"),
        f"  since start {since}   failed chunks {look.rate('failed_chunks'):.1f}/s",
    )
    yield Text.assemble(
        "store ",
        (_speed(look.rate("stored_bytes", "write_chunks_bytes")), "bold"),
        "   load ",
        (_speed(look.rate("loaded_bytes", "read_chunks_bytes")), "bold"),
        f"   evicted {look.rate('evicted_chunks'):.1f}/s",
    )
    refused = sum(count for name, count in counters.items() if name.startswith("refused_"))
    yield Text(
        f"jobs {server.jobs}  leases' pins {server.pins:,}  leases expired {counters.get('expired_leases', 0):,}  "
        f"chunks refused {refused:,}"
    )


def _speed(bytes_s: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if bytes_s >= scale / 10:
            return f"{bytes_s / scale:6.2f} {unit}/s"
    return f"{bytes_s / 1e3:6.2f} kB/s"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _memory(arena: ArenaStatus, width: int) -> Iterator[Text]:
    used = arena.total_bytes - arena.free_bytes
    held = f"   held {format_size(arena.held_bytes)}" if arena.held_bytes else ""
    yield Text(f"L1 {format_size(used)} of {format_size(arena.total_bytes)} {_share(used, arena.total_bytes)}{held}")
    cells = arena_map(arena, width * MAP_ROWS)
    for start in range(0, len(cells), width):
        line = Text()
        for letter, style in cells[start : start + width]:
            line.append(letter, style)
        yield line
    legend = Text()
    for name, letter, style, field in STATES:
        if size_bytes := getattr(arena, field):
            legend.append(f"{letter} ", style).append(f"{name} {format_size(size_bytes)}  ")
    yield legend


def arena_map(arena: ArenaStatus, cells: int) -> list[tuple[str, str]]:
    """(letter, style) of each cell: states by their share of L1, at least one cell for what is not nothing."""
    sizes = [(letter, style, getattr(arena, field)) for _, letter, style, field in STATES]
    counts = [max(size * cells // max(arena.total_bytes, 1), size > 0) for _, _, size in sizes]
    largest = max(range(len(counts)), key=counts.__getitem__)
    counts[largest] += cells - sum(counts)
    return [(letter, style) for (letter, style, _), count in zip(sizes, counts, strict=True) for _ in range(count)]


def _tiers(tiers: tuple[TierStatus, ...]) -> Iterator[Text]:
    for tier in tiers[:TIERS_MOST]:
        limit = tier.counters.get("limit_bytes", 0)
        of = f" of {format_size(limit)}" if limit else ""
        yield Text.assemble(
            f"tier {tier.name} ",
            ("healthy", "green") if tier.healthy else ("failing", "red"),
            f"  {format_size(tier.used_bytes)}{of}  reads {tier.reads_in_flight}  writes {tier.writes_in_flight}  "
            f"waiting {tier.writes_queued}",
        )
    if len(tiers) > TIERS_MOST:
        yield Text(f"... and {len(tiers) - TIERS_MOST} tiers more", style="dim")


def _engines(engines: tuple[EngineStatus, ...], room: int) -> Iterator[Text]:
    """Those that do most first."""
    if not engines:
        yield Text("no engine is attached", style="dim")
        return
    yield Text(f"{'engine':<17}{'clients':>8}{'memory':>10}{'jobs':>7}{'pins':>9}{'copies':>8}  state", style="bold")
    busy = sorted(engines, key=lambda one: (-_copies(one), -one.pins, one.engine))
    shown = busy if len(busy) < room else busy[: max(room - 2, 0)]
    for one in shown:
        memory = format_size(sum(client.memory_bytes for client in one.clients))
        broken = sum(not client.attached for client in one.clients)
        state = "draining" if one.draining else f"{broken} broken" if broken else "attached"
        yield Text(
            f"{one.engine:<17}{len(one.clients):>8}{memory:>10}{one.jobs:>7}{one.pins:>9}{_copies(one):>8}  {state}"
        )
    if len(shown) < len(busy):
        yield Text(f"... and {len(busy) - len(shown)} engines more", style="dim")


def _copies(engine: EngineStatus) -> int:
    return sum(client.calls_in_flight for client in engine.clients)
