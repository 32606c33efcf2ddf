# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: a Unix socket that it owns, and TCP addresses. What is wrong is a ListenError at start."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from kvgrpc.config.values import is_loopback, split_address

PATH_BYTES_MOST = 107
"""sockaddr_un.sun_path holds 108 bytes with the final NUL."""

_PROBE_S = 1.0

Bind = Callable[[str], int]
"""gRPC's ``add_insecure_port`` or its like: address to port; RuntimeError when it cannot."""


class ListenError(Exception):
    """The server cannot listen there; the text says why and what to do."""


class SocketFile:
    """A Unix socket path that one server owns while it serves.

    Two servers can bind one path, and the first to stop removes the file under the other. So a lock on ``<path>.lock``
    decides who owns the path; the lock file stays, since removing it would race with the next owner. The kernel drops
    the lock when the process ends, however it ends. Used on one thread.
    """

    def __init__(self, path: Path, mode: int, group: str) -> None:
        self.path = path
        self._mode = mode
        self._group = group
        self._lock: int | None = None
        self._bound: tuple[int, int] | None = None

    def bind(self, bind: Bind) -> str:
        """Takes the path, binds it with its mode and group set before anyone else can connect; answers the address."""
        size = len(os.fsencode(self.path))
        if size > PATH_BYTES_MOST:
            raise ListenError(f"--socket {self.path}: it has {size} bytes; a socket path has at most {PATH_BYTES_MOST}")
        try:
            self._check_folder()
            self._check_path()
            self._take_lock()
            self._remove_stale()
            address = "unix:" + quote(str(self.path))
            umask = os.umask(0o177)
            try:
                bind(address)
            finally:
                os.umask(umask)
            self._bound = _identity(self.path)
            if self._group:
                os.chown(self.path, -1, _group_id(self._group))
            self.path.chmod(self._mode)
        except RuntimeError:
            self.release()
            raise ListenError(f"--socket {self.path}: cannot listen there") from None
        except OSError as error:
            self.release()
            raise ListenError(f"--socket {self.path}: {error.strerror} ({error.filename})") from None
        except ListenError:
            self.release()
            raise
        return address

    def release(self) -> None:
        """Removes the socket if it is still this server's, and gives the path up. Harmless when repeated."""
        if self._bound is not None and _identity(self.path) == self._bound:
            self.path.unlink(missing_ok=True)
        self._bound = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_folder(self) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
        if owner not in (0, os.geteuid()):
            raise ListenError(
                f"--socket {self.path}: folder {folder} belongs to user {owner}, who could replace the socket; "
                "choose a folder of this user or of root"
            )

    def _check_path(self) -> bool:
        """Whether there is a socket."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(mode):
            raise ListenError(f"--socket {self.path}: that is a folder; name a file in it, as {self.path}/kvgrpc.sock")
        if not stat.S_ISSOCK(mode):
            raise ListenError(f"--socket {self.path}: a file that is not a socket is there; move it away")
        return True

    def _take_lock(self) -> None:
        name = f"{self.path}.lock"
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise ListenError(
                f"--socket {self.path}: another server (process {holder or 'unknown'}) serves it; "
                "stop that one or choose another --socket"
            ) from None
        self._lock = lock
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())

    def _remove_stale(self) -> None:
        """The lock is held: a socket that is left here belongs to nobody, unless it is not a kvgrpc server's."""
        if not self._check_path():
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)
                return
            except (BlockingIOError, TimeoutError):
                pass
        raise ListenError(f"--socket {self.path}: another program listens there; stop it or choose another --socket")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _group_id(group: str) -> int:
    if group.isdecimal() and len(group) <= 10 and int(group) < (1 << 32) - 1:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ListenError(f"--socket-group {group}: there is no such group") from None


def bind_tcp(
    address: str, anywhere: bool, bind: Bind, flag: str = "--listen", keep: list[socket.socket] | None = None
) -> str:
    """Listens on ``HOST:PORT``, off the loopback only if ``anywhere`` says so; answers the address with the port that
    port 0 became. ``flag`` is named in what is raised. What is added to ``keep``, however this ends, keeps the port
    from others until it is closed, also when ``bind``'s listener has been: clients take another server under the
    address for a sign that nothing of the one before runs any more."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ListenError(f"{flag}: {error}") from None
    if not anywhere and not is_loopback(host):
        raise ListenError(
            f"{flag} {address} is off the loopback and would serve without TLS; "
            "give it --tls-cert and --tls-key, or say --insecure if the network is trusted"
        )
    kept = [] if keep is None else keep
    try:
        if keep is not None:
            port = _take_port(host, port, keep)
        bound = bind(f"{address.rpartition(':')[0]}:{port}")
    except OSError as error:
        raise ListenError(f"{flag} {address}: {error.strerror}") from None
    except RuntimeError:
        raise ListenError(f"{flag} {address}: {_why_not(host, port)}") from None
    for one in kept:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return f"{address.rpartition(':')[0]}:{bound}"


def _take_port(host: str, wanted: int, taken: list[socket.socket]) -> int:
    """Binds a socket that never listens to each address of the host; the port, which port 0 becomes. Linux lets another
    one be bound beside it as long as both allow reuse, and neither listens. Raises OSError when others have it."""
    port = wanted
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return port  # gRPC has something to say about it
    for family, kind, protocol, _, place in found:
        try:
            one = socket.socket(family, kind, protocol)
        except OSError:  # what this system does not have, or does not allow, gRPC meets as well
            continue
        taken.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((place[0], port, *place[2:]))
        except OSError as error:
            if wanted and error.errno == errno.EADDRINUSE:
                raise
        else:
            port = one.getsockname()[1]
    return port


def _why_not(host: str, port: int) -> str:
    """The kernel's word on an address that gRPC could not bind; gRPC says only that it could not."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.bind(place)
    except OSError as error:
        return str(error.strerror)
    return "cannot listen there"
