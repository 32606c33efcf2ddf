# SPDX-License-Identifier: Apache-2.0
"""The chart as helm renders it, with both majors of helm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/kvgrpc"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
HELMS = {version: ROOT / f"build/helm/{version}/helm" for version in ("3.19.0", "4.1.4")}
NEWEST = "4.1.4"
KUBECTL = ROOT / "build/kubectl/1.34.5/kubectl"
KUBERNETES = ("1.29.0", "1.32.0", "1.36.0")
RELEASE, NAMESPACE = "kvgrpc", "inference"

Manifest = dict[str, Any]


def helm(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELMS[version].exists(), "the chart's tests need helm: make helm"
    command = [str(HELMS[version]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def template(*arguments: str, version: str = NEWEST, release: str = RELEASE) -> subprocess.CompletedProcess[str]:
    return helm(version, "template", release, str(CHART), "--namespace", NAMESPACE, *arguments)


@cache
def rendered_text(*arguments: str, version: str = NEWEST, release: str = RELEASE) -> str:
    done = template(*arguments, version=version, release=release)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*arguments: str, version: str = NEWEST, release: str = RELEASE) -> list[Manifest]:
    text = rendered_text(*arguments, version=version, release=release)
    return [document for document in yaml.safe_load_all(text) if document]


def values(**sets: object) -> tuple[str, ...]:
    """``values(l1_size="64Mi")`` -> ``("--set", "l1.size=64Mi")``; two underscores are a dash."""
    pairs = ((name.replace("__", "-").replace("_", "."), value) for name, value in sets.items())
    return tuple(part for name, value in pairs for part in ("--set", f"{name}={value}"))


def of_kind(manifests: list[Manifest], kind: str, ending: str = "") -> Manifest:
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(ending))
    return found


def inner(manifests: list[Manifest]) -> list[Manifest]:
    """What the chart has a Job create, out of the ConfigMaps that hold it."""
    texts = [text for one in manifests if one["kind"] == "ConfigMap" for text in one["data"].items()]
    return [yaml.safe_load(text) for name, text in texts if name == "daemonset.yaml"]


def patch(manifests: list[Manifest]) -> Manifest:
    """The patch for engines' workloads."""
    return yaml.safe_load(of_kind(manifests, "ConfigMap", "-engine")["data"]["patch.yaml"])


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(what it is, spec) of every pod, the engine's as the patch makes it included."""
    for one in manifests:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
    yield "engine", patched_engine(manifests)


def patched_engine(manifests: list[Manifest], **container: Any) -> Manifest:
    """The spec of an engine's pod after the patch."""
    changes = patch(manifests)["spec"]["template"]["spec"]
    engine = {"name": changes["containers"][0]["name"], "image": "engine:1", **container}
    return merged({"containers": [engine]}, changes)


def merged(base: Any, change: Any) -> Any:
    """A strategic merge as far as pod specs need it: lists of named things by name, mounts by path, else replaced."""
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
    if isinstance(base, list) and isinstance(change, list) and all(isinstance(item, dict) for item in change):
        key = "mountPath" if change and "mountPath" in change[0] else "name"
        known = {item[key]: item for item in base}
        for item in change:
            known[item[key]] = merged(known.get(item[key]), item)
        return list(known.values())
    return change
