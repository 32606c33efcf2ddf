# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc trace record`` and ``kvgrpc trace replay``."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from kvgrpc import api
from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import target_of, told
from kvgrpc.cli.trace.draw import draw
from kvgrpc.cli.trace.file import TraceError, TraceWriter, read_trace
from kvgrpc.cli.trace.live import replay_live
from kvgrpc.cli.trace.replay import Facts, Point, default_sizes, replay, survey
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.config.values import format_size, parse_size


def size_of(text: str) -> int:
    """Of ``4GiB``."""
    try:
        size = cast("int", parse_size(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size <= 0:
        raise click.BadParameter("a size is larger than nothing")
    return size


@click.group()
def trace() -> None:
    """Record lookups and stores, and replay them.

    Without their contents; a replay says what another size of L1 would have found.
    """


@trace.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="for how long; default: until Ctrl-C")
@click.option("--most-size", type=size_of, default="256MiB", show_default=True, metavar="SIZE", help="of the file")
@connection_options
def record(file: Path, seconds: float | None, most_size: int, address: str | None, **credentials: str | None) -> None:
    """Write a server's lookups and stores to FILE.

    As JSON lines, gzipped; FILE must not be there yet. Chunk keys are hashed with a salt that the server makes for this
    recording and keeps to itself: prompts cannot be guessed from the file, nor two files be joined.
    """
    target = target_of(address)
    try:
        writer = TraceWriter(file, most_size)
    except FileExistsError:
        raise click.ClickException(f"{file} is there already and stays as it is; name another file") from None
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    why = "the server has ended the recording"
    try:
        with told(target):
            why = asyncio.run(_record(target, credentials_of(credentials), writer, seconds)) or why
    finally:
        writer.close()
        if not writer.begun:
            file.unlink(missing_ok=True)
    if not writer.begun:
        raise click.ClickException(f"the server at {target} did not answer before the end ({why}); there is no {file}")
    lost = f", {writer.dropped} dropped" if writer.dropped else ""
    click.echo(f"{writer.calls} calls{lost} in {file} ({format_size(file.stat().st_size)}): {why}")


async def _record(target: str, credentials: Credentials, writer: TraceWriter, seconds: float | None) -> str:
    """Why it has ended; "" = by the server."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    async with AioClient(target, options=ChannelOptions(credentials=credentials)) as client:
        calls = client.record_trace()
        ending = asyncio.ensure_future(asyncio.wait_for(over.wait(), seconds))
        upcoming = asyncio.ensure_future(_next(calls))
        try:
            while True:
                await asyncio.wait({upcoming, ending}, return_when=asyncio.FIRST_COMPLETED)
                if upcoming.done():
                    some = upcoming.result()
                    if some is None:
                        return ""
                    if not writer.begun:
                        click.echo("recording; Ctrl-C ends it", err=True)
                    if not writer.write(some):
                        return "it is full"
                    upcoming = asyncio.ensure_future(_next(calls))
                elif ending.done():
                    return "the time is over" if ending.exception() else "ended"
        finally:
            ending.cancel()
            upcoming.cancel()
            await asyncio.wait({upcoming})
            await calls.aclose()


async def _next(calls: Any) -> api.TracedCalls | None:
    return await anext(calls, None)


@trace.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--size",
    "sizes",
    type=size_of,
    multiple=True,
    metavar="SIZE",
    help="of L1 (may be repeated); default: eight, doubling",
)
@click.option(
    "--chunk-size", type=size_of, metavar="SIZE", help="bytes of a chunk in all KV ranks, where the trace does not say"
)
@click.option("--live", is_flag=True, help="ask a live server, with L1 as it is, in place of the core")
@click.option("--json", "json_form", is_flag=True, help="print JSON for programs")
@click.option(
    "--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="draw the curve (needs kvgrpc[plot])"
)
@connection_options
def replay_command(
    file: Path,
    sizes: tuple[int, ...],
    chunk_size: int | None,
    live: bool,
    json_form: bool,
    png: Path | None,
    address: str | None,
    **credentials: str | None,
) -> None:
    """Say what hit rate L1 would have had at other sizes.

    FILE is of `kvgrpc trace record`, or has JSON lines with `hash_ids`. The rate is of whole chunks. With --live a
    server is asked in place of its order of eviction alone; what others have stored there may be evicted meanwhile.
    """
    try:
        facts = survey(read_trace(file), chunk_size)
        if live:
            target = target_of(address)
            with told(target):
                points = [asyncio.run(replay_live(read_trace(file), facts, target, credentials_of(credentials)))]
        elif not facts.lookups:
            raise TraceError(f"{file} has no lookups; record while engines work")
        else:
            wanted = sorted(set(sizes)) or default_sizes(facts.working_set_bytes)
            points = replay(read_trace(file), facts, wanted)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    recorded = None if facts.recorded_hits is None else facts.recorded_hits / max(facts.asked_chunks, 1)
    if png is not None:
        try:
            draw(points, recorded, png)
        except ImportError:
            raise click.ClickException("--png needs matplotlib, an extra: pip install 'kvgrpc[plot]'") from None
        except OSError as error:
            raise click.ClickException(f"{png}: {error.strerror}") from None
    if json_form:
        about = {"lookups": facts.lookups, "stores": facts.stores, "asked_chunks": facts.asked_chunks}
        about |= {"working_set_bytes": facts.working_set_bytes}
        curve = [asdict(point) for point in points]
        click.echo(json.dumps({**about, "recorded_hit_rate": recorded, "curve": curve}, indent=2))
        return
    _print(facts, recorded, points)


def _print(facts: Facts, recorded: float | None, points: list[Point]) -> None:
    click.echo(
        f"{facts.lookups} lookups of {facts.asked_chunks} chunks, {facts.stores} stores; everything that was stored "
        f"has {format_size(facts.working_set_bytes)}"
    )
    if recorded is not None:
        click.echo(f"hit rate as recorded: {recorded:.1%}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("L1", "hit rate", "hit chunks", "evicted chunks"):
        table.add_column(column, justify="right")
    for point in points:
        row = (f"{point.hit_rate:.1%}", f"{point.hit_chunks:,}", f"{point.evicted_chunks:,}")
        table.add_row(format_size(point.size_bytes), *row)
    Console().print(table)
