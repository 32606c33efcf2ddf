# SPDX-License-Identifier: Apache-2.0
"""A server process on a named arena that ends, in order or not, and starts again (see ``disk_server``)."""

from __future__ import annotations

from pathlib import Path

from kvgrpc import api
from tests.e2e.disk_server import DiskServer
from tests.served import wait_until

PAGE = 64 << 10


class ArenaServer(DiskServer):
    """`kvgrpc serve --arena-path`, with a disk below it when asked for."""

    def __init__(self, folder: Path, name: str = "s", *, disk: bool = False) -> None:
        super().__init__(folder, name)
        self.arena = folder / f"{name}.arena"
        self.index = self.arena.with_name(self.arena.name + ".index")
        self.versions = self.arena.with_name(self.arena.name + ".versions")
        own = ["--arena-path", str(self.arena), "--page-size", str(PAGE)]
        self.flags = [*self.flags, *own[:2]] if disk else own

    def restart_status(self) -> api.RestartStatus:
        return self.status().restart

    def wait_checked(self) -> api.RestartStatus:
        """Until nothing that was found is unknown any more."""
        wait_until(lambda: not self.restart_status().checking, 60)
        return self.restart_status()

    def wait_recorded(self, objects: int) -> None:
        """Until so many objects have records that outlive a kill."""
        wait_until(lambda: self._recorded() >= objects, 60)

    def _recorded(self) -> int:
        status = self.restart_status()
        return 0 if status.waiting_objects else status.recorded_objects
