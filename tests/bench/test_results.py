# SPDX-License-Identifier: Apache-2.0
"""The form of results: what is written is read back, what differs from it is refused, every committed file holds it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import __version__
from kvgrpc.bench.results import Figure, Report, ResultError, commit, figure, parse, read

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

REPORT = Report(
    "local",
    (
        figure("lookup", [3.0, 1.0, 2.0], "ratio", of="empty call", goal="<= 2.0"),
        figure("store", [3.0, 1.0, 2.0], "ratio", of="contiguous copy", goal=">= 2.5", pick=max),
        Figure("lookups", 1234567.0, "1/s"),
    ),
)


def test_a_figure_is_the_median_with_its_spread_and_knows_whether_it_met_its_goal():
    lookup, store, lookups = REPORT.figures
    assert (lookup.value, lookup.low, lookup.high, lookup.n, lookup.met) == (2.0, 1.0, 3.0, 3, True)
    assert (store.value, store.met, lookups.met) == (3.0, True, None)
    late, slow = Figure("x", 3.9, "ratio", goal="<= 2.0"), Figure("x", 1.26, "ratio", goal=">= 2.5")
    assert (late.met, late.within(2), slow.met, slow.within(2)) == (False, True, False, True)
    assert not late.within(1.9) and not slow.within(1.9)


def test_what_is_written_is_read_back(tmp_path: Path):
    path = REPORT.write(tmp_path)
    assert path.name == f"{REPORT.date}-local.json"
    again = read(path)
    assert again.figures[:2] == REPORT.figures[:2] and again.figures[2].value == 1235000.0  # four digits
    assert (again.machine, again.versions, again.commit) == (REPORT.machine, REPORT.versions, REPORT.commit)
    assert set(json.loads(path.read_text())) == {"kind", "date", "commit", "machine", "versions", "figures"}


def test_a_value_that_rounds_onto_its_goal_is_written_as_it_reads():
    report = Report("local", (Figure("x", 1.150004, "ratio", goal="<= 1.15"),))
    assert parse(report.to_json()).figures[0].met is True


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(REPORT.to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("commit"),
        lambda raw: raw.update(note="x"),
        lambda raw: raw.update(date="1.2.2025"),
        lambda raw: raw.update(kind="Local Run"),
        lambda raw: raw["machine"].update(host="x"),
        lambda raw: raw["versions"].update(python=3),
        lambda raw: raw["figures"][0].pop("of"),
        lambda raw: raw["figures"][0].update(more=1),
        lambda raw: raw["figures"][0].update(value="2"),
        lambda raw: raw["figures"][0].update(value=True),
        lambda raw: raw["figures"][0].update(value=2.5),  # met is wrong then
        lambda raw: raw["figures"][0].update(goal="about 2"),
        lambda raw: raw["figures"][0].update(n=1.5),
        lambda raw: raw["figures"].append(raw["figures"][0]),
        lambda raw: raw.update(figures={}),
    ],
)
def test_what_differs_is_refused(change: Callable[[dict[str, Any]], object]):
    with pytest.raises(ResultError):
        parse(changed(change))


def test_the_commit_is_of_a_changed_tree_where_more_than_results_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, result = tmp_path / "kvgrpc" / "bench" / "results.py", tmp_path / "benchmarks" / "results" / "a.json"
    for file in (source, result):
        file.parent.mkdir(parents=True)
        file.write_text("")
    monkeypatch.setattr("kvgrpc.bench.results.__file__", str(source))
    assert commit() == f"v{__version__}", "no repository"
    for step in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "a")):
        who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *who, *step], check=True, timeout=60)
    clean = commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    result.write_text("{}")
    assert commit() == clean
    source.write_text("#")
    assert commit() == f"{clean}-dirty"


def test_committed_results_hold_the_form_and_are_named_by_it():
    for path in sorted(RESULTS.glob("*")):
        report = read(path)
        assert path.name == report.file_name
        assert not report.commit.endswith("-dirty"), "a committed result is of a committed tree"
