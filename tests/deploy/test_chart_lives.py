# SPDX-License-Identifier: Apache-2.0
"""A release's life against an API server: install, upgrade, rollback, uninstall, with both majors of helm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.deploy.apiserver import Cluster, api_server
from tests.deploy.chart import CHART, HELMS, NAMESPACE, helm, values

SOCKET = {"configmaps/kv-kvgrpc-connection", "configmaps/kv-kvgrpc-engine", "daemonsets/kv-kvgrpc"}
TCP = values(discovery="service", tcp_insecure="true")
UNCHECKED = "--disable-openapi-validation"  # test_chart_renders.py does it; this server has no schemas


class Release:
    def __init__(self, version: str, cluster: Cluster, folder: Path) -> None:
        self._version = version
        self._cluster = cluster
        self._common = ("--kubeconfig", str(cluster.kubeconfig(folder)), "--namespace", NAMESPACE)

    def do(self, verb: str, *arguments: str) -> str:
        done = self.tried(verb, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tried(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return helm(self._version, verb, "kv", *arguments, *self._common)

    def is_there(self) -> set[str]:
        return self._cluster.names("secrets")

    def flags(self) -> list[str]:
        spec = self._cluster.objects["daemonsets", NAMESPACE, "kv-kvgrpc"]["spec"]["template"]["spec"]
        return spec["containers"][0]["args"]


@pytest.mark.parametrize("version", HELMS)
def test_a_release_from_install_to_uninstall(version: str, tmp_path: Path) -> None:
    with api_server() as cluster:
        release = Release(version, cluster, tmp_path)
        release.do("install", str(CHART), UNCHECKED)
        assert release.is_there() == SOCKET
        assert "--l1-size=4GiB" in release.flags() and "--insecure" not in release.flags()

        release.do("upgrade", str(CHART), *TCP, *values(l1_size="8Gi"), UNCHECKED)
        assert release.is_there() == SOCKET | {"services/kv-kvgrpc"}
        assert "--l1-size=8GiB" in release.flags() and "--insecure" in release.flags()
        address = cluster.objects["configmaps", NAMESPACE, "kv-kvgrpc-connection"]["data"]
        assert address == {"KVGRPC_ADDRESS": f"kv-kvgrpc.{NAMESPACE}.svc:50051"}

        release.do("rollback", "1")
        assert release.is_there() == SOCKET
        assert "--l1-size=4GiB" in release.flags() and "--insecure" not in release.flags()

        release.do("upgrade", str(CHART), *values(mode="sidecar"), UNCHECKED)
        assert release.is_there() == SOCKET - {"daemonsets/kv-kvgrpc"}
        history = json.loads(release.do("history", "--output", "json"))
        assert [one["status"] for one in history] == ["superseded"] * 3 + ["deployed"]

        release.do("uninstall")
        assert cluster.names() == set()
