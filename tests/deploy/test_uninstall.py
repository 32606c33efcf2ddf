# SPDX-License-Identifier: Apache-2.0
"""What an uninstall leaves on the nodes: with ``arena.persist`` a hook ends the servers and removes their files there;
played with both majors of helm and the real kubectl on two nodes, once with real servers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.deploy.apiserver import Cluster, api_server
from tests.deploy.chart import CHART, HELMS, KUBECTL, NAMESPACE, Manifest, of_kind, render, values
from tests.deploy.controllers import ARENA_FILES, Controllers, controllers
from tests.deploy.node import Node, node
from tests.deploy.test_chart_lives import UNCHECKED, Release
from tests.served import wait_until

SERVER, ARENA = "kv-kvgrpc", "kv-kvgrpc-arena"
SMALL = {"arena_persist": "true", "l1_size": "64Mi"}
FILES = set(ARENA_FILES)
OTHERS = "somebody's"
ENDED = [(SERVER, 0, "has ended"), (SERVER, 1, "has ended")]
REMOVED = [(ARENA, number, what) for what, number in product(("begins", "has ended"), (0, 1))]

both_majors = pytest.mark.parametrize("version", HELMS)


@dataclass
class World:
    cluster: Cluster
    nodes: list[Node]
    played: Controllers
    release: Release

    def files(self) -> list[set[str]]:
        """What lies in the arena's folder of each node."""
        return [{path.name for path in one.at(f"/dev/shm/{SERVER}-arena").iterdir()} for one in self.nodes]


@contextmanager
def installed(version: str, folder: Path, serve: bool = False, **sets: object) -> Iterator[World]:
    """A release on two nodes, with somebody's file beside each arena. ``serve``: with real servers."""
    with api_server() as cluster, node([]) as one, node([]) as two, controllers(cluster, [one, two], serve) as played:
        release = Release(version, cluster, folder)
        release.do("install", str(CHART), UNCHECKED, *values(**SMALL, **sets))
        played.wait(lambda: played.available(SERVER))
        world = World(cluster, [one, two], played, release)
        for place in world.nodes:
            (place.at(f"/dev/shm/{SERVER}-arena") / OTHERS).write_bytes(b"x")
        assert all(FILES - {"l1.index"} <= files for files in world.files()), world.files()
        played.story.clear()
        yield world
        assert cluster.denied == set(), "the Role has all that kubectl asks for: it would go on without a watch"


@both_majors
def test_an_uninstall_ends_the_servers_and_then_removes_their_files_on_each_node(version: str, tmp_path: Path) -> None:
    with installed(version, tmp_path, serve=True) as world:
        world.release.do("uninstall")
        assert world.cluster.names() == set(), world.played.said
        assert world.files() == [{OTHERS}, {OTHERS}]
        assert world.played.story == [*ENDED, *REMOVED]
        asked = {verb for verb, _, _ in world.cluster.asked}
        assert asked == {verb for rule in _hook("Role")["rules"] for verb in rule["verbs"]}, "no verb is for nothing"


@both_majors
def test_the_files_stay_where_they_are_kept(version: str, tmp_path: Path) -> None:
    with installed(version, tmp_path, arena_keepOnUninstall="true") as world:
        world.release.do("uninstall")
        world.played.wait(lambda: len(world.played.story) == len(ENDED))
        assert world.cluster.names() == set() and world.cluster.asked == set()
        assert world.files() == [FILES | {OTHERS}] * 2
        assert world.played.story == ENDED


@both_majors
def test_without_kubectls_image_nothing_ends_and_the_release_goes_without_hooks(version: str, tmp_path: Path) -> None:
    with installed(version, tmp_path) as world:
        world.played.pulls = False
        done = world.release.tried("uninstall")
        assert done.returncode != 0 and ARENA in done.stderr, done.stderr
        assert world.played.available(SERVER) and world.played.story == []
        assert world.release.flags(), "it still serves"

        world.release.do("uninstall", "--no-hooks")
        world.played.wait(lambda: len(world.played.story) == len(ENDED))
        assert world.cluster.names() == {f"jobs/{ARENA}"}
        assert world.files() == [FILES | {OTHERS}] * 2


@both_majors
def test_a_node_that_is_down_holds_up_the_hook_and_not_the_release(version: str, tmp_path: Path) -> None:
    with installed(version, tmp_path) as world:
        world.played.down, world.played.patience_s = {1}, 2
        done = world.release.tried("uninstall")
        assert done.returncode != 0 and ARENA in done.stderr, done.stderr
        assert "timed out waiting for the condition" in world.played.said
        wait_until(lambda: world.played.story, 30)
        assert world.played.story == ENDED[:1], "nothing is removed while a server may run"

        world.release.do("uninstall", "--no-hooks")
        assert world.cluster.names() == {f"jobs/{ARENA}"}
        assert world.files()[1] >= {"l1", OTHERS}


@both_majors
def test_an_uninstall_that_failed_can_be_repeated(version: str, tmp_path: Path) -> None:
    """Whatever the tries before have left: the objects of the hook, and even its DaemonSet."""
    with installed(version, tmp_path) as world:
        world.played.pulls = False
        assert world.release.tried("uninstall").returncode != 0
        with world.cluster.changed:
            left = yaml.safe_load(_hook("ConfigMap", "-arena")["data"]["daemonset.yaml"])
            world.cluster.put(("daemonsets", NAMESPACE, ARENA), left)
        world.played.wait(lambda: world.played.available(ARENA))
        world.played.pulls = True
        world.release.do("uninstall")
        assert world.cluster.names() == set(), world.played.said
        assert world.files() == [{OTHERS}, {OTHERS}]
        assert world.played.story[-len(REMOVED) :] == REMOVED


def test_the_hooks_account_may_do_nothing_else(tmp_path: Path) -> None:
    with api_server() as cluster:
        for plural, kind in {
            "serviceaccounts": "ServiceAccount",
            "roles": "Role",
            "rolebindings": "RoleBinding",
        }.items():
            with cluster.changed:
                cluster.put((plural, NAMESPACE, ARENA), _hook(kind))
        with cluster.changed:
            cluster.put(("daemonsets", NAMESPACE, "another"), _hook("ConfigMap", "-engine"))
        config = cluster.kubeconfig(tmp_path, ARENA)
        for command in ("get secrets", "get daemonsets", "delete daemonset another", "delete job x", "get pods"):
            line = [str(KUBECTL), f"--kubeconfig={config}", f"--namespace={NAMESPACE}", *command.split()]
            done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode != 0 and "(Forbidden)" in done.stderr, command + done.stderr
        assert ("daemonsets", NAMESPACE, "another") in cluster.objects


def _hook(kind: str, ending: str = "") -> Manifest:
    """What the chart renders for the release of these tests."""
    return of_kind(render(*values(**SMALL), release="kv"), kind, ending)
