# SPDX-License-Identifier: Apache-2.0
"""The command, run as a user runs it; and loose bounds on what it measures, so that a slip of a multiple is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.plot import main as plot
from kvgrpc.bench.processes import BenchError
from kvgrpc.bench.results import Figure, Report, read
from kvgrpc.bench.suite import NAMES
from kvgrpc.cli import bench as command
from tests.served import wait_until

QUICK_S = 60.0

COPIES = [f"copies/{way} {case}" for way in ("store", "retrieve") for case in ("32x32K", "2x16K", "2x4K")]
FIGURES = {
    *("core/lookup and release", "core/lookup", "core/reserve and commit", "core/evict"),
    *("imports/client", "start/until SERVING with 4GiB", "start/memory beside the arena"),
    *("health/p50", "health/p50 ratio", "health/8 in flight ratio", "lookup/empty call"),
    *(f"lookup/{kind} {length}" for kind in ("tokens", "hashes") for length in ("1K", "8K", "32K", "128K")),
    *(f"lookup/{kind} {length} ratio" for kind in ("tokens", "hashes") for length in ("32K", "128K")),
    *(
        f"lookups/{length} {found} {clients}"
        for length in ("1K", "8K", "32K", "128K")
        for found in ("hit", "miss")
        for clients in ("1 client", "4 clients")
    ),
    *("turn/tokens 128K", "turn/hashes 128K"),
    *(f"{name}{what}" for name in COPIES for what in ("", " ratio", " alone ratio")),
}

FACTOR = 2.0
"""How much looser than its goal a bound is, but for those of LOOSE."""

LOOSE = {
    # name: (factor, why it is not 2)
    "core/lookup and release": (6, "absolute time: 1.2 when alone, and what shares the core is paid for too"),
    "core/reserve and commit": (20, "absolute time: 3.5 to 5 when alone; a piece, a slot and a chunk are objects each"),
    "core/evict": (10, "absolute time: 1.3 to 2 when alone; it frees slot by slot"),
    "imports/client": (5, "absolute time of a process that starts among others"),
    "start/until SERVING with 4GiB": (
        8,
        "absolute time: 2.2 when alone, since all memory is allocated before it serves",
    ),
    "turn/tokens 128K": (6, "absolute time: a turn is as long as the scheduler of the system keeps the loop waiting"),
    "turn/hashes 128K": (6, "absolute time: a turn is as long as the scheduler of the system keeps the loop waiting"),
    "copies/store 2x4K ratio": (4, "0.25 to 0.55: the core's 512 reservations of the call take as long as the copy"),
    "copies/retrieve 2x4K ratio": (4, "0.3 to 0.4: runs of 4 KiB alone are at half, and the call names 8,192 blocks"),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, float]:
    """Figures of a quick run, and how many seconds it took."""
    path = tmp_path_factory.mktemp("bench") / "quick.json"
    began = time.monotonic()
    line = [sys.executable, "-m", "kvgrpc", "bench", "--quick", "--json", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=580)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    assert "core/evict" in done.stdout and str(path) in done.stdout
    return read(path), took


@pytest.mark.timeout(600)
def test_a_quick_run_has_every_figure_and_is_quick(quick: tuple[Report, float]):
    """Less than a minute, and on a machine that others have, too, not many times as long."""
    report, took = quick
    assert report.kind == "quick"
    assert {one.name for one in report.figures} == FIGURES
    assert {one.name.split("/")[0] for one in report.figures} == set(NAMES)
    others = os.getloadavg()[0] / (os.cpu_count() or 1)  # what else runs takes its share of the time
    assert took < 3 * QUICK_S * max(1.0, others)


@pytest.mark.timeout(600)
def test_figures_keep_loose_bounds(quick: tuple[Report, float], tmp_path: Path):
    """Of the best repetition, in one of three runs: what else runs on the machine spoils some of them."""
    missed = beyond_loose_bounds(quick[0])
    for again in range(2):
        if missed:
            path = tmp_path / f"{again}.json"
            only = [word for name in sorted({one.split("/")[0] for one in missed}) for word in ("--only", name)]
            line = [sys.executable, "-m", "kvgrpc", "bench", "--quick", *only, "--json", str(path)]
            subprocess.run(line, capture_output=True, check=True, timeout=250)
            names = {text.split(":")[0] for text in missed}
            missed = [text for text in beyond_loose_bounds(read(path)) if text.split(":")[0] in names]
    assert missed == []
    assert set(LOOSE) <= FIGURES


def beyond_loose_bounds(report: Report) -> list[str]:
    missed: list[str] = []
    for one in report.figures:
        factor = LOOSE.get(one.name, (FACTOR, ""))[0]
        best = one.high if one.goal and one.goal.startswith(">=") else one.low
        if best is not None and not Figure(one.name, best, one.unit, one.of, one.goal).within(factor):
            missed.append(f"{one.name}: {best} {one.unit}, {factor} times as loose as {one.goal}")
    return missed


@pytest.mark.timeout(600)
def test_plots_of_the_same_figures_are_the_same_bytes(quick: tuple[Report, float], tmp_path: Path):
    file = quick[0].write(tmp_path / "figures.json")
    drawn: list[dict[str, bytes]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plot(str(file), str(tmp_path / name))
        drawn.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert drawn[0] == drawn[1] and set(drawn[0]) == {"lookup-latency.svg", "goals.svg"}


def test_strict_fails_when_a_goal_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measure(name: str, quick: bool) -> list[Figure]:
        return [Figure(f"{name}/x", 2.0, "ratio", goal="<= 1" if name == "health" else "<= 3")]

    monkeypatch.setattr(command, "measure", measure)
    run = CliRunner().invoke
    assert run(command.bench, ["--strict"]).exit_code == 1
    assert run(command.bench, []).exit_code == 0
    assert run(command.bench, ["--strict", "--only", "core", "--json", str(tmp_path)]).exit_code == 0
    assert [one.name for one in read(next(tmp_path.glob("*-bench.json"))).figures] == ["core/x"]


def test_what_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch):
    def measure(name: str, quick: bool) -> list[Figure]:
        raise BenchError("the server does not serve")

    monkeypatch.setattr(command, "measure", measure)
    done = CliRunner().invoke(command.bench, ["--only", "start"])
    assert done.exit_code == 1 and "start: the server does not serve" in done.output


def test_a_run_that_is_ended_leaves_no_process():
    line = [sys.executable, "-m", "kvgrpc", "bench", "--only", "lookups"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        running = psutil.Process(process.pid)
        wait_until(lambda: len(running.children(recursive=True)) >= 6, 60)  # itself again, a server, four clients
        children = running.children(recursive=True)
        process.terminate()
        process.wait(60)
    assert psutil.wait_procs(children, 30)[1] == []


def test_the_command_line_loads_no_measurement():
    code = (
        "import sys, kvgrpc.cli.root; print([n for n in sys.modules if n.startswith(('kvgrpc.bench.c', 'matplotlib'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
