# SPDX-License-Identifier: Apache-2.0
"""The controllers of DaemonSets and Jobs of an API server, and the kubelets of some nodes, as far as an uninstall
needs them: pods of DaemonSets run as processes on each node, containers of Jobs one after the other on the first."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.deploy.apiserver import Cluster, Key, Object
from tests.deploy.chart import KUBECTL
from tests.deploy.node import Node, Pod, Running

WAIT_S = 180
ARENA_FILES = ("l1", "l1.index", "l1.lock", "l1.versions")


class Controllers:
    """``story``: (DaemonSet, node, what its pod did there), in order. ``said``: what the containers of Jobs wrote.

    ``serve``: whether servers run; else a process that waits, and has left the files of an arena, stands for each.
    ``pulls``: whether images of Jobs can be had. ``down``: nodes whose pods do not end when they are told to. With
    either, ``patience_s`` takes the place of each time that a Job's commands wait.
    """

    def __init__(self, cluster: Cluster, nodes: list[Node], serve: bool) -> None:
        self.pulls = True
        self.down: set[int] = set()
        self.patience_s: int | None = None
        self.story: list[tuple[str, int, str]] = []
        self.said = ""
        self._cluster = cluster
        self._nodes = nodes
        self._serve = serve
        self._pods: dict[str, list[Running]] = {}
        self._begun: dict[str, tuple[Key, Future[None]]] = {}
        self._ending: set[str] = set()
        self._tasks: list[Future[None]] = []
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(8))

    def wait(self, done: Callable[[], bool]) -> None:
        """Until an object's change makes that true."""
        with self._cluster.changed:
            assert self._cluster.changed.wait_for(done, WAIT_S), (self._cluster.objects, self.story, self.said)

    def available(self, name: str) -> bool:
        """Whether the DaemonSet's pods run on every node. Inside ``wait``."""
        found = [
            one for (plural, _, its), one in self._cluster.objects.items() if (plural, its) == ("daemonsets", name)
        ]
        return [one.get("status", {}).get("numberAvailable") for one in found] == [len(self._nodes)]

    def run(self) -> None:
        """Until the API server closes."""
        with self._cluster.changed:
            while not self._cluster.closed:
                self._turn()
                self._cluster.changed.wait()

    def end(self) -> None:
        """Ends what still runs, and raises what went wrong."""
        for running in [one for pods in self._pods.values() for one in pods]:
            running.terminate()
        self._stack.close()
        for task in self._tasks:
            task.result()

    def _turn(self) -> None:
        """Sees what is new and what has gone. Acts are tasks: each node and each Job goes its own way."""
        objects = self._cluster.objects
        for key, one in objects.items():
            uid = one["metadata"]["uid"]
            if key[0] not in ("daemonsets", "jobs") or uid in self._begun:
                continue
            self._begun[uid] = key, self._submit(self._run_pods if key[0] == "daemonsets" else self._run_job, key, one)
            if key[0] == "daemonsets":
                self._cluster.held.add(uid)
        for uid, (key, begun) in self._begun.items():
            now = objects.get(key, {"metadata": {}})["metadata"]
            going = now.get("uid") != uid or "deletionTimestamp" in now
            if going and key[0] == "daemonsets" and uid not in self._ending:
                self._ending.add(uid)
                self._submit(self._end_pods, key, uid, begun)

    def _submit(self, act: Callable[..., None], *arguments: Any) -> Future[None]:
        task = self._pool.submit(act, *arguments)
        self._tasks.append(task)
        return task

    def _run_pods(self, key: Key, one: Object) -> None:
        """The pods of a DaemonSet, with a status after each as its controller writes it."""
        spec, uid = one["spec"]["template"]["spec"], one["metadata"]["uid"]
        pods = self._pods[uid] = []
        count = len(self._nodes)
        for number, node in enumerate(self._nodes):
            self._put_status(key, one, desired=count, available=number)
            self.story.append((key[2], number, "begins"))
            pod = Pod(node, f"{uid}-{number}", spec)
            pod.prepare()
            (container,) = spec["containers"]
            if container["name"] == "kvgrpc" and not self._serve:
                container = {**container, "command": ["sleep", "infinity"], "args": []}
                del container["startupProbe"]
                assert pod.run(container, ["touch", *(f"/arena/{name}" for name in ARENA_FILES)]).returncode == 0
            running = self._stack.enter_context(pod.started(container))
            if "startupProbe" in container:
                running.wait_started()
            pods.append(running)
        self._put_status(key, one, desired=count, available=count)

    def _put_status(self, key: Key, one: Object, desired: int, available: int) -> None:
        status = {"observedGeneration": one["metadata"]["generation"], "desiredNumberScheduled": desired}
        status |= {"currentNumberScheduled": desired, "updatedNumberScheduled": desired, "numberMisscheduled": 0}
        status |= {"numberReady": available, "numberAvailable": available}
        self._cluster.put_status(key, one["metadata"]["uid"], status)

    def _end_pods(self, key: Key, uid: str, begun: Future[None]) -> None:
        begun.result()
        for number, running in enumerate(self._pods[uid]):
            if number not in self.down:
                running.terminate()
                self.story.append((key[2], number, "has ended"))
        if not self.down:
            self._cluster.release(key, uid)

    def _run_job(self, key: Key, job: Object) -> None:
        spec, uid = job["spec"]["template"]["spec"], job["metadata"]["uid"]
        tries = job["spec"]["backoffLimit"] + 1
        if not self.pulls:
            ended = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
        elif any(self._try_job(key, f"{uid}-{number}", spec) for number in range(tries)):
            ended = {"type": "Complete", "status": "True"}
        else:
            ended = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        self._cluster.put_status(key, uid, {"startTime": "2026-01-01T00:00:00Z", "conditions": [ended]})

    def _try_job(self, key: Key, name: str, spec: Object) -> bool:
        """One pod: its containers in order, each of them kubectl as the pod's service account."""
        node = self._nodes[0]
        with self._cluster.changed:
            maps = {name: one["data"] for (kind, _, name), one in self._cluster.objects.items() if kind == "configmaps"}
        node.maps.update(maps)
        assert spec["automountServiceAccountToken"], "without a token nobody gets in"
        config = self._cluster.kubeconfig(node.folder, spec["serviceAccountName"])
        pod = Pod(node, name, spec)
        for container in [*spec["initContainers"], *spec["containers"]]:
            program, *options = [*container["command"], *container["args"]]
            assert program == "kubectl"
            if self.patience_s is not None:
                options = [re.sub(r"^--timeout=.*", f"--timeout={self.patience_s}s", one) for one in options]
            done = pod.run(container, [str(KUBECTL), f"--kubeconfig={config}", *options])
            self.said += done.stdout
            if done.returncode != 0:
                return False
        return True


@contextmanager
def controllers(cluster: Cluster, nodes: list[Node], serve: bool) -> Iterator[Controllers]:
    played = Controllers(cluster, nodes, serve)
    thread = threading.Thread(target=played.run)
    thread.start()
    try:
        yield played
    finally:
        cluster.close()
        thread.join()
        played.end()
