# SPDX-License-Identifier: Apache-2.0
"""Servers that share a disk's folder which comes and goes, are killed and started, and clear: what was cleared with an
answer that says so is found by none of them, ever. A failure prints its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.limits import CoreLimits
from kvgrpc.core.types import SpaceIdentity, SpaceRef
from kvgrpc.tiers.version_file import keep, new_step
from kvgrpc.tiers.versions import KeptVersions

MODELS, SALTS = ("m", "n"), ("", "salt")
Named = tuple[str, str]
ALL: list[Named] = [(model, salt) for model in MODELS for salt in SALTS]
SEEDS = 60
STEPS = 40


class Stored(NamedTuple):
    """An object on the disk."""

    named: Named
    version: int
    at: int


class Server:
    """Its versions, and whether its disk tier is open."""

    def __init__(self, folder: Path, number: int, *, arena: bool) -> None:
        self.disk, self.slot = folder / "disk", f"slot-{number:03}"
        self._arena = folder / f"{number}.arena.versions" if arena else None
        self.start()

    def start(self) -> None:
        self._kept = KeptVersions(None, self.disk / "versions.json", self._arena)
        self._book = Bookkeeper(CoreLimits(), 1 << 20, ("disk",), self._kept.begin(), new_step())
        self._saved = self._book.versions.snapshot()
        if self._arena is not None:
            keep(self._arena, self._saved)
        self.runs, self.is_open = True, False

    def kill(self) -> None:
        self.runs = self.is_open = False

    def open(self) -> None:
        try:
            self._kept.check_disk()
            (self.disk / self.slot).mkdir(exist_ok=True)
            self.is_open = True
        except OSError:
            self.is_open = False

    def _space(self, named: Named) -> SpaceRef:
        identity = SpaceIdentity(named[0], "", "bfloat16", 1, "sha256-u32le", "token-major:1:4:1")
        return SpaceRef(self._book.space_base(0, identity), "", named[1])

    def version(self, named: Named) -> int:
        return self._book.index.space(self._space(named)).version

    def clear(self, what: str, named: Named) -> bool:
        """Whether it answers that this holds."""
        self.version(named)
        match what:
            case "all":
                self._book.clear(0, everything=True)
            case "model":
                self._book.clear(0, model=named[0])
            case "salt":
                self._book.clear(0, cache_salt=named[1])
            case "space":
                self._book.clear(0, space=self._space(named))
            case _:
                self._book.bump_generation(0, model=named[0])
        after = self._book.versions.snapshot()
        try:
            self._kept.save(self._saved, after)
        except OSError:
            return False
        self._saved = after
        return True


def concerned(what: str, named: Named) -> Iterator[Named]:
    for one in ALL:
        same = {"all": True, "salt": one[1] == named[1], "space": one == named}.get(what, one[0] == named[0])
        if same:
            yield one


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_cleared_is_never_found(tmp_path: Path, seed: int, servers: int) -> None:
    """Whoever clears does so at every server that runs. An empty folder stands in the real one's place at times, but
    not when a server starts: it would be taken for a new one."""
    chance, disk, aside = random.Random(seed), tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    every = [Server(tmp_path, number, arena=chance.random() < 0.5) for number in range(servers)]
    stored, cleared, is_real = set[Stored](), dict[Named, int](), True
    for now in range(STEPS):
        one = chance.choice(every)
        match chance.choice(["store"] * 4 + ["clear"] * 2 + ["restart", "away", "back", "lost", "empty"]):
            case "store" if one.runs:
                named = chance.choice(ALL)
                if not one.is_open:
                    one.open()
                if one.is_open and is_real:
                    stored.add(Stored(named, one.version(named), now))
            case "clear":
                what, named = chance.choice(["all", "model", "salt", "space", "bump"]), chance.choice(ALL)
                told = [server.clear(what, named) for server in chance.sample(every, servers) if server.runs]
                if told and all(told):
                    cleared.update(dict.fromkeys(concerned(what, named), now))
            case "restart" if is_real or not disk.exists():
                one.kill() if one.runs else one.start()
            case "away" if is_real:
                disk.rename(aside)
                is_real = False
            case "back" if not is_real and not disk.exists():
                aside.rename(disk)
                is_real = True
            case "empty" if servers == 1 and one.runs and not disk.exists():
                disk.mkdir()
                assert not one.clear("space", ALL[0])
                disk.rmdir()
            case _:
                one.is_open = False
        for server in every:
            server.is_open = server.is_open and is_real
            for object in stored if server.is_open else ():
                found = server.version(object.named) == object.version
                assert not found or object.at > cleared.get(object.named, -1), (seed, now, object)
