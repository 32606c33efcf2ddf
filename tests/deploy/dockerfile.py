# SPDX-License-Identifier: Apache-2.0
"""deploy/docker/Dockerfile as data: stages of (instruction, arguments)."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from tests.deploy.chart import ROOT

FILE = ROOT / "deploy/docker/Dockerfile"
IMAGE_ROOT = "/opt/kvgrpc"
"""Where the image has the environment with the program."""


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.steps if name == instruction]


def stages() -> list[Stage]:
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            base, _, alias = arguments.partition(" AS ")
            found.append(Stage(base, alias))
        elif name and found:
            found[-1].steps.append((name, arguments))
    return found


def image_variables() -> dict[str, str]:
    """What a container of the image has in its environment."""
    return dict(pair.split("=", 1) for line in stages()[-1].all("ENV") for pair in shlex.split(line))
