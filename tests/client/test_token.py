# SPDX-License-Identifier: Apache-2.0
"""A token that is replaced while a client uses it: no moment of that stops a call, or gives blocks back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgrpc.client import credentials
from kvgrpc.client.credentials import Token


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(credentials, "LOOK_S", 0.0)
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def shown(token: Token) -> str:
    ((key, value),) = token.metadata()
    assert key == "authorization"
    return value


@pytest.mark.parametrize(
    "moment", [b"", b"\n", b"\xff\xfe\x00", b"two\nlines"], ids=["empty", "blank", "bytes", "lines"]
)
def test_a_file_that_is_being_written_leaves_the_token_that_was_there(file: Path, moment: bytes) -> None:
    """Found by review: it raised ValueError, which says that a program is wrong: in a Fence it ended the wait for a
    copy that still ran."""
    token = Token(str(file))
    assert shown(token) == "Bearer first"
    file.write_bytes(moment)
    assert shown(token) == "Bearer first"
    file.unlink()
    assert shown(token) == "Bearer first"
    file.write_text("second")
    assert shown(token) == "Bearer second"


def test_a_half_of_a_token_is_not_kept_for_the_whole(file: Path) -> None:
    """Both writes in one tick of the file system's clock."""
    token = Token(str(file))
    file.write_text("sec")
    os.utime(file, ns=(10**9, 10**9))
    assert shown(token) == "Bearer sec"
    with file.open("a") as more:
        more.write("ond")
    os.utime(file, ns=(10**9, 10**9))
    assert shown(token) == "Bearer second"


@pytest.mark.parametrize("moment", [b"", b"\xff\xfe\x00"])
def test_without_a_token_there_is_nothing_to_show(file: Path, moment: bytes) -> None:
    file.write_bytes(moment)
    with pytest.raises(ValueError, match="there is no token in it"):
        Token(str(file)).metadata()
