# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.deploy.fetch_prometheus FOLDER``: puts prometheus and promtool there.

From PATH when both are there; else out of Debian's package, without installing it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")


def from_debian(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as aside:
        download = ["apt-get", "download", "prometheus"]
        if subprocess.run(download, cwd=aside, capture_output=True, timeout=300, check=False).returncode:
            subprocess.run(["apt-get", "update"], capture_output=True, timeout=300, check=True)
            subprocess.run(download, cwd=aside, capture_output=True, timeout=300, check=True)
        (package,) = Path(aside).glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, aside], check=True, timeout=300)
        for program in PROGRAMS:
            shutil.move(Path(aside) / "usr/bin" / program, folder / program)


def main(name: str) -> None:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    there = [shutil.which(program) for program in PROGRAMS]
    if not all(there):
        if shutil.which("apt-get") is None:
            sys.exit("the tests of the alerts need prometheus and promtool on the PATH")
        from_debian(folder)
        return
    for program, path in zip(PROGRAMS, there, strict=True):
        assert path is not None
        (folder / program).symlink_to(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
