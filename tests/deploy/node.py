# SPDX-License-Identifier: Apache-2.0
"""A poor man's kubelet: runs the containers of rendered pods as local processes, seeing what they would see.

Each process gets a mount namespace with a root file system of its own, read-only, in which the pod's volumes lie at
their mount paths; a host name; the container's variables and nothing else; and its user, groups and capabilities. The
node's folders are folders of a temporary one. A user who is not root cannot give processes other users: then all of
them are this user's, inside a user namespace.

Not played: images (this environment lies where the image has its own), control groups, the network (loopback for all),
PID namespaces and seccomp.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tests.deploy.chart import NAMESPACE, ROOT, Manifest
from tests.deploy.dockerfile import IMAGE_ROOT, image_variables

NODE_IP = "127.0.0.1"
SYSTEM = ("bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr")
IS_ROOT = os.geteuid() == 0
IMAGE_USER = 65532
"""And group, of the chart's defaults; 0 in the namespace of a user who is not root."""
COMMAND_S = 120


class Node:
    """One node: its folders, and the processes that run on it. ``pods`` by name, all of them ended at the end.
    ``secrets``: what is in each Secret, by name and key."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.maps = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}
        self._services = [one["metadata"]["name"] for one in manifests if one["kind"] == "Service"]
        for part in ("dev/shm", "empty", "files", "roots"):
            (folder / part).mkdir(parents=True)
        (folder / "dev/shm").chmod(0o1777)
        lines = [f"{NODE_IP} localhost", *(f"{NODE_IP} {name}.{NAMESPACE}.svc" for name in self._services)]
        (folder / "hosts").write_text("\n".join([*lines, ""]))

    def at(self, path: str) -> Path:
        """Where the node's folder of this path is."""
        return self.folder / path.lstrip("/")


class Pod:
    """A pod's containers on a node. ``hostname``: of a pod without one of its own."""

    def __init__(self, node: Node, name: str, spec: dict[str, Any], hostname: str = "") -> None:
        self.node = node
        self.spec = spec
        self._name = name
        self._hostname = spec.get("hostname") or hostname or name
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec["volumes"]}

    def container(self, name: str) -> dict[str, Any]:
        (found,) = (
            one for one in [*self.spec.get("initContainers", []), *self.spec["containers"]] if one["name"] == name
        )
        return found

    def prepare(self) -> None:
        """Runs the init containers that end."""
        for container in self.spec.get("initContainers", ()):
            if container.get("restartPolicy") != "Always":
                done = self.run(container)
                assert done.returncode == 0, done.stdout

    def run(self, container: dict[str, Any], command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """A container that ends, or a command inside one that runs."""
        return subprocess.run(
            self._command(container, command),
            env=self._outer(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    @contextmanager
    def started(self, container: dict[str, Any]) -> Iterator[Running]:
        """A container that stays, from its start to SIGTERM and the end of its grace period."""
        with (self.node.folder / f"{self._name}.log").open("wb") as log:
            process = subprocess.Popen(self._command(container, None), env=self._outer(), stdout=log, stderr=log)
        running = Running(self, container, process, Path(log.name))
        try:
            yield running
        finally:
            running.terminate()

    def variables(self, container: dict[str, Any]) -> dict[str, str]:
        """The container's variables: literal, from ConfigMaps, from the node; with ``$(NAME)`` of earlier ones."""
        found = image_variables()
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "configMapKeyRef" in source:
                asked = source["configMapKeyRef"]
                found[one["name"]] = self.node.maps[asked["name"]][asked["key"]]
            elif "fieldRef" in source:
                found[one["name"]] = {"status.hostIP": NODE_IP}[source["fieldRef"]["fieldPath"]]
            else:
                found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], one["value"])
        return found

    def _volume(self, volume: dict[str, Any]) -> Path:
        if "hostPath" in volume:
            place = self.node.at(volume["hostPath"]["path"])
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                place.mkdir(mode=0o755, parents=True, exist_ok=True)
            assert place.is_dir(), f"the node has no folder {place}"
        elif "emptyDir" in volume:
            place = self.node.folder / "empty" / f"{self._name}-{volume['name']}"
            place.mkdir(exist_ok=True)
            place.chmod(0o777)
        elif "secret" in volume:
            place = self.node.folder / "files" / f"{self._name}-{volume['name']}"
            place.mkdir(exist_ok=True)
            data = self.node.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items", [{"key": key, "path": key} for key in data])
            for item in items:
                (place / item["path"]).write_bytes(data[item["key"]])
        else:
            place = self.node.folder / "files" / volume["configMap"]["name"]
            place.mkdir(exist_ok=True)
            for file, text in self.node.maps[volume["configMap"]["name"]].items():
                (place / file).write_text(text)
        return place

    def _outer(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}

    def _command(self, container: dict[str, Any], command: list[str] | None) -> list[str]:
        inner = command or [*container["command"], *container.get("args", [])]
        if not IS_ROOT:
            inner = [re.sub(rf"(?<![0-9]){IMAGE_USER}(?![0-9])", "0", part) for part in inner]
        names = [f"{name}={value}" for name, value in self.variables(container).items()]
        confined = [*_identity(self.spec, container), "env", "-i", *names, *inner]
        root = Path(tempfile.mkdtemp(dir=self.node.folder / "roots"))
        root.chmod(0o755)
        mounts = [
            (self._volumes[m["name"]], m["mountPath"], m.get("readOnly", False))
            for m in container.get("volumeMounts", ())
        ]
        script = _script(root, self.node, mounts, self._hostname, confined)
        user = [] if IS_ROOT else ["--user", "--map-root-user"]
        return ["unshare", *user, "--mount", "--uts", "--propagation", "private", "sh", "-euc", script]


class Running:
    """A container's process."""

    def __init__(self, pod: Pod, container: dict[str, Any], process: subprocess.Popen[bytes], log: Path) -> None:
        self._pod = pod
        self._container = container
        self._log = log
        self.process = process

    @property
    def log(self) -> str:
        return self._log.read_text()

    def succeeds(self, probe: str) -> bool:
        """One try of a probe, as its kind asks for."""
        asked = self._container[probe]
        if "grpc" in asked:
            return _check(asked["grpc"]["port"], asked["grpc"]["service"], asked["timeoutSeconds"])
        begin = time.monotonic()
        done = self._pod.run(self._container, asked["exec"]["command"])
        return done.returncode == 0 and time.monotonic() - begin < asked["timeoutSeconds"]

    def passes(self, probe: str) -> bool:
        """The kubelet's verdict: failed when it fails as often as its threshold says, one after the other."""
        return any(self.succeeds(probe) for _ in range(self._container[probe]["failureThreshold"]))

    def wait_started(self) -> None:
        """Until the start-up probe succeeds, inside its budget."""
        asked = self._container["startupProbe"]
        end = time.monotonic() + asked["periodSeconds"] * asked["failureThreshold"]
        while not self.succeeds("startupProbe"):
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.1)

    def terminate(self) -> tuple[int, float]:
        """SIGTERM, then SIGKILL after the grace period: the exit code and the seconds that it took."""
        begin = time.monotonic()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(self._pod.spec.get("terminationGracePeriodSeconds", 30))
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(), time.monotonic() - begin


@contextmanager
def node(manifests: list[Manifest]) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="kvn", dir="/dev/shm"))  # a tmpfs, as the node's own folders are
    folder.chmod(0o755)
    try:
        yield Node(folder, manifests)
    finally:
        shutil.rmtree(folder)


def _check(port: int, service: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(f"{NODE_IP}:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _identity(spec: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """The command that becomes the container's user, with its groups and capabilities."""
    context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    kept = [f"+{name.lower()}" for name in context.get("capabilities", {}).get("add", ())]
    bounds = ",".join(["-all", *kept]) if "ALL" in context.get("capabilities", {}).get("drop", ()) else "+all"
    command = ["setpriv", f"--bounding-set={bounds}", "--inh-caps=-all"]
    if not context.get("allowPrivilegeEscalation", True):
        command.append("--no-new-privs")
    if IS_ROOT:
        user, group = context["runAsUser"], context.get("runAsGroup", 0)
        assert user != 0 or not context.get("runAsNonRoot", False), "the kubelet refuses to run this container as root"
        groups = ",".join(map(str, context.get("supplementalGroups", []))) or str(group)
        command += [f"--reuid={user}", f"--regid={group}", f"--groups={groups}"]
    return command


def _script(root: Path, node: Node, mounts: list[tuple[Path, str, bool]], hostname: str, command: list[str]) -> str:
    """Builds the container's root file system and runs the command in it."""
    lines = [f"echo {hostname} > /proc/sys/kernel/hostname", f"mount -t tmpfs -o mode=755 tmpfs {root}"]
    bound: list[str] = []
    for name in SYSTEM:
        if Path("/", name).is_symlink():
            lines.append(f"ln -s {os.readlink(Path('/', name))} {root}/{name}")
        elif Path("/", name).is_dir():
            lines.append(f"mkdir {root}/{name} && mount --rbind /{name} {root}/{name}")
            bound.append(f"{root}/{name}")
    needed = {str(ROOT): str(ROOT), sys.base_prefix: sys.base_prefix, sys.prefix: sys.prefix, IMAGE_ROOT: sys.prefix}
    for place, source in needed.items():
        if Path(place).parts[1] not in SYSTEM and not place.startswith(f"{ROOT}/"):
            lines.append(f"mkdir -p {root}{place} && mount --bind {source} {root}{place}")
            bound.append(f"{root}{place}")
    lines += [f"mount --bind {node.folder}/hosts {root}/etc/hosts"]
    lines += [f"mkdir -p {root}{path}" for _, path, _ in mounts if path != "/dev/shm"]
    lines += [f"mount -o remount,bind,ro {place} 2>/dev/null || true" for place in bound]
    for source, path, read_only in mounts:
        lines.append(f"mount --bind {source} {root}{path}")
        if read_only:
            lines.append(f"mount -o remount,bind,ro {root}{path}")
    lines += [f"mount -o remount,ro {root}", f"exec chroot {root} {shlex.join(command)}"]
    return "\n".join(lines)
