# SPDX-License-Identifier: Apache-2.0
"""Where a server listens and clients ask when nobody names a socket, and whom that place may belong to.

Whoever owns the folder of a socket can put another server there, which then sees every prompt. A place that somebody
named is taken as it is; a default one must belong to this user or to root.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

RUN_FOLDER = Path("/run/kvgrpc")
SOCKET_NAME = "kvgrpc.sock"


class UntrustedSocketError(Exception):
    """A default place that somebody else could serve from. ``owner`` is a user id."""

    def __init__(self, path: Path, owner: int, why: str) -> None:
        super().__init__(
            f"{path} {why}: its owner could read and replace what goes through it. "
            "Name a socket that you trust (--socket, --address or KVGRPC_SOCKET), or have this one removed"
        )
        self.path = path
        self.owner = owner


def default_socket_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's run-time folder; or the system's, for root and who may write there; or a private temporary one."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_own(runtime):
        return Path(runtime) / "kvgrpc" / SOCKET_NAME
    if os.geteuid() == 0 or os.access(RUN_FOLDER, os.W_OK):
        return RUN_FOLDER / SOCKET_NAME
    return _temporary_folder() / SOCKET_NAME


def claim_default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """``default_socket_path``, once it is sure that nobody else can serve there. Raises UntrustedSocketError.

    Where everybody may create files, the folder is created (0700) by whoever comes first, server or client: then nobody
    else can.
    """
    path = default_socket_path(environ)
    if path.parent == _temporary_folder():
        path.parent.mkdir(mode=0o700, exist_ok=True)
    check_place(path.parent)
    check_place(path)
    return path


def named_socket(named: str | Path) -> Path:
    """A path, or the address of one (unix:/path), which is what the server prints; absolute. ValueError for one that
    begins with a tilde, which only shells replace."""
    path = str(named).removeprefix("unix:")
    if path.startswith("~"):
        raise ValueError(f"{path}: '~' is not replaced here; write the whole path")
    return Path(path).absolute()


def asked_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a client asks that was given no address: KVGRPC_SOCKET, else the default. Raises UntrustedSocketError."""
    named = environ.get("KVGRPC_SOCKET", "")
    return named_socket(named) if named else claim_default_socket(environ)


def asked_address(environ: Mapping[str, str] = os.environ) -> str:
    """What KVGRPC_ADDRESS says to clients, in any form of an address; empty when it is not set."""
    return environ.get("KVGRPC_ADDRESS", "")


def check_place(path: Path) -> None:
    """Raises UntrustedSocketError for what is another user's, or a link. What is not there is nobody's."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise UntrustedSocketError(path, found.st_uid, f"is a symbolic link, made by {_user(found.st_uid)}")
    if found.st_uid not in (0, os.geteuid()):
        why = f"belongs to {_user(found.st_uid)}, and neither to {_user(os.geteuid())} nor to root"
        raise UntrustedSocketError(path, found.st_uid, why)


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvgrpc-{os.geteuid()}"


def _is_own(folder: str) -> bool:
    try:
        return os.stat(folder).st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        return False


def _user(uid: int) -> str:
    try:
        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"user {uid}"


def mps_folder() -> Path:
    """Where NVIDIA's multi-process service has its pipes, if it runs."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or Path(tempfile.gettempdir(), "nvidia-mps"))
