# SPDX-License-Identifier: Apache-2.0
"""L1 is sized to the machine and to its control groups; what does not fit is refused with both numbers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvgrpc.config.memory import L1_DEFAULT_CAP, choose_l1_size
from kvgrpc.config.settings import SettingsError
from kvgrpc.transfer.room import available_memory

GIB = 1 << 30
MIB = 1 << 20
PAGE = 256 << 10


def write(folder: Path, **files: object):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def v2(folder: Path, most: object, used: int, cache: int = 0):
    write(folder, memory__max=most, memory__current=used, memory__stat=f"anon 1\ninactive_file {cache}")


def v1(folder: Path, most: int, used: int, cache: int = 0):
    write(
        folder,
        memory__limit_in_bytes=most,
        memory__usage_in_bytes=used,
        memory__stat=f"rss 1\ntotal_inactive_file {cache}",
    )


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path / "proc_cgroup"


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch):
    class Memory:
        available = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def test_by_default_half_of_what_is_there_up_to_the_cap():
    assert choose_l1_size(None, 64 * GIB, PAGE) == L1_DEFAULT_CAP == 4 * GIB
    assert choose_l1_size(None, 3 * GIB + 1, PAGE) == 3 * GIB // 2


def test_what_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(SettingsError, match=r"--l1-size: 32 GiB do not fit, 2\.5 GiB are available"):
        choose_l1_size(32 * GIB, 5 * GIB // 2, PAGE)
    assert choose_l1_size(2 * GIB, 5 * GIB // 2, PAGE) == 2 * GIB


def test_less_than_a_page_is_refused():
    with pytest.raises(SettingsError, match=r"--l1-size: .* less than one page \(--page-size, .* KiB\)"):
        choose_l1_size(PAGE - 1, GIB, PAGE)
    with pytest.raises(SettingsError, match=r"only 1 MiB are available: too little.*machine more memory"):
        choose_l1_size(None, MIB, PAGE)


def test_without_limits_the_machine_decides(tmp_path: Path, proc: Path):
    assert available_memory(tmp_path, proc) == 64 * GIB
    proc.write_text("0::/kubepods/pod1\n")
    v2(tmp_path / "kubepods/pod1", "max", GIB)
    assert available_memory(tmp_path, proc) == 64 * GIB


def test_control_groups_v2_the_tightest_parent_counts(tmp_path: Path, proc: Path):
    proc.write_text("0::/kubepods/pod1/main\n")
    v2(tmp_path / "kubepods/pod1/main", "max", GIB)
    v2(tmp_path / "kubepods/pod1", 8 * GIB, 3 * GIB, cache=GIB)
    v2(tmp_path / "kubepods", 100 * GIB, 3 * GIB)
    assert available_memory(tmp_path, proc) == 6 * GIB


def test_control_groups_v1(tmp_path: Path, proc: Path):
    proc.write_text("5:cpu:/a\n4:memory:/a/b\n0::/\n")
    v1(tmp_path / "memory/a/b", 4 * GIB, 3 * GIB, cache=2 * GIB)
    v1(tmp_path / "memory", 1 << 62, 9 * GIB)
    assert available_memory(tmp_path, proc) == 3 * GIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, proc: Path):
    proc.write_text("4:memory:/docker/0123\n0::/docker/0123\n")
    v1(tmp_path / "memory", 2 * GIB, GIB)
    assert available_memory(tmp_path, proc) == GIB
    v2(tmp_path, 3 * GIB // 2, GIB)
    assert available_memory(tmp_path, proc) == GIB // 2


def test_an_overdrawn_group_has_nothing_left(tmp_path: Path, proc: Path):
    proc.write_text("0::/\n")
    v2(tmp_path, GIB, 2 * GIB)
    assert available_memory(tmp_path, proc) == 0
