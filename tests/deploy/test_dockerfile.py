# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, as far as it goes without a container runtime: linted, and its steps done in folders here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import yaml

from kvgrpc import __version__
from tests.deploy.chart import CHART, ROOT
from tests.deploy.dockerfile import FILE, IMAGE_ROOT, image_variables, stages

IGNORE = [line for line in FILE.with_name("Dockerfile.dockerignore").read_text().splitlines() if line]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_it_is_built_in_two_stages_and_runs_as_nobody() -> None:
    build, image = stages()
    assert build.base == image.base, "an environment moves only between equal Pythons"
    assert "g++" in " ".join(build.all("RUN")) and "g++" not in " ".join(image.all("RUN"))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert image.all("USER") == [f"{values['user']}:{values['group']}"]
    assert image.steps[-3][0] == "USER", "nothing is done as root after it"
    assert (image.all("ENTRYPOINT"), image.all("CMD")) == (['["kvgrpc"]'], ['["serve"]'])
    assert image.all("COPY") == [f"--from={build.name} {IMAGE_ROOT} {IMAGE_ROOT}"]
    assert image_variables()["PATH"].split(":")[0] == f"{IMAGE_ROOT}/bin"
    assert f"kvgrpc:{__version__}" in FILE.read_text()


def test_the_image_has_what_mooncakes_library_loads_when_it_is_asked_for(tmp_path: Path) -> None:
    (step,) = (line for line in stages()[1].all("RUN") if "libibverbs1" in line)
    asked = tmp_path / "apt-get"
    asked.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    asked.chmod(0o755)
    step = step.replace("/var/lib/apt/lists", str(tmp_path / "lists"))
    for extras, installs in (
        ("", False),
        ("[valkey]", False),
        ("[mooncake-cpu,valkey]", True),
        ("[mooncake-cuda]", True),
    ):
        (tmp_path / "said").write_text("")
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "EXTRAS": extras}
        subprocess.run(["sh", "-ec", step], env=environment, check=True, timeout=10)
        assert (
            "--no-install-recommends libcurl4 libibverbs1 libnuma1" in (tmp_path / "said").read_text()
        ) is installs, extras


def sources() -> list[str]:
    """What the first stage copies out of the repository."""
    return [name for line in stages()[0].all("COPY") for name in line.split()[:-1]]


def let_through(name: str) -> bool:
    verdict = True
    for pattern in IGNORE:
        if fnmatch(name, pattern.removeprefix("!").removeprefix("**/")):
            verdict = pattern.startswith("!")
    return verdict


def test_the_build_context_is_what_is_copied() -> None:
    assert all(let_through(name) for name in sources())
    assert not any(let_through(name) for name in (".git", ".venv", "tests", "build", "docs", "__pycache__"))


def copied(folder: Path) -> Path:
    """The first stage's working folder after its COPY steps."""
    for line in stages()[0].all("COPY"):
        *names, target = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / target, ignore=ignore)
            else:
                shutil.copy(ROOT / name, folder / target)
    return folder


def test_what_is_copied_is_enough_to_build(tmp_path: Path) -> None:
    """The pip step as far as its compiler: the package's metadata, and the extension's build made ready."""
    (install,) = (line for line in stages()[0].all("RUN") if "pip install" in line)
    arguments = shlex.split(install.partition("pip install ")[2])
    assert arguments == ["--no-cache-dir", "--constraint", "constraints.txt", ".${EXTRAS}"]
    source, tools = copied(tmp_path), Path(sys.executable).parent
    metadata = "from scikit_build_core.build import prepare_metadata_for_build_wheel as p; print(p('.'))"
    nanobind = run(source, sys.executable, "-m", "nanobind", "--cmake_dir")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    assert run(source, sys.executable, "-c", metadata).splitlines()[-1] == f"kvgrpc-{__version__}.dist-info"
    assert (source / f"kvgrpc-{__version__}.dist-info/licenses/LICENSE").exists()
    run(source, str(tools / "cmake"), "-S.", "-Bout", "-GNinja", f"-Dnanobind_DIR={nanobind}", python)
    build = (source / "out/build.ninja").read_text()
    assert all(file.name in build for file in (ROOT / "csrc").glob("*.cpp"))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_constraints_name_all_that_is_installed() -> None:
    """The image is made of versions that the gate ran on."""
    project = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    wanted = {name.lower().replace("_", "-") for name in re.findall(r'^ +"([\w.-]+)>=', project, re.MULTILINE)}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(wanted) > 8 and wanted <= {name.lower().replace("_", "-") for name in pins}
