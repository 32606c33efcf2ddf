# SPDX-License-Identifier: Apache-2.0
"""The index file: what was written is read, and nothing else ever is."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvgrpc.core.records import Form, Record
from kvgrpc.core.types import ALL, Need, PartForm, Priority, SpaceIdentity
from kvgrpc.transfer import arena_index
from kvgrpc.transfer.arena_index import EXTENTS_MOST, Head, IndexDamagedError, IndexFile, is_index, read_index
from tests.transfer.pages import open_files

HEAD = Head(b"a" * 16, 3, 1 << 20, 4096, 16)
FORMS = [
    Form(
        SpaceIdentity("mod\u00e9l", "r1", "bf16", 2, "sha256-u32le", "form"),
        "lora",
        "salt\ud83d",
        1 << 70,
        1,
        (PartForm(ALL, 8192, "o"), PartForm(Need(1024), 64, "p"), PartForm(Need(32, aligned=True), 8192, "q")),
        2,
    ),
    Form(SpaceIdentity("other", "", "bf16", 1, "x", "form"), "", "", 0, 0, (PartForm(ALL, 64, ""),)),
]
RECORDS = [
    Record(FORMS[number % 2], bytes([number]) * 32, Priority(number % 3), ((4096 * number, 4096), (0, 4096)), b"c" * 16)
    for number in range(20)
]


def written(path: Path, *, whole: bool) -> bytes:
    file = IndexFile(path, HEAD)
    file.append(RECORDS[:7])
    assert not path.exists()
    file.publish()
    file.append(RECORDS[7:])
    if whole:
        file.end()
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_written_is_read(tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "index"
    written(path, whole=whole)
    found = read_index(path, HEAD.arena)
    assert (list(found.records), found.head, found.whole) == (RECORDS, HEAD, whole)
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_index(path)
    assert not list(tmp_path.glob("*.new"))


def test_the_widest_window_and_the_most_places(tmp_path: Path) -> None:
    """What a layout may say can be read again; an object in more places than a frame holds is left out, and not all."""
    form = FORMS[1]._replace(parts=(PartForm(Need((1 << 32) - 1), 64, ""),))
    records = [
        RECORDS[0]._replace(form=form, extents=tuple((at * 1024, 512) for at in range(places)))
        for places in (EXTENTS_MOST, EXTENTS_MOST + 1, 1 << 16, 1)
    ]
    file = IndexFile(tmp_path / "index", HEAD)
    file.append(records)
    file.end()
    file.publish()
    file.close()
    found = read_index(tmp_path / "index", HEAD.arena)
    assert (list(found.records), found.whole) == ([records[0], records[3]], True)


def test_any_flipped_bit_is_damage_or_another_arena(tmp_path: Path) -> None:
    path = tmp_path / "index"
    raw = written(path, whole=True)
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        try:
            found = read_index(path, HEAD.arena)
        except IndexDamagedError:
            continue
        assert not found.whole, "a length that reaches beyond the end: as if it were cut there"
        assert list(found.records) == RECORDS[: len(found.records)]


def test_a_cut_leaves_what_comes_before_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    raw = written(path, whole=True)
    counts: set[int] = set()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        try:
            found = read_index(path, HEAD.arena)
        except IndexDamagedError:
            assert not counts, "only without a whole head"
            continue
        assert not found.whole
        assert list(found.records) == RECORDS[: len(found.records)]
        counts.add(len(found.records))
    assert counts == set(range(21))


def test_frames_of_another_run_do_not_pass(tmp_path: Path) -> None:
    """As a file system might leave them behind where a newer file ends."""
    raw = written(tmp_path / "new", whole=False)
    other = IndexFile(tmp_path / "old", replace(HEAD, serial=2))
    other.append([*RECORDS, *RECORDS])
    other.publish()
    other.close()
    old = (tmp_path / "old").read_bytes()
    (tmp_path / "new").write_bytes(raw + old[len(raw) :])
    with pytest.raises(IndexDamagedError):
        read_index(tmp_path / "new", HEAD.arena)
    with pytest.raises(IndexDamagedError, match="another arena"):
        read_index(tmp_path / "old", b"b" * 16)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.new")
    with pytest.raises(OSError):
        IndexFile(tmp_path / "index", HEAD)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"{}" * 100, bytes(1000), b"\xff" * 1000, b"\x05\0\0\0\1\0\0\0hello" + bytes(16)]
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(content)
    assert not is_index(path)
    with pytest.raises(IndexDamagedError):
        read_index(path, HEAD.arena)
    path.unlink()
    path.symlink_to(tmp_path / "target")
    (tmp_path / "target").write_bytes(written(tmp_path / "real", whole=True))
    assert not is_index(path)
    with pytest.raises(OSError):
        read_index(path, HEAD.arena)


def test_a_full_file_system_keeps_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server tries it again every ten seconds; what is left open adds up until nobody can connect."""

    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            IndexFile(tmp_path / "a.index", HEAD)
    assert open_files(tmp_path) == []


def test_an_index_of_format_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers wrote it whose chunks had one part."""

    def told(form: Form) -> dict[str, object]:
        (part,) = form.parts
        fields = {name: getattr(form, name) for name in ("lora", "cache_salt", "version", "kv_rank")}
        return {"identity": asdict(form.identity), **fields, "order": part.order, "size_bytes": part.object_bytes}

    path, records = tmp_path / "index", [one for one in RECORDS if len(one.form.parts) == 1]
    with monkeypatch.context() as then:
        then.setattr(arena_index, "FORMAT", 1)
        then.setattr(arena_index, "_told", told)
        file = IndexFile(path, HEAD)
        file.append(records)
        file.publish()
        file.end()
        file.close()
    assert b'"parts"' not in path.read_bytes()
    assert list(read_index(path, HEAD.arena).records) == records


@pytest.mark.parametrize(
    "spoiled",
    [
        {"parts": []},
        {"part": 3},
        {"part": -1},
        {"parts": [{"window": 0, "aligned": False, "size_bytes": 64, "order": ""}] * 9},
        {"parts": [{"window": 0, "aligned": False, "size_bytes": 0, "order": ""}], "part": 0},
        {"parts": [{"window": -1, "aligned": False, "size_bytes": 64, "order": ""}], "part": 0},
        {"parts": [{"window": 1, "aligned": 1, "size_bytes": 64, "order": ""}], "part": 0},
        {"parts": 7},
        {"format": 3},
    ],
)
def test_forms_that_cannot_be_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: dict[str, object]
) -> None:
    right = arena_index._told
    with monkeypatch.context() as then:
        then.setattr(arena_index, "FORMAT", spoiled.get("format", arena_index.FORMAT))
        then.setattr(arena_index, "_told", lambda form: {**right(form), **spoiled})
        written(tmp_path / "index", whole=True)
    with pytest.raises(IndexDamagedError):
        read_index(tmp_path / "index", HEAD.arena)
