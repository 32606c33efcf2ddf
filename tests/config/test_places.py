# SPDX-License-Identifier: Apache-2.0
"""The default socket: where it is, and that nobody else can serve there."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from kvgrpc.config import places
from kvgrpc.config.places import (
    UntrustedSocketError,
    asked_socket,
    check_place,
    claim_default_socket,
    default_socket_path,
)
from kvgrpc.config.settings import SettingsError, load_settings

STRANGER = 47_114


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A temporary folder of this test, and no folder of the system's."""
    monkeypatch.setattr(places, "RUN_FOLDER", tmp_path / "no-run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KVGRPC_SOCKET", raising=False)
    return tmp_path


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the test as if under this user, who is not root and owns what ``own`` was called for."""
    if os.geteuid() != 0:
        return os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return 1000


def own(path: Path, uid: int) -> None:
    if os.stat(path, follow_symlinks=False).st_uid != uid:
        os.chown(path, uid, -1, follow_symlinks=False)


def estrange(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the path another user's; who is not root cannot, and becomes another user instead. Answers the owner."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
        return STRANGER
    folder = places._temporary_folder()
    monkeypatch.setattr(places, "_temporary_folder", lambda: folder)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    return os.getuid()


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_the_three_places(temporary: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = temporary / "runtime"
    runtime.mkdir()
    own(runtime, user)
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    assert claim_default_socket(environ) == runtime / "kvgrpc/kvgrpc.sock"
    assert claim_default_socket({}) == temporary / f"kvgrpc-{user}/kvgrpc.sock"
    (temporary / "run").mkdir()
    monkeypatch.setattr(places, "RUN_FOLDER", temporary / "run")
    own(temporary / "run", user)
    assert claim_default_socket({}) == temporary / "run/kvgrpc.sock"
    assert claim_default_socket({"XDG_RUNTIME_DIR": str(temporary / "missing")}) == temporary / "run/kvgrpc.sock"


def test_roots_place_is_the_systems(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert claim_default_socket({}) == temporary / "no-run/kvgrpc.sock"


def test_a_run_time_folder_of_somebody_else_is_not_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root has it after `sudo -E`: its owner could rename what is in it."""
    runtime = temporary / "runtime"
    runtime.mkdir()
    estrange(runtime, monkeypatch)
    assert runtime not in default_socket_path({"XDG_RUNTIME_DIR": str(runtime)}).parents


def test_the_temporary_folder_is_made_before_anybody_else_can(temporary: Path, user: int) -> None:
    folder = claim_default_socket({}).parent
    assert folder == temporary / f"kvgrpc-{user}"
    assert folder.stat().st_mode & 0o777 == 0o700
    own(folder, user)
    assert claim_default_socket({}).parent == folder, "and is taken again"


@pytest.mark.parametrize("part", ["folder", "socket"])
def test_what_is_another_users_is_refused_by_name(
    temporary: Path, user: int, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    path = temporary / f"kvgrpc-{user}/kvgrpc.sock"
    path.parent.mkdir(mode=0o700)
    own(path.parent, user)
    listen(path)
    own(path, user)
    assert claim_default_socket({}) == path
    wrong = path if part == "socket" else path.parent
    owner = estrange(wrong, monkeypatch)
    with pytest.raises(UntrustedSocketError) as caught:
        claim_default_socket({})
    assert (caught.value.owner, caught.value.path) == (owner, wrong if os.getuid() == 0 else path.parent)
    assert f"{caught.value.path} belongs to user {owner}" in str(caught.value)


@pytest.mark.parametrize("part", ["folder", "socket"])
def test_links_are_refused_whoever_made_them(temporary: Path, user: int, part: str) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    own(elsewhere, user)
    listen(elsewhere / "kvgrpc.sock")
    own(elsewhere / "kvgrpc.sock", user)
    folder = temporary / f"kvgrpc-{user}"
    if part == "folder":
        wrong = folder
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        own(folder, user)
        wrong = folder / "kvgrpc.sock"
        wrong.symlink_to(elsewhere / "kvgrpc.sock")
    own(wrong, user)
    with pytest.raises(UntrustedSocketError, match="symbolic link") as caught:
        claim_default_socket({})
    assert caught.value.path == wrong


def test_what_is_roots_or_missing_is_trusted(temporary: Path, user: int) -> None:
    check_place(Path("/"))
    check_place(temporary / "missing")


def test_a_socket_that_was_named_is_taken_as_it_is(temporary: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link = temporary / "link"
    link.symlink_to(temporary)
    assert asked_socket({"KVGRPC_SOCKET": str(link / "s")}) == link / "s"
    monkeypatch.chdir(temporary)
    assert asked_socket({"KVGRPC_SOCKET": "s"}) == temporary / "s"
    assert asked_socket({"KVGRPC_SOCKET": ""}) == temporary / f"kvgrpc-{user}/kvgrpc.sock"


def test_a_socket_may_be_named_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRPC_SOCKET", "unix:/run/kv.sock")
    assert load_settings().socket_path() == asked_socket() == Path("/run/kv.sock")


def test_a_group_that_the_mode_keeps_out_is_refused() -> None:
    with pytest.raises(SettingsError, match="--socket-mode 0660"):
        load_settings(socket_group="nogroup")
    assert load_settings(socket_group="nogroup", socket_mode="0660").socket_group == "nogroup"
