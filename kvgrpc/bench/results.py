# SPDX-License-Identifier: Apache-2.0
"""Results: figures with their goals, where and with what they were taken, and their JSON form.

Imports the standard library only, so that a script of another environment can write results as well.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from kvgrpc import __version__

KINDS = re.compile(r"[a-z][a-z0-9-]*")
_GOAL = re.compile(r"(<=|>=) (\d+(?:\.\d+)?)")
_SPREAD = ("low", "high", "n")
_PACKAGES = ("grpcio", "protobuf", "numpy")


class ResultError(ValueError):
    """A file that is not a result; the text says where it differs."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. ``of`` says what a ratio is taken of ("" for an absolute value). ``goal`` is "<= 1.15" or ">= 0.85",
    or None when nothing is asked. ``low`` and ``high`` are the least and the most of ``n`` repetitions."""

    name: str
    value: float
    unit: str
    of: str = ""
    goal: str | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        if self.goal is not None:
            _goal_parts(self.goal)

    @property
    def met(self) -> bool | None:
        """None without a goal."""
        return None if self.goal is None else self.within(1.0)

    def within(self, factor: float) -> bool:
        """Whether the value keeps a goal that is ``factor`` times as loose; True without a goal."""
        if self.goal is None:
            return True
        sign, bound = _goal_parts(self.goal)
        return self.value <= bound * factor if sign == "<=" else self.value >= bound / factor

    @property
    def share(self) -> float | None:
        """How far towards the bound of its goal, 1.0 being the bound itself: above 1 a "<=" is missed, a ">=" is
        kept."""
        return None if self.goal is None else self.value / _goal_parts(self.goal)[1]


def figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    of: str = "",
    goal: str | None = None,
    pick: Callable[[Sequence[float]], float] = median,
) -> Figure:
    """A figure of repetitions: their median (or what ``pick`` takes) and their spread."""
    return Figure(name, pick(values), unit, of, goal, min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run. ``kind`` says of what: letters, digits and dashes, since files are named by it."""

    kind: str
    figures: tuple[Figure, ...]
    date: str = field(default_factory=lambda: date.today().isoformat())
    commit: str = field(default_factory=lambda: commit())
    machine: dict[str, str | int] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def file_name(self) -> str:
        return f"{self.date}-{self.kind}.json"

    def to_json(self) -> str:
        return json.dumps(_plain(self), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> Path:
        """Writes the file; a folder gets ``file_name``. The path written."""
        target = path / self.file_name if path.is_dir() else path
        target.write_text(self.to_json())
        return target


def _plain(report: Report) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    for one in map(_rounded, report.figures):
        entry = {"name": one.name, "value": one.value, "unit": one.unit, "of": one.of, "goal": one.goal, "met": one.met}
        figures.append(entry | {key: getattr(one, key) for key in _SPREAD if getattr(one, key) is not None})
    names = ("kind", "date", "commit", "machine", "versions")
    return {**{name: getattr(report, name) for name in names}, "figures": figures}


def _rounded(one: Figure) -> Figure:
    """Four digits: more says nothing, and a change of a file stays readable."""
    values = {key: getattr(one, key) for key in ("value", "low", "high")}
    return replace(one, **{key: float(f"{value:.4g}") for key, value in values.items() if value is not None})


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: Path) -> Report:
    """A written file; ResultError when anything in it is not as ``write`` makes it."""
    return parse(path.read_text(), path.name)


def parse(text: str, where: str = "result") -> Report:
    """The report of a JSON text. Strict: no key more or less, the right types, ``met`` as value and goal say."""
    try:
        raw: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultError(f"{where}: not JSON: {error}") from None
    _check_keys(where, raw, {"kind", "date", "commit", "machine", "versions", "figures"})
    for key in ("kind", "date", "commit"):
        _check(where, key, raw[key], str)
    if not KINDS.fullmatch(raw["kind"]) or not re.fullmatch(r"\d{4}-\d\d-\d\d", raw["date"]) or not raw["commit"]:
        _refuse(where, "kind, date or commit is malformed")
    _check_keys(f"{where}: machine", raw["machine"], {"cpu", "cores", "memory_bytes", "kernel"})
    _check(where, "versions", raw["versions"], dict)
    for key, value in (*raw["machine"].items(), *raw["versions"].items()):
        _check(where, key, value, int if key in {"cores", "memory_bytes"} else str)
    _check(where, "figures", raw["figures"], list)
    figures = tuple(_figure(f"{where}: figure {at}", entry) for at, entry in enumerate(raw["figures"]))
    names = [one.name for one in figures]
    if len(set(names)) != len(names):
        _refuse(where, "two figures have one name")
    return Report(raw["kind"], figures, raw["date"], raw["commit"], raw["machine"], raw["versions"])


def _figure(where: str, raw: Any) -> Figure:
    keys = {"name", "value", "unit", "of", "goal", "met"}
    _check_keys(where, raw, keys, optional=set(_SPREAD))
    for key in ("name", "unit", "of"):
        _check(where, key, raw[key], str)
    for key in ("value", "low", "high"):
        _check(where, key, raw.get(key, 0), int, float)
    _check(where, "n", raw.get("n", 1), int)
    _check(where, "goal", raw["goal"], str, type(None))
    try:
        found = Figure(**{key: value for key, value in raw.items() if key != "met"})
    except ValueError as error:
        _refuse(where, str(error))
    if raw["met"] is not found.met:
        _refuse(where, f"met is {raw['met']}, but {found.value} against {found.goal} says {found.met}")
    return found


def _goal_parts(goal: str) -> tuple[str, float]:
    match = _GOAL.fullmatch(goal)
    if match is None:
        raise ResultError(f"a goal is '<= number' or '>= number', not {goal!r}")
    return match[1], float(match[2])


def _check_keys(where: str, raw: Any, keys: set[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(raw, dict) or not keys <= set(raw) <= keys | set(optional):  # pyright: ignore[reportUnknownArgumentType]
        _refuse(where, f"needs exactly the keys {sorted(keys)}")


def _check(where: str, key: str, value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        _refuse(where, f"{key} is a {type(value).__name__}")


def _refuse(where: str, text: str) -> NoReturn:
    raise ResultError(f"{where}: {text}")


# ---- where and with what --------------------------------------------------------------------------------------------


def machine() -> dict[str, str | int]:
    """What matters for speed; no name that tells which machine it is."""
    cpu = platform.processor() or platform.machine()
    try:
        cpu = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, IndexError):
        pass  # other architectures name no model there
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "memory_bytes": memory_bytes, "kernel": platform.release()}


def versions(*more: str) -> dict[str, str]:
    """Versions of Python, of what the service is built on, and of the packages of ``more`` that are installed."""
    found = {"python": platform.python_version(), "kvgrpc": __version__}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the source tree that this module runs from ("-dirty" when it is changed, but for results: a run
    writes some before it ends), else the version."""
    here = Path(__file__).resolve()
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
    described = _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    changed = _git(here.parent, "diff", "--name-only", "HEAD").splitlines()
    if changed and all(name.startswith("benchmarks/results/") for name in changed):
        described = described.removesuffix("-dirty")
    return described if tracked and described else f"v{__version__}"


def _git(folder: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603  (git)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
