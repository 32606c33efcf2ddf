# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries out of Debian's packages, without installing them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def unpacked(*packages: str) -> Iterator[Path]:
    """A folder with what is in them, for a while."""
    with tempfile.TemporaryDirectory() as aside:
        download = ["apt-get", "download", *packages]
        if subprocess.run(download, cwd=aside, capture_output=True, timeout=300, check=False).returncode:
            subprocess.run(["apt-get", "update"], capture_output=True, timeout=300, check=True)
            subprocess.run(download, cwd=aside, capture_output=True, timeout=300, check=True)
        for package in Path(aside).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, aside], check=True, timeout=300)
        yield Path(aside)


def copy_libraries(unpacked_at: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for library in [*unpacked_at.glob("usr/lib/*/*.so.*"), *unpacked_at.glob("lib/*/*.so.*")]:
        shutil.copy(library.resolve(), folder / library.name)
