# SPDX-License-Identifier: Apache-2.0
"""``make hybrid-bench``: what hybrid models cost those whose layers all need everything: nothing, within 3 %.

Two commits, from before hybrid models and of today, each built and installed into a folder of its own, each with its
own server and its own client. Both servers run at once and take turns, forwards and backwards; a ratio is taken of two
turns of each, and its figure is the median of those. Named the same commit twice it shows how much is chance.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
from rich.console import Console

from benchmarks.hybrid_side import CASES
from benchmarks.peer_lmcache import ROOT, Client, ask, in_turns, running
from kvgrpc.bench.processes import BenchError, unwind_at_sigterm, wait_until
from kvgrpc.bench.results import Figure, Report, figure, versions
from kvgrpc.bench.start import arena_bytes, resident_bytes
from kvgrpc.cli.bench import as_table

BEFORE = "c9471c2"
L1_MIB = 512
LENGTHS = ("8K", "32K")
GOAL = "<= 1.03"
RUN = """
import runpy, sys
site, packages, program = sys.argv[1:4]
sys.path[:0], sys.path[len(sys.path):] = [site], [packages]
del sys.argv[1:4]
run = runpy.run_path if program.endswith(".py") else runpy.run_module
run(program, run_name="__main__")
"""
"""Without ``site``: what is installed for development finds today's kvgrpc before anything else."""


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.PIPE).stdout


def installed(commit: str) -> Path:
    """The folder with the package of a commit, built now unless it is there."""
    folder = ROOT / "build" / "commits" / commit
    if not (folder / "whole").exists():
        with tempfile.TemporaryDirectory(prefix="kvgrpc-") as source:
            subprocess.run(["tar", "-x", "-C", source], check=True, input=git("archive", commit))
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--upgrade"]
            subprocess.run([*pip, "--target", str(folder), source], check=True)
        (folder / "whole").touch()
    return folder


class Side:
    """One commit's server and client, as long as ``stack``."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, commit: str) -> None:
        self._site, socket = installed(commit), folder / name
        flags = ["--log-level", "warning", "--l1-size", f"{L1_MIB}MiB", "--socket", str(socket)]
        server = stack.enter_context(running(self._command("kvgrpc", "serve", *flags), folder / f"{name}-server"))
        wait_until(lambda: socket.exists() or server.poll() is not None, f"the server of {commit}")
        wait_until(lambda: arena_bytes(resident_bytes(server.pid)) >= L1_MIB << 20, "the arena to be warm")
        log = folder / f"{name}-client"
        command = self._command(str(ROOT / "benchmarks" / "hybrid_side.py"), f"unix:{socket}")
        self.client = Client(stack.enter_context(running(command, log, talks=True)), log)
        if not (used := self.client.receive()["kvgrpc"]).startswith(str(self._site)):
            raise BenchError(f"the client of {commit} has the package of {used}")

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", RUN, str(self._site), sysconfig.get_path("platlib"), *words]


def pairs(values: Sequence[float]) -> list[float]:
    """Means of each two turns that followed each other, one forwards and one backwards."""
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]


class Bench:
    """Takes figures. ``say`` tells how far it is."""

    def __init__(self, sides: dict[str, Side], before: str, repetitions: int, say: Callable[[str], None]) -> None:
        self._sides, self._of, self._repetitions, self._say = sides, f"commit {before}", repetitions, say
        self.figures: list[Figure] = []

    def take(self, names: dict[str, str], do: str, **order: object) -> None:
        """``names`` of figures by what is measured; the first two turns do not count."""

        def act(side: Side) -> dict[str, float]:
            return ask([side.client], do, **order)[0]

        acts = {name: lambda side=side: act(side) for name, side in self._sides.items()}
        found = in_turns(acts, 2 * (self._repetitions + 1))
        for what, name in names.items():
            took = {side: pairs([turn[what] for turn in turns[2:]]) for side, turns in found.items()}
            for side, values in took.items():
                self.figures.append(figure(f"{name}, {side}", [value * 1e6 for value in values], "us"))
            ratios = [after / before for after, before in zip(took["after"], took["before"], strict=True)]
            self.figures.append(figure(f"{name} ratio", ratios, "ratio", of=self._of, goal=GOAL))
            self._say(f"{name}: {median(ratios):.3f} of before, {min(ratios):.3f} to {max(ratios):.3f}")


@click.command(help=__doc__)
@click.option("--before", default=BEFORE, show_default=True, help="The commit to compare with.")
@click.option("--after", default="HEAD", show_default=True, help="The commit that is compared.")
@click.option("--repetitions", default=20, show_default=True, help="Pairs of turns of each side.")
@click.option("--seconds", default=0.5, show_default=True, help="How long a turn of lookups is.")
@click.option("--copies", default=6, show_default=True, help="Stores, and retrieves, in a turn.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result: a file, or a folder.")
def main(before: str, after: str, repetitions: int, seconds: float, copies: int, json_path: Path | None) -> None:
    unwind_at_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 120)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    commits = {
        name: git("rev-parse", "--short=12", f"{commit}^{{commit}}").decode().strip()
        for name, commit in (("before", before), ("after", after))
    }
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder, ExitStack() as stack:
        try:
            sides = {name: Side(stack, Path(folder), name, commit) for name, commit in commits.items()}
            bench = Bench(sides, commits["before"], repetitions, say)
            for length in LENGTHS:
                bench.take({"lookup": f"lookup/{length} hit, hashes"}, "lookups", length=length, seconds=seconds)
            for case in CASES:
                names = {direction: f"{direction}/{case}" for direction in ("store", "retrieve")}
                bench.take(names, "copies", case=case, count=copies)
        except BenchError as error:
            raise click.ClickException(str(error)) from None
    figures = tuple(bench.figures)
    console.print(as_table(figures))
    if json_path is not None:
        say(f"written: {Report('hybrid', figures, versions=versions() | commits).write(json_path)}")


if __name__ == "__main__":
    main()
