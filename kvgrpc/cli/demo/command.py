# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc demo``: a server, then two engine processes one after the other, then the verdict."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvgrpc.api import Hello, ServerInfo
from kvgrpc.cli.demo import shared
from kvgrpc.cli.demo.report import Check, FirstReport, Report, SecondReport, checks, from_line
from kvgrpc.client.aio import AioClient
from kvgrpc.config.values import format_size
from kvgrpc.core.errors import Refusal

START_S = 120.0
STOP_S = 30.0
ENGINE_S = 600.0
LOG_LINES = 20


class TorchMissingError(click.ClickException):
    """The machine lacks what the demo needs; as after a wrong option, trying again changes nothing."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__("the demo's engines need torch, which is an extra: pip install 'kvgrpc[torch]'")


@click.command()
@click.option("--address", metavar="ADDRESS", help="use a running server of this node instead of starting one")
@click.option("--prompt-tokens", default=2112, show_default=True, type=click.IntRange(512, 16384), help="prompt length")
def demo(address: str | None, prompt_tokens: int) -> None:
    """Send a real transformer's KV cache through the service.

    From one process into another: the first engine computes a prompt and stores its KV; the second, a fresh process,
    retrieves it, decodes, and then computes everything itself: every byte, logit and token must be equal. Exit code 1
    if anything differs or fails, 2 if torch is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise TorchMissingError
    console = Console()
    try:
        with a_server(address, console) as target:
            info = asyncio.run(_shake_hands(target, wait_for_server=address is None))
            console.print(f"engine 1 computes {prompt_tokens} tokens and stores their KV ...")
            first = _run_engine(FirstReport, "first", target, prompt_tokens)
            console.print("engine 2 retrieves it, decodes, and computes everything again to compare ...")
            second = _run_engine(SecondReport, "second", target, prompt_tokens)
    except Refusal as refusal:
        raise click.ClickException(f"the server did not answer: {refusal.message}") from None
    verdict = checks(first, second, info.chunk_tokens)
    _show(console, first, second, verdict)
    if not all(check.holds for check in verdict):
        raise SystemExit(1)


@contextmanager
def a_server(address: str | None, console: Console) -> Generator[str, None, None]:
    """The address of a running server, or of one that lives as long as the context."""
    if address is not None:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        socket, log_file = Path(folder) / "kvgrpc.sock", Path(folder) / "log"
        command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(socket), "--log-level", "warning"]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603  (our own module)
        console.print(f"server: process {process.pid}, unix:{socket}")
        try:
            wait_for_socket(process, socket, log_file)
            try:
                yield f"unix:{socket}"
            except (click.ClickException, Refusal):
                if process.poll() is None:
                    raise
                text = f"the server went away during the demo: {_ended(process.returncode)}{_last_lines(log_file)}"
                raise click.ClickException(text) from None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_socket(process: subprocess.Popen[bytes], socket: Path, log_file: Path, timeout_s: float = START_S) -> None:
    """Raises ClickException when the server ends, or does not listen in time; with the end of its log."""
    end = time.monotonic() + timeout_s
    while not socket.exists():
        if process.poll() is not None:
            raise click.ClickException(f"the server did not start: {_ended(process.returncode)}{_last_lines(log_file)}")
        if time.monotonic() > end:
            text = f"the server did not start: process {process.pid} runs, but did not listen within {timeout_s:g} s"
            raise click.ClickException(text + _last_lines(log_file))
        time.sleep(0.02)


def _ended(status: int) -> str:
    return f"it ended with exit status {status}" if status >= 0 else f"it was ended by {signal.Signals(-status).name}"


def _last_lines(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "; its log ends with:" + "".join(f"\n  {line}" for line in lines) if lines else "; its log is empty"


async def _shake_hands(address: str, wait_for_server: bool) -> ServerInfo:
    async with AioClient(address) as client:
        hello = Hello(client_version="kvgrpc demo")
        return await client.handshake(hello, timeout_s=START_S, wait_for_server=wait_for_server)


def _run_engine(kind: type[Report], part: str, address: str, prompt_tokens: int) -> Report:
    """One engine process from start to end; its report is the last line that it prints."""
    pool_name = f"kvgrpc-demo-{secrets.token_hex(8)}"
    command = [sys.executable, "-m", "kvgrpc.cli.demo.engine", part]
    command += ["--address", address, "--pool-name", pool_name, "--prompt-tokens", str(prompt_tokens)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=ENGINE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"the {part} engine took longer than {ENGINE_S:.0f} s") from None
    finally:
        shared.unlink(pool_name)
    lines = done.stdout.decode().splitlines()
    if done.returncode != 0 or not lines:
        raise click.ClickException(f"the {part} engine failed with exit code {done.returncode}")
    return from_line(kind, lines[-1])


def _show(console: Console, first: FirstReport, second: SecondReport, verdict: tuple[Check, ...]) -> None:
    with_cache, without = second.cached_first_token_s, second.full_first_token_s
    table = Table.grid(padding=(0, 2))
    for name, text in (
        ("hit", f"{second.hit_tokens} of {second.prompt_tokens} tokens"),
        ("store", _rate(first.stored_bytes, first.store_s)),
        ("retrieve", f"{_rate(second.retrieved_bytes, second.retrieve_s)}, lookup {second.lookup_s * 1000:.1f} ms"),
        ("first token", f"{with_cache:.3f} s with the cache, {without:.3f} s without: {without / with_cache:.1f} x"),
        ("tokens", " ".join(str(token) for token in second.cached_tokens)),
    ):
        table.add_row(f"[bold]{name}[/]", text)
    console.print()
    console.print(table)
    console.print()
    for check in verdict:
        console.print(f"[green]ok[/]    {check.text}" if check.holds else f"[bold red]FAILED[/] {check.text}")


def _rate(size_bytes: int, seconds: float) -> str:
    return f"{format_size(size_bytes)} in {seconds * 1000:.1f} ms, {size_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
