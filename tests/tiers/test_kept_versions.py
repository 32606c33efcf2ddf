# SPDX-License-Identifier: Apache-2.0
"""Versions beside a disk's folder and beside an arena: what a server begins with, and what it finds when the folder was
away at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvgrpc.core.types import NO_VERSIONS, Versions
from kvgrpc.core.versions import version_of
from kvgrpc.tiers.version_file import encode, keep, load, save
from kvgrpc.tiers.versions import KeptVersions

BASE, SPACE, OTHER = b"b" * 16, b"s" * 32, b"o" * 32
OLD = Versions(7, {BASE: (0, 8)}, {SPACE: (BASE, 9)})
CLEARED = Versions(7, {BASE: (0, 8)}, {SPACE: (BASE, 10)})


class Server:
    """The folders of one, of which the disk's may be away."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.aside, arena = folder / "disk", folder / "elsewhere", folder / "arena.versions"
        self.disk.mkdir()
        self.beside_disk, self.beside_arena = self.disk / "versions.json", arena

    def start(self, *, arena: bool = True) -> KeptVersions:
        return KeptVersions(None, self.beside_disk, self.beside_arena if arena else None)

    def take_away(self) -> None:
        self.disk.rename(self.aside)

    def bring_back(self) -> None:
        self.aside.rename(self.disk)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    server = Server(tmp_path)
    for path in (server.beside_disk, server.beside_arena):
        keep(path, OLD)
    return server


def test_a_folder_that_is_away_costs_no_arena(server: Server) -> None:
    server.take_away()
    kept = server.start()
    assert kept.begin() == OLD
    with pytest.raises(OSError, match="No such file"):
        kept.check_disk()
    assert not server.disk.exists(), "it may be about to be mounted"
    server.bring_back()
    kept.check_disk()
    assert load(server.beside_disk) == OLD


def test_a_new_folder_costs_no_arena(server: Server) -> None:
    server.beside_disk.unlink()
    kept = server.start()
    assert kept.begin() == OLD == load(server.beside_disk)
    kept.check_disk()


@pytest.mark.parametrize("arena", [True, False])
def test_what_was_cleared_while_it_was_away_is_written_there_when_it_is_back(server: Server, arena: bool) -> None:
    server.take_away()
    kept = server.start(arena=arena)
    began = kept.begin()
    assert arena or began.first not in (0, OLD.first)
    after = Versions(began.first, began.bases, {**began.spaces, SPACE: (BASE, 1000)})
    with pytest.raises(OSError, match="No such file"):
        kept.save(began, after)
    assert not arena or load(server.beside_arena) == after, "the other place has it all the same"
    server.bring_back()
    kept.check_disk()
    there = server.start(arena=arena).begin()
    assert version_of(there, BASE, SPACE) == 1000
    assert version_of(there, BASE, OTHER) == version_of(OLD, BASE, OTHER), "and nothing else is lost"


def test_what_others_cleared_there_is_not_found(server: Server) -> None:
    """It was cleared by a server that this one did not hear of: neither ran while the other did."""
    save(server.beside_disk, OLD, CLEARED)
    server.take_away()
    kept = server.start()
    assert kept.begin() == OLD
    server.bring_back()
    for _ in range(2):
        with pytest.raises(OSError, match="others have cleared"):
            kept.check_disk()
    assert server.start().begin() == CLEARED


def test_without_an_arena_nothing_old_is_found_and_all_of_it_at_the_next_start(server: Server) -> None:
    server.take_away()
    kept = server.start(arena=False)
    assert kept.begin().first not in (0, OLD.first)
    server.bring_back()
    kept.check_disk()
    assert server.start(arena=False).begin() == OLD


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")], ids=["gone", "damaged"])
def test_a_folder_whose_versions_are_lost_is_not_that_of_the_arena(
    server: Server, damage: Callable[[Path], object]
) -> None:
    (server.disk / "slot-000").mkdir()
    damage(server.beside_disk)
    assert server.start().begin().first not in (0, OLD.first)


def test_new_weights_reach_spaces_that_only_others_know(server: Server) -> None:
    """A server that began without the folder announces them: a space that was cleared earlier had a version of its own
    there, and kept it."""
    server.take_away()
    kept = server.start(arena=False)
    began = kept.begin()
    server.bring_back()
    kept.check_disk()
    kept.save(began, Versions(began.first, {BASE: (1, 5000)}))
    there = server.start(arena=False).begin()
    assert version_of(there, BASE, SPACE) == version_of(there, BASE, OTHER) == 5000


# ---- a folder that goes away while the server runs ------------------------------------------------------------------


def cleared(kept: KeptVersions, before: Versions, version: int = 1000) -> Versions:
    """What is in force after a Clear that is refused, since the folder is away."""
    after = Versions(before.first, before.bases, {**before.spaces, SPACE: (BASE, version)})
    with pytest.raises(OSError):
        kept.save(before, after)
    return after


@pytest.mark.parametrize("arena", [True, False])
def test_what_was_cleared_after_it_went_away_is_written_there_when_it_is_back(server: Server, arena: bool) -> None:
    kept = server.start(arena=arena)
    assert kept.begin() == OLD
    kept.check_disk()
    server.take_away()
    cleared(kept, cleared(kept, OLD), 2000)
    with pytest.raises(OSError, match="No such file"):
        kept.check_disk()
    server.bring_back()
    kept.check_disk()
    there = server.start(arena=arena).begin()
    assert version_of(there, BASE, SPACE) == 2000
    assert version_of(there, BASE, OTHER) == version_of(OLD, BASE, OTHER)


def test_an_empty_folder_in_its_place_keeps_no_clear(server: Server) -> None:
    """That answered, and the folder that came back knew nothing of it."""
    kept = server.start(arena=False)
    kept.begin()
    server.take_away()
    server.disk.mkdir()
    cleared(kept, OLD)
    server.disk.rmdir()
    server.bring_back()
    kept.check_disk()
    assert version_of(server.start(arena=False).begin(), BASE, SPACE) == 1000


def test_a_new_folder_in_its_place_begins_with_what_is_in_force(server: Server) -> None:
    """Else the next start finds objects there without versions, and lets go of the arena's, too."""
    kept = server.start()
    kept.begin()
    server.take_away()
    server.disk.mkdir()
    kept.check_disk()
    assert load(server.beside_disk) == OLD
    (server.disk / "slot-000").mkdir()
    kept.save(OLD, CLEARED)
    assert server.start().begin() == CLEARED


def test_a_server_that_began_over_a_mount_point_finds_nothing_old_in_what_is_mounted_later(server: Server) -> None:
    """It began at the versions of a new folder, of which there may be objects that were cleared."""
    server.take_away()
    server.disk.mkdir()
    kept = server.start(arena=False)
    assert kept.begin() == NO_VERSIONS
    kept.check_disk()
    server.beside_disk.unlink()
    for left in server.disk.iterdir():
        left.unlink()
    server.disk.rmdir()
    server.bring_back()
    with pytest.raises(OSError, match="others have cleared"):
        kept.check_disk()
    assert server.start(arena=False).begin() == OLD


def test_what_others_cleared_in_the_same_folder_does_not_close_it(server: Server) -> None:
    """Each is told of it, and moves its versions by a step of its own."""
    kept = server.start()
    kept.begin()
    kept.check_disk()
    save(server.beside_disk, OLD, CLEARED)
    kept.check_disk()
    assert load(server.beside_disk) == CLEARED


class Shared:
    """A place that servers share, which is down at times."""

    where = "shared"

    def __init__(self) -> None:
        self.kept, self.swaps, self.down = b"", 0, False

    def load(self) -> tuple[int, bytes]:
        if self.down:
            raise OSError("down")
        return self.swaps, self.kept

    def swap(self, seen: int, text: bytes) -> bool:
        self.kept, self.swaps = text, self.swaps + 1
        return True


def test_a_folder_that_was_away_is_told_what_the_shared_place_says(server: Server) -> None:
    """Others cleared there before this server began; the folder is what it goes by when the place is down."""
    shared = Shared()
    shared.kept, shared.swaps = encode(CLEARED), 1
    server.take_away()
    kept = KeptVersions(shared, server.beside_disk, None)
    assert kept.begin() == CLEARED
    server.bring_back()
    kept.check_disk()
    shared.down = True
    assert KeptVersions(shared, server.beside_disk, None).begin() == CLEARED


def test_first_use(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.start().begin() == NO_VERSIONS
    server.start().save(NO_VERSIONS, CLEARED)
    assert load(server.beside_disk) is not None
