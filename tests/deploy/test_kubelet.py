# SPDX-License-Identifier: Apache-2.0
"""What the chart renders runs: the server as its container, its probes, engines connected as it tells them to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT, Manifest, of_kind, patched_engine, render, values
from tests.deploy.node import IS_ROOT, Node, Pod, Running, node
from tests.ports import free_port
from tests.security.guarded import Authority, new_token, write_access

SMALL = {"l1_size": "64Mi"}
ENGINE_USER, STRANGER = 4711, 4712
GOOD = "the bytes are the stored ones"
OTHER_USER = ["python", str(ROOT / "tests/deploy/other_user.py")]


def test_pod(here: Node, manifests: list[Manifest]) -> Pod:
    """The pod that `helm test` starts."""
    pod = of_kind(manifests, "Pod")
    return Pod(here, pod["metadata"]["name"], pod["spec"])


test_pod.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def engine(here: Node, manifests: list[Manifest], user: int, hostname: str = "") -> Pod:
    """An engine's pod, patched; ``hostname`` in place of the patch's."""
    spec = patched_engine(
        manifests,
        command=OTHER_USER,
        env=[{"name": "SHM_GROUP", "value": "65532" if IS_ROOT else "0"}],
        securityContext={"runAsUser": user, "runAsGroup": user},
    )
    return Pod(here, "engine", {**spec, **({"hostname": hostname} if hostname else {})})


def said(pod: Pod) -> str:
    done = pod.run(pod.spec["containers"][0])
    return f"{done.returncode}: {done.stdout}"


@contextmanager
def daemon(
    secrets: dict[str, dict[str, bytes]] | None = None, **sets: object
) -> Iterator[tuple[Node, list[Manifest], Running]]:
    """A node with the DaemonSet's pod started and ready."""
    manifests = render(*values(**{**SMALL, **sets}))
    with node(manifests) as here:
        here.secrets = secrets or {}
        pod = Pod(here, "kvgrpc-x7k2p", of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"])
        pod.prepare()
        with pod.started(pod.container("kvgrpc")) as server:
            server.wait_started()
            yield here, manifests, server


@pytest.mark.parametrize("discovery", ["socket", "service", "hostPort"])
def test_a_daemonset_from_its_start_to_its_end(discovery: str) -> None:
    """Field report 65: with a read-only root file system and as another user than root, too."""
    port = free_port()
    sets = {"tcp_insecure": "true", "tcp_port": port} if discovery != "socket" else {}
    with daemon(discovery=discovery, **sets) as (here, manifests, server):
        assert server.passes("livenessProbe") and server.passes("readinessProbe")
        answer = said(test_pod(here, manifests))
        assert answer.startswith("0: ") and GOOD in answer, answer + server.log
        code, took_s = server.terminate()
        grace_s = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert code == 0 and took_s < grace_s, server.log
        assert "Traceback" not in server.log
        assert not server.succeeds("livenessProbe")
        if discovery == "socket":
            assert [path.name for path in here.at("/run/kvgrpc").iterdir()] == ["kvgrpc.sock.lock"]


def test_engines_of_other_users_get_in_as_the_values_say() -> None:
    with daemon(engine_users=f"{{{ENGINE_USER}}}") as (here, manifests, server):
        answer = said(engine(here, manifests, ENGINE_USER))
        assert answer.startswith("0: ") and GOOD in answer, answer + server.log
        if IS_ROOT:  # else there are no other users
            assert "(see --allow-uid)" in said(engine(here, manifests, STRANGER))


def test_a_pod_of_another_host_name_is_refused_by_name() -> None:
    """Field report 48: memory of another host is never taken; the patch makes engine and server one host."""
    with daemon(engine_users=f"{{{ENGINE_USER}}}") as (here, manifests, _):
        answer = said(engine(here, manifests, ENGINE_USER, hostname="engine-5d8f"))
    assert "the client's memory is on host" in answer and not answer.startswith("0: ")


def test_the_arenas_file_stays_for_the_next_server_which_takes_it_over() -> None:
    with daemon(arena_persist="true") as (here, manifests, server):
        file = here.at("/dev/shm/kvgrpc-arena/l1")
        assert file.stat().st_size > 64 << 20
        server.process.kill()
        server.process.wait()
        assert file.exists()
        pod = Pod(here, "kvgrpc-next", of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"])
        pod.prepare()
        with pod.started(pod.container("kvgrpc")) as after:
            after.wait_started()
            assert GOOD in said(test_pod(here, manifests))
            assert after.terminate()[0] == 0
        assert {path.name for path in file.parent.iterdir()} == {"l1", "l1.index", "l1.lock", "l1.versions"}


def test_the_arenas_files_go_when_they_are_to_be_removed() -> None:
    """By the next pod, as an upgrade makes it, and nothing else goes; a node that never had any is left as it is."""
    with daemon(arena_persist="true") as (here, _, server):
        folder = here.at("/dev/shm/kvgrpc-arena")
        (folder / "somebody's").write_bytes(b"x")
        assert server.terminate()[0] == 0
        assert (folder / "l1").exists()
        manifests = render(*values(**SMALL, arena_remove="true"))
        spec = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]
        pod = Pod(here, "kvgrpc-next", spec)
        pod.prepare()
        assert [path.name for path in folder.iterdir()] == ["somebody's"]
        with pod.started(pod.container("kvgrpc")) as after:
            after.wait_started()
            assert GOOD in said(test_pod(here, manifests))
            assert after.terminate()[0] == 0
        assert [path.name for path in folder.iterdir()] == ["somebody's"]
    with node(manifests) as elsewhere:
        Pod(elsewhere, "kvgrpc-first", spec).prepare()
        assert list(elsewhere.at("/dev/shm/kvgrpc-arena").iterdir()) == []


def test_what_was_stored_is_on_the_nodes_disk_for_the_next_server() -> None:
    with daemon(disk_size="64Mi") as (here, manifests, server):
        assert GOOD in said(test_pod(here, manifests))
        assert server.terminate()[0] == 0
        stored = sum(path.stat().st_size for path in here.at("/var/lib/kvgrpc").glob("slot-*/*/*"))
        assert stored > 0, "what waited was written before the end"
        pod = Pod(here, "kvgrpc-next", of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"])
        pod.prepare()
        with pod.started(pod.container("kvgrpc")) as after:
            after.wait_started()
            status = pod.run(pod.container("kvgrpc"), ["kvgrpc", "status", "--json"]).stdout
            assert json.loads(status)["server"]["tiers"][0]["used_bytes"] >= stored, status
            assert after.terminate()[0] == 0


def test_a_sidecar_serves_its_engine() -> None:
    manifests = render(*values(mode="sidecar", engine_users=f"{{{ENGINE_USER}}}", **SMALL))
    with node(manifests) as here:
        for pod in (engine(here, manifests, ENGINE_USER), test_pod(here, manifests)):
            server = pod.container("kvgrpc")
            with pod.started(server) as running:
                while not running.succeeds("livenessProbe"):
                    assert running.process.poll() is None, running.log
                answer = said(pod)
                assert answer.startswith("0: ") and GOOD in answer, answer + running.log
                assert running.terminate()[0] == 0


def test_an_engine_cannot_replace_the_socket() -> None:
    with daemon() as (here, manifests, _):
        pod = test_pod(here, manifests)
        (container,) = pod.spec["containers"]
        done = pod.run(container, ["rm", "/run/kvgrpc/kvgrpc.sock"])
    assert done.returncode != 0 and "Read-only file system" in done.stdout


def in_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """What an operator puts into the Secrets of examples/secure.yaml."""
    authority = Authority(folder)
    token_file, hashed = new_token(folder, "engine")
    write_access(folder / "access.json", team={"tokens": [hashed], "salts": {"": None}})

    def pair(*identities: str) -> dict[str, bytes]:
        cert, key = authority.sign(identities[0], *identities)
        files = {"tls.crt": cert, "tls.key": key, "ca.crt": authority.ca}
        return {name: file.read_bytes() for name, file in files.items()}

    return {
        "kvgrpc-server": pair("kvgrpc.inference.svc"),
        "kvgrpc-engine": pair("engine.example"),
        "kvgrpc-access": {"access.json": (folder / "access.json").read_bytes()},
        "kvgrpc-token": {"token": Path(token_file).read_bytes()},
    }


@pytest.mark.parametrize("discovery", ["service", "hostPort"])
def test_tls_and_tenants_out_of_secrets(discovery: str, tmp_path: Path) -> None:
    """With client certificates; the kubelet asks the health port; who has another token gets nothing."""
    secrets, port, health_port = in_secrets(tmp_path), free_port(), free_port()
    sets: dict[str, object] = {
        "tcp_port": port,
        "tls_healthPort": health_port,
        "tls_secretName": "kvgrpc-server",
        "tls_clientCertificates": "true",
        "tls_clientSecretName": "kvgrpc-engine",
        "access_secretName": "kvgrpc-access",
        "access_tokenSecretName": "kvgrpc-token",
        **({"tls_serverName": "kvgrpc.inference.svc"} if discovery == "hostPort" else {}),
    }
    with daemon(secrets, discovery=discovery, **sets) as (here, manifests, server):
        assert server.passes("livenessProbe") and server.passes("readinessProbe")
        answer = said(test_pod(here, manifests))
        assert answer.startswith("0: ") and GOOD in answer, answer + server.log
        here.secrets["kvgrpc-token"] = {"token": b"another"}
        assert "UNAUTHENTICATED" in said(test_pod(here, manifests))
        assert server.terminate()[0] == 0
