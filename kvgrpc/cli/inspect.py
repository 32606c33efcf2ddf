# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc inspect``: what is cached for these tokens or keys, where, and who keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgrpc import api
from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import target_of, told
from kvgrpc.cli.screen import named, plain_value, wide
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.config.values import format_size
from kvgrpc.core.keys import fingerprint
from kvgrpc.core.types import SpaceRef

ROWS = 40
"""Runs of equal chunks that the screen shows of one space."""
TOKENS_BYTES_MOST = 64 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """One space and what it has of what was asked for."""

    space: api.SpaceStatus
    inspection: api.Inspection


@click.command()
@click.argument("tokens", required=False, type=click.File("r"))
@click.option("--hash", "hashes", multiple=True, metavar="HEX", help="chunk key in place of tokens (may be repeated)")
@click.option("--model", default="", metavar="NAME", help="only spaces of this model")
@click.option("--lora", default=None, metavar="NAME", help="only spaces of this adapter; '' = of none")
@click.option("--salt", default="", metavar="SALT", help="the tenant's salt; default: spaces without one")
@click.option("--json", "json_form", is_flag=True, help="print JSON for programs, every chunk")
@connection_options
def inspect(
    tokens: TextIO | None,
    hashes: tuple[str, ...],
    model: str,
    lora: str | None,
    salt: str,
    json_form: bool,
    address: str | None,
    **credentials: str | None,
) -> None:
    """Show what is cached for a prompt, where, and who keeps it.

    TOKENS is a file with token ids, "-" for standard input: numbers, divided by anything else (a JSON list will do).
    """
    if (tokens is None) == (not hashes):
        raise click.UsageError("name a file with TOKENS (- is standard input), or keys with --hash")
    content = read_tokens(tokens) if tokens is not None else read_hashes(hashes)
    target = target_of(address)

    def chosen(space: api.SpaceStatus) -> bool:
        known = (model or space.identity.model, space.lora if lora is None else lora)
        return known == (space.identity.model, space.lora) and space.salt_fingerprint == (salt and fingerprint(salt))

    async def ask() -> tuple[int, list[Found]]:
        async with AioClient(target, options=ChannelOptions(credentials=credentials_of(credentials))) as client:
            spaces = await client.list_spaces()
            found: list[Found] = []
            for space in filter(chosen, spaces):
                takes_tokens = space.identity.hash_algorithm == api.OWN_HASH_ALGORITHM
                if takes_tokens or isinstance(content, api.Hashes):
                    ref = SpaceRef(space.space_base, space.lora, salt)
                    found.append(Found(space, await client.inspect(ref, content)))
            return len(spaces), found

    with told(target):
        number, found = asyncio.run(ask())
    if json_form:
        click.echo(json.dumps([_record(one) for one in found], default=plain_value, indent=2))
        return
    console = wide()
    for one in found:
        console.print(_screen(one), highlight=False)
    if not number:
        click.echo("no space has data in L1, and lower tiers are asked only of spaces that have")
    if number > len(found):
        click.echo(
            f"{number - len(found)} other spaces were not asked: of another model, adapter or salt (--model, --lora, "
            "--salt), or keyed by hashes of the engine (--hash)"
        )


def read_tokens(file: TextIO) -> api.Tokens:
    """UsageError for what is no list of token ids."""
    try:
        text = file.read(TOKENS_BYTES_MOST + 1)
    except UnicodeDecodeError:
        raise click.UsageError("TOKENS is no text: token ids are written as numbers") from None
    if len(text) > TOKENS_BYTES_MOST:
        raise click.UsageError(f"TOKENS is longer than {format_size(TOKENS_BYTES_MOST)}")
    if re.search(r"[A-Za-z]|\d\.\d|-\d", text):
        raise click.UsageError("TOKENS has something else than token ids")
    try:
        found = api.Tokens.from_ids(map(int, re.findall(r"\d+", text)))
    except (OverflowError, ValueError):  # ValueError: of more digits than Python reads
        raise click.UsageError("TOKENS has a number beyond 32 bits") from None
    if not found.num_tokens:
        raise click.UsageError("TOKENS is empty")
    return found


def read_hashes(texts: Iterable[str]) -> api.Hashes:
    """UsageError for what is no chunk key."""
    try:
        keys = [bytes.fromhex(text) for text in texts]
    except ValueError:
        raise click.UsageError("--hash is hexadecimal") from None
    if any(not 16 <= len(key) <= 64 for key in keys):
        raise click.UsageError("--hash has 32 to 128 digits")
    return api.Hashes(keys, 0)


def _record(one: Found) -> dict[str, Any]:
    fields = dataclasses.asdict(one.inspection)
    tiers = fields.pop("tier_ranks")
    chunks = [{**chunk, "tier_ranks": ranks} for chunk, ranks in zip(fields["chunks"], tiers, strict=True)]
    return {"space": dataclasses.asdict(one.space), **fields, "chunks": chunks}


def _screen(one: Found) -> RenderableType:
    space, found = one.space, one.inspection
    ranks = space.identity.kv_world_size
    hit = next((at for at, chunk in enumerate(found.chunks) if chunk.ready_ranks < ranks), len(found.chunks))
    some = next((at for at, chunk in enumerate(found.chunks) if not chunk.ready_ranks), len(found.chunks))
    names = " ".join(filter(None, (space.identity.model, space.identity.revision, space.lora and f"lora {space.lora}")))
    head = (
        f"[bold]{named(names)}[/]  space {space.space_base.hex()}"
        + (f"  salt {space.salt_fingerprint}" if space.salt_fingerprint else "")
        + f"\n{hit} of {len(found.chunks)} chunks are in L1 from the first on"
        + (f"; {some} of fewer than all {ranks} KV ranks" if some > hit else "")
    )
    parts: list[RenderableType] = [Text.from_markup(head), _chunks(found, ranks)]
    if found.keepers:
        parts.append(_keepers(found))
    if found.more_keepers:
        parts.append(Text("there may be more who keep them: the look was cut short", style="dim"))
    if found.silent_tiers:
        parts.append(Text(f"no answer from {', '.join(found.silent_tiers)}", style="red"))
    return Group(*parts, Text())


def _chunks(found: api.Inspection, ranks: int) -> RenderableType:
    """Equal chunks that follow each other are one row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("chunks", "key of the first", "L1", "size", "pins", "holds", "below"):
        table.add_column(column, overflow="fold")
    rows: list[tuple[int, int]] = []
    looks = [_look(chunk, tiers, ranks) for chunk, tiers in zip(found.chunks, found.tier_ranks, strict=True)]
    for at, look in enumerate(looks):
        if rows and look == looks[rows[-1][0]]:
            rows[-1] = (rows[-1][0], at)
        else:
            rows.append((at, at))
    for first, last in rows[:ROWS]:
        chunk, (where, pins, holds, below) = found.chunks[first], looks[first]
        place = str(first) if first == last else f"{first}-{last}"
        size = format_size(sum(one.bytes for one in found.chunks[first : last + 1]))
        table.add_row(place, chunk.key.hex()[:16], where, size, str(pins), str(holds), below)
    if len(rows) > ROWS:
        table.add_row(f"... {len(rows) - ROWS} more rows: --json", "", "", "", "", "", "")
    return table


def _look(chunk: api.InspectedChunk, tiers: dict[str, int], ranks: int) -> tuple[str, int, int, str]:
    """(L1, pins, holds, below)."""
    if chunk.ready_ranks == ranks:
        where = "ready"
    elif chunk.ready_ranks or chunk.writing_ranks:
        writing = f", {chunk.writing_ranks} being written" if chunk.writing_ranks else ""
        where = f"{chunk.ready_ranks} of {ranks} ranks{writing}"
    else:
        where = "-"
    below = " ".join(name if count == ranks else f"{name} {count}/{ranks}" for name, count in sorted(tiers.items()))
    return where, chunk.pins, chunk.holds, below or "-"


def _keepers(found: api.Inspection) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kept by", "chunks", "for"):
        table.add_column(column, overflow="fold")
    for keeper in found.keepers:
        if keeper.pin_id:
            name = f"operator's pin {keeper.pin_id.hex()}"
        elif keeper.engine:
            name = f"engine {keeper.engine}, request {named(keeper.request_id)}"
        else:
            name = "retention"
        left = f"{keeper.left_ms / 1000:.1f} s" if keeper.left_ms else "-"
        table.add_row(name, str(keeper.chunks), left)
    return table
