# SPDX-License-Identifier: Apache-2.0
"""The file of versions where others stand in the way."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.core.types import NO_VERSIONS, Versions
from kvgrpc.core.versions import version_of
from kvgrpc.tiers import version_file
from kvgrpc.tiers.version_file import begin, keep, load, save

BEFORE, AFTER = Versions(7), Versions(8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d" / "versions"


@pytest.fixture
def standing_still(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another server keeps the file to itself."""
    keep(path, BEFORE)
    monkeypatch.setattr(version_file, "LOCK_S", 0.2)
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


def test_first_use_and_the_next(path: Path) -> None:
    assert begin(path) == NO_VERSIONS
    save(path, NO_VERSIONS, AFTER)
    assert begin(path) == load(path) == AFTER


def test_what_was_cleared_does_not_come_back_when_the_file_was_removed_meanwhile(path: Path) -> None:
    """Another space's change makes the file anew; it must not say that nothing else was ever changed."""
    begin(path)
    first = Versions(0, bases={b"a" * 16: (1, 5)})
    save(path, NO_VERSIONS, first)
    path.unlink()
    save(path, first, Versions(0, bases={**first.bases, b"b" * 16: (1, 5)}))
    found = begin(path)
    assert version_of(found, b"a" * 16, b"") != 0, "where its objects of before lie"
    assert version_of(found, b"b" * 16, b"") == 5


@pytest.mark.usefixtures("standing_still")
def test_a_server_that_does_not_let_go_is_not_waited_for(path: Path) -> None:
    with pytest.raises(BlockingIOError):
        save(path, BEFORE, AFTER)
    assert begin(path) == BEFORE, "reading needs no lock"


@pytest.mark.usefixtures("standing_still")
@pytest.mark.parametrize("damage", [b"x", None])
def test_nothing_old_is_found_where_a_begin_cannot_be_kept(path: Path, damage: bytes | None) -> None:
    path.unlink()
    (path.parent / "slot-0").mkdir()
    if damage is not None:
        path.write_bytes(damage)
    found = begin(path)
    assert found.first not in (0, BEFORE.first)
    assert not path.exists() or path.read_bytes() == damage


@pytest.mark.parametrize("suffix", ["", ".new"])
def test_a_pipe_in_its_place_is_not_waited_for(path: Path, suffix: str) -> None:
    keep(path, BEFORE)
    if not suffix:
        path.unlink()
    os.mkfifo(path.with_suffix(suffix) if suffix else path)
    if suffix:
        with pytest.raises(OSError):
            save(path, BEFORE, AFTER)
    else:
        assert begin(path).first not in (0, BEFORE.first)
