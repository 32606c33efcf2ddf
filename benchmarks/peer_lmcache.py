# SPDX-License-Identifier: Apache-2.0
"""This service beside its closest peer, LMCache, in one run on one machine (``make peer-bench``).

Both servers run with their defaults and listen on the loopback over TCP; each client is a process of its own, in the
environment of its side (peer_side.py). Sides take turns, forwards and backwards, so that what else the machine does
hits them alike. A ratio is taken within each repetition, and its figure is the median of those.

A lookup is all that an engine does until the result is there and, on a hit, its locks are free again: ours is Lookup
and FreeLookupLocks, the peer's LOOKUP, QUERY_PREFETCH_STATUS and FREE_LOOKUP_LOCKS. Both are given a tuple of token
ids, since that is what the peer's client takes; ours packs them within the measured time. The end of the request comes
after that; "and ended" counts it as well.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
from rich.console import Console

from kvgrpc.bench.processes import BenchError, unwind_at_sigterm
from kvgrpc.bench.results import Figure, Report, figure, versions
from kvgrpc.cli.bench import as_table

ROOT = Path(__file__).parent.parent
PEER_BIN = ROOT / ".venv-peer" / "bin"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1", "PYTHONWARNINGS": "ignore"}
LENGTHS = {"1K": 1 << 10, "8K": 8 << 10, "32K": 32 << 10, "128K": 128 << 10}
LOOKUP_GOALS = {"zmq": {"1K": 2, "32K": 4, "128K": 4}, "grpc": {"1K": 4, "32K": 8, "128K": 8}}
COPY_GOALS = {"store": 6, "retrieve": 1.7}
CLIENTS = 4
COPIES = 3
"""Calls in a turn."""
OURS_MUST_BE_ZERO = ("copies/wrong bytes, kvgrpc", "copies/acknowledged, not found, kvgrpc")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Side:
    """Who is measured, and how: ``kind`` is its engine in peer_clients.py, which is told ``mode``."""

    kind: str
    transport: str
    mode: str
    imports: str

    @property
    def python(self) -> str:
        return sys.executable if self.kind == "Ours" else str(PEER_BIN / "python")

    def address(self, port: int) -> str:
        return {"": "", "zmq": "tcp://", "grpc": "grpc://"}[self.transport] + f"127.0.0.1:{port}"

    def server(self, port: int, gib: int, folder: Path) -> list[str]:
        local = "127.0.0.1"
        if self.kind == "Ours":
            flags = ["--socket", str(folder / f"{port}"), "--listen", f"{local}:{port}", "--l1-size", f"{gib}GiB"]
            return [self.python, "-m", "kvgrpc", "serve", *flags]
        flags = ["--transport", self.transport, "--host", local, "--port", str(port), "--l1-size-gb", str(gib)]
        flags += ["--http-host", local, "--http-port", str(free_port()), "--prometheus-port", str(free_port())]
        flags += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", self.mode]
        flags += ["--shm-name", f"kvgrpc-peer-{port}"] if self.mode == "engine_driven" else []
        return [str(PEER_BIN / "lmcache"), "server", *flags]


def peer(transport: str, mode: str) -> Side:
    imports = "from lmcache.v1.multiprocess.transport.factory import RequestClientFactory;"
    imports += "from lmcache.v1.multiprocess.transfer_context import create_transfer_context;"
    return Side("Peer", transport, mode, f"{imports}import lmcache.v1.multiprocess.transport.{transport}_impl.client")


OURS = Side("Ours", "", "ids", "from kvgrpc.client import Client, SchedulerClient, WorkerClient")
SIDES = {"kvgrpc": OURS, "zmq": peer("zmq", "engine_driven"), "grpc": peer("grpc", "engine_driven")}
FORMS = {f"kvgrpc, {mode}": replace(OURS, mode=mode) for mode in ("packed", "hashes")}
COPIERS = {"kvgrpc": OURS} | {
    f"{transport} {mode}": peer(transport, mode)
    for mode in ("engine_driven", "lmcache_driven")
    for transport in ("zmq", "grpc")
}


# ---- processes ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def running(command: Sequence[str], log: Path, *, talks: bool = False) -> Generator[subprocess.Popen[str], None, None]:
    """A process whose output goes into ``log``; one that talks has pipes, and ends when its input does."""
    with log.open("w") as file:
        pipes = (subprocess.PIPE, subprocess.PIPE) if talks else (subprocess.DEVNULL, file)
        process = subprocess.Popen(
            command, stdin=pipes[0], stdout=pipes[1], stderr=file, text=True, cwd=ROOT, env=os.environ | QUIET
        )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Client:
    """A client process: owes an answer to each order."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._answers, self._log = process.stdin, process.stdout, log

    def send(self, do: str, **order: object) -> None:
        try:
            self._orders.write(json.dumps({"do": do, **order}) + "\n")
            self._orders.flush()
        except BrokenPipeError:
            pass  # it has ended, and ``receive`` says so

    def receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise BenchError(f"a client has ended. Its last words: {self._log.read_text()[-2000:]}")
        return json.loads(line)


def ask(clients: Sequence[Client], do: str, **order: object) -> list[dict[str, Any]]:
    """The answers of clients that work at the same time."""
    for client in clients:
        client.send(do, **order)
    return [client.receive() for client in clients]


def in_turns(acts: dict[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """What each act answered; every second time they go backwards."""
    answers: dict[str, list[T]] = {name: [] for name in acts}
    for turn in range(repetitions):
        for name in acts if turn % 2 == 0 else reversed(acts):
            answers[name].append(acts[name]())
    return answers


class Bench:
    """One run: starts what is measured, takes figures. ``say`` tells how far it is."""

    def __init__(self, folder: Path, repetitions: int, seconds: float, say: Callable[[str], None]) -> None:
        self._folder, self._repetitions, self._seconds, self._say = folder, repetitions, seconds, say
        self._started = 0
        self.figures: list[Figure] = []
        self.versions: dict[str, str] = {}

    @contextmanager
    def client(self, side: Side) -> Generator[Client, None, None]:
        self._started += 1
        log = self._folder / f"client-{self._started}"
        with running([side.python, "-m", "benchmarks.peer_side", side.kind], log, talks=True) as process:
            yield Client(process, log)

    @contextmanager
    def server(self, side: Side, gib: int, asker: Client) -> Generator[tuple[str, float, int], None, None]:
        """A server that has answered a call of ``asker``: its address, the seconds that took, its process id."""
        port = free_port()
        address = side.address(port)
        began = time.perf_counter()
        with running(side.server(port, gib, self._folder), self._folder / f"server-{port}") as process:
            try:
                ask([asker], "reach", address=address)
                self._say(f"a server of {side.transport or 'kvgrpc'} {side.mode} answers")
                yield address, time.perf_counter() - began, process.pid
            finally:  # the peer leaves its memory when it is killed
                Path(f"/dev/shm/lmcache_l1_pool_kvgrpc-peer-{port}").unlink(missing_ok=True)

    def add(self, name: str, values: Sequence[float], unit: str, of: str = "", goal: float | None = None) -> None:
        self.figures.append(figure(name, values, unit, of=of, goal=None if goal is None else f">= {goal:g}"))

    # ---- starts -----------------------------------------------------------------------------------------------------

    def starts(self) -> None:
        """From nothing to the first answer, with 4 GiB; memory beside those; what a client's import takes."""
        with ExitStack() as stack:
            askers = {name: stack.enter_context(self.client(side)) for name, side in SIDES.items()}
            for name, asker in askers.items():
                ask([asker], "load", address=SIDES[name].address(1))

            def start(name: str) -> tuple[float, float]:
                with self.server(SIDES[name], 4, askers[name]) as (_, seconds, process_id):
                    return seconds, resident_mib(process_id)

            self._say("starts")
            found = in_turns({name: lambda name=name: start(name) for name in SIDES}, self._repetitions)
        imports = in_turns({name: lambda side=side: import_s(side) for name, side in SIDES.items()}, self._repetitions)
        for name in SIDES:
            self.add(f"start/first answer, 4 GiB, {name}", [seconds for seconds, _ in found[name]], "s")
            self.add(f"memory/idle, beside the arena, {name}", [mib for _, mib in found[name]], "MiB")
            self.add(f"import/client, {name}", imports[name], "s")

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def lookups(self) -> None:
        """Empty calls, then lookups of every length, hit and miss, of one client and of several."""
        with ExitStack() as servers, ExitStack() as stack:
            self._say("lookups: starting")
            clients = {
                name: [stack.enter_context(self.client(side)) for _ in range(CLIENTS)] for name, side in SIDES.items()
            }
            addresses = {
                name: servers.enter_context(self.server(side, 1, clients[name][0]))[0] for name, side in SIDES.items()
            }
            for name, side in FORMS.items():
                clients[name], addresses[name] = [stack.enter_context(self.client(side))], addresses["kvgrpc"]
            seed = 0
            for name, side in (SIDES | FORMS).items():
                for client in clients[name]:
                    seed += 1
                    client.send("open", address=addresses[name], mode=side.mode, shape="small", seed=seed)
                for client in clients[name]:
                    self.versions |= client.receive()
                ask(clients[name], "keep")

            self._say("lookups: prompts are stored")

            def call(name: str) -> float:
                return ask(clients[name][:1], "calls", seconds=self._seconds)[0]["us"]

            empty = in_turns({name: lambda name=name: call(name) for name in SIDES}, self._repetitions)
            for name in SIDES:
                self.add(f"empty call/{name}", empty[name], "us")
            for length in LENGTHS:
                for hit in (True, False):
                    for count in (1, CLIENTS):
                        self._lookups(clients, length, hit, count)

    def _lookups(self, clients: Mapping[str, list[Client]], length: str, hit: bool, count: int) -> None:
        order = {"tokens": LENGTHS[length], "hit": hit, "seconds": self._seconds}

        def rates(name: str) -> tuple[float, float]:
            answers = ask(clients[name][:count], "lookups", **order)
            return sum(one["rate"] for one in answers), sum(one["ended"] for one in answers)

        names = [name for name in clients if len(clients[name]) >= count]
        found = in_turns({name: lambda name=name: rates(name) for name in names}, self._repetitions)
        case = f"lookups/{length} {'hit' if hit else 'miss'}, {count} client{'s' * (count > 1)}"
        for name in names:
            self.add(f"{case}, {name}", [rate for rate, _ in found[name]], "1/s")
        for name, goals in LOOKUP_GOALS.items():
            pairs = list(zip(found["kvgrpc"], found[name], strict=True))
            of, goal = f"the peer over {name}", goals.get(length)
            self.add(f"{case}, ratio to {name}", [ours[0] / its[0] for ours, its in pairs], "ratio", of, goal)
            self.add(f"{case} and ended, ratio to {name}", [ours[1] / its[1] for ours, its in pairs], "ratio", of)
        self._say(f"{case}: " + ", ".join(f"{name} {median(one[0] for one in found[name]):.0f}" for name in names))

    # ---- copies -----------------------------------------------------------------------------------------------------

    def copies(self) -> None:
        """128 MiB a call in shuffled blocks; the first turn, over memory that nobody has touched, does not count."""
        with ExitStack() as servers, ExitStack() as stack:
            self._say("copies: starting")
            clients = {name: stack.enter_context(self.client(side)) for name, side in COPIERS.items()}
            for seed, (name, side) in enumerate(COPIERS.items()):
                address = servers.enter_context(self.server(side, 1, clients[name]))[0]
                order = {"address": address, "mode": side.mode, "shape": "copies", "seed": seed}
                self.versions |= ask([clients[name]], "open", **order)[0]

            def copy(name: str) -> dict[str, Any]:
                found = ask([clients[name]], "copies", count=COPIES)[0]
                rates = ", ".join(f"{direction} {median(found[direction]):.2f}" for direction in COPY_GOALS)
                self._say(f"copies, {name}: {rates} GB/s")
                return found

            found = in_turns({name: lambda name=name: copy(name) for name in COPIERS}, self._repetitions + 1)
        for direction, goal in COPY_GOALS.items():
            rates = {name: [median(turn[direction]) for turn in turns[1:]] for name, turns in found.items()}
            for name, values in rates.items():
                self.add(f"{direction}/{name}", values, "GB/s")
            best = max((name for name in rates if name != "kvgrpc"), key=lambda name: median(rates[name]))
            ratios = [ours / its for ours, its in zip(rates["kvgrpc"], rates[best], strict=True)]
            self.add(f"{direction}/ratio", ratios, "ratio", f"the peer's best path: {best}", goal)
        for name, turns in found.items():
            of = f"{COPIES * len(turns)} copies"
            self.figures.append(
                Figure(f"copies/acknowledged, not found, {name}", sum(t["unseen"] for t in turns), "calls", of)
            )
            self.figures.append(Figure(f"copies/wrong bytes, {name}", sum(t["wrong"] for t in turns), "calls", of))


def resident_mib(process_id: int) -> float:
    """Memory of a process without what it shares, which is where both servers keep KV data."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "RssShmem"))}
    return (kib["VmRSS"] - kib["RssShmem"]) / 1024


def import_s(side: Side) -> float:
    program = f"import time; t = time.perf_counter(); {side.imports}; print('took', time.perf_counter() - t)"
    command = [side.python, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | QUIET)
    return float(done.stdout.rpartition("took ")[2])


# ---- the command ----------------------------------------------------------------------------------------------------


@click.command(help=__doc__)
@click.option("--repetitions", default=6, show_default=True, help="Turns of each side.")
@click.option("--seconds", default=0.4, show_default=True, help="How long a turn of calls or lookups is.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS := ["starts", "lookups", "copies"]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result: a file, or a folder.")
def main(repetitions: int, seconds: float, parts: tuple[str, ...], json_path: Path | None) -> None:
    if not PEER_BIN.exists():
        raise click.ClickException("the peer's environment is missing: make peer-env")
    unwind_at_sigterm()
    console, began = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {text}", markup=False, highlight=False)

    with tempfile.TemporaryDirectory(prefix="kvgrpc-peer-") as folder:
        bench = Bench(Path(folder), repetitions, seconds, say)
        try:
            for part in parts or PARTS:
                getattr(bench, part)()
        except BenchError as error:
            raise click.ClickException(str(error)) from None
    console.print(as_table(tuple(bench.figures)))
    if any(one.value for one in bench.figures if one.name in OURS_MUST_BE_ZERO):
        raise click.ClickException("kvgrpc returned wrong bytes, or did not find what it had acknowledged")
    if json_path is not None:
        say(f"written: {Report('peer', tuple(bench.figures), versions=versions() | bench.versions).write(json_path)}")


if __name__ == "__main__":
    main()
