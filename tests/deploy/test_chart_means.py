# SPDX-License-Identifier: Apache-2.0
"""What the chart renders is right beyond its form, and values that cannot be meant are refused with a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import EXAMPLES, HELMS, Manifest, inner, merged, of_kind, pod_specs, render, template, values
from tests.deploy.semantics import faults

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
TCP = {"discovery": "service", "tcp_insecure": "true"}


@every_example
def test_every_example_is_sound(example: Path) -> None:
    assert faults(render("--values", str(example))) == []


@pytest.mark.parametrize("release", ["a", "a.b", "kvgrpc-" + "x" * 46, "x" * 53])
def test_any_name_of_a_release_is_sound(release: str) -> None:
    assert faults(render(*values(arena_persist="true", **TCP), release=release)) == []
    assert faults(render(*values(mode="sidecar"), release=release)) == []


@every_example
def test_only_an_uninstall_gets_a_token_and_no_two_servers_meet(example: Path) -> None:
    manifests = render("--values", str(example))
    uninstalls = {one["metadata"]["name"] for one in manifests if one["kind"] == "Job"}
    own = {name: spec for name, spec in pod_specs(manifests) if name != "engine"}
    assert all(spec["automountServiceAccountToken"] is (name in uninstalls) for name, spec in own.items())
    assert not any(one["spec"]["template"]["spec"]["automountServiceAccountToken"] for one in inner(manifests))
    assert all(spec["enableServiceLinks"] is False for spec in own.values())
    for one in manifests:
        if one["kind"] == "DaemonSet":
            assert one["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
            assert all(name in one["spec"]["template"]["spec"]["containers"][0] for name in PROBES)


PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def test_a_sidecar_takes_nothing_of_the_node_and_holds_up_no_engine() -> None:
    """Field report 58: no card is claimed and nothing is privileged; the pod passes the restricted level."""
    for _, spec in pod_specs(render(*values(mode="sidecar"))):
        assert not any("hostPath" in volume for volume in spec["volumes"])
        (server,) = spec["initContainers"]
        assert server["restartPolicy"] == "Always" and "livenessProbe" in server
        assert "readinessProbe" not in server and "startupProbe" not in server
        assert not any("nvidia" in name for name in server["resources"]["limits"])
        sizes = [volume["emptyDir"].get("medium") for volume in spec["volumes"] if volume["name"] == "kvgrpc-shm"]
        assert sizes == ["Memory"]


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_cards_are_reached_and_not_claimed(mode: str) -> None:
    """Field report 58."""
    plain = dict(pod_specs(render(*values(mode=mode))))
    for name, spec in pod_specs(render(*values(mode=mode, cards_enabled="true"))):
        servers = [one for one in [*spec.get("initContainers", []), *spec["containers"]] if one["name"] == "kvgrpc"]
        if not servers:
            continue
        (server,) = servers
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in server["env"]
        assert set(server["resources"]["limits"]) == {"memory"}
        assert spec["shareProcessNamespace"] is True and "hostPID" not in spec
        assert spec.get("runtimeClassName") == ("nvidia" if mode == "daemonset" else None), "an engine's is its own"
        assert "shareProcessNamespace" not in plain[name]


def test_a_service_reaches_its_own_node_only() -> None:
    """Field reports 46 and 48."""
    service = of_kind(render(*values(**TCP)), "Service")["spec"]
    assert service["internalTrafficPolicy"] == "Local" and service["type"] == "ClusterIP"


def test_only_the_folders_init_container_is_root() -> None:
    roots = [
        container
        for example in EXAMPLES
        for _, spec in pod_specs(render("--values", str(example)))
        for container in [*spec.get("initContainers", []), *spec["containers"]]
        if container.get("securityContext", {}).get("runAsUser") == 0
    ]
    assert {container["name"] for container in roots} == {"folders"}
    assert all(one["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]} for one in roots)
    assert not any("initContainers" in spec for _, spec in pod_specs(render(*values(prepareFolders="false"))))


NODES: dict[str, object] = {
    "imagePullSecrets[0].name": "pull",
    "priorityClassName": "high",
    "nodeSelector.cards": "yes",
    "tolerations[0].operator": "Exists",
    "affinity.nodeAffinity.x": "y",
}


def test_an_uninstall_reaches_the_servers_nodes_and_may_no_more_than_it_needs() -> None:
    """By the Role, users and folders; that it suffices is in test_uninstall.py."""
    sets = {"arena_persist": "true", "user": 7, "group": 8, "prepareFolders": "false", **NODES}
    manifests = render(*values(**sets))
    (arena,) = inner(manifests)
    server, job = (of_kind(manifests, kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "Job"))
    removal = arena["spec"]["template"]["spec"]
    for name in ("imagePullSecrets", "priorityClassName", "nodeSelector", "tolerations", "affinity"):
        assert server[name] == removal[name] == job[name]
    (volume,) = [one for one in server["volumes"] if one["name"] == "kvgrpc-arena"]
    assert removal["volumes"] == [volume]
    for spec in (removal, job):
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert container["securityContext"] == server["containers"][0]["securityContext"]
    assert job["serviceAccountName"] == of_kind(manifests, "ServiceAccount")["metadata"]["name"]
    of_one, of_all = of_kind(manifests, "Role")["rules"][::-1]
    assert of_one["resourceNames"] == ["kvgrpc", "kvgrpc-arena"] and of_all["verbs"] == ["create"]
    assert {*of_one["resources"], *of_all["resources"]} == {"daemonsets"}


def test_an_uninstall_waits_as_long_as_a_server_may_take_to_end() -> None:
    job = of_kind(render(*values(arena_persist="true", drainSeconds=90)), "Job")["spec"]
    waits = [arg for one in job["template"]["spec"]["initContainers"] for arg in one["args"] if "--timeout" in arg]
    assert waits == ["--timeout=130s", "--timeout=120s"] and job["activeDeadlineSeconds"] == 340


@pytest.mark.parametrize("sets", [{}, {"arena_remove": "true"}, {"mode": "sidecar"}, {"disk_size": "1Gi"}])
def test_an_uninstall_that_has_no_file_to_remove_needs_no_rights(sets: dict[str, object]) -> None:
    kept = {"arena_persist": "true", "arena_keepOnUninstall": "true"}
    for manifests in (render(*values(**sets)), render(*values(**kept))):
        assert not {one["kind"] for one in manifests} & {"Job", "Role", "RoleBinding", "ServiceAccount"}


# ---- the checks find what they are for ------------------------------------------------------------------------------


def _server(manifests: list[Manifest]) -> dict[str, Any]:
    return of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]


def _labels(manifests: list[Manifest]) -> dict[str, str]:
    return of_kind(manifests, "DaemonSet")["spec"]["template"]["metadata"]["labels"]


BROKEN: dict[str, tuple[Callable[[list[Manifest]], object], str]] = {
    "selector": (
        lambda m: of_kind(m, "Service")["spec"]["selector"].update(extra="1"),
        "the selector of Service is not in the labels",
    ),
    "mount": (lambda m: _server(m)["volumeMounts"].append({"name": "none", "mountPath": "/x"}), "no volume none"),
    "two mounts": (
        lambda m: _server(m)["volumeMounts"].append(_server(m)["volumeMounts"][0]),
        "two mounts at one path",
    ),
    "port name": (lambda m: _server(m)["ports"][0].update(name="a-name-of-too-many"), "port name"),
    "target port": (
        lambda m: of_kind(m, "Service")["spec"]["ports"][0].update(targetPort="x"),
        "no container has port x",
    ),
    "request": (lambda m: _server(m)["resources"]["requests"].update(memory="1Ti"), "more memory than its limit"),
    "flag": (lambda m: _server(m)["args"].append("--tier=x"), "no option --tier"),
    "repeated flag": (lambda m: _server(m)["args"].append("--l1-size=1GiB"), "--l1-size is given twice"),
    "variable": (lambda m: _server(m)["env"].append({"name": "KVGRPC_TIER"}), "nothing reads KVGRPC_TIER"),
    "a password in clear": (
        lambda m: _server(m)["env"].append({"name": "VALKEY_PASSWORD", "value": "x"}),
        "VALKEY_PASSWORD does not come from a Secret",
    ),
    "a file that is nowhere": (
        lambda m: _server(m)["args"].append("--valkey-ca=/run/secrets/kvgrpc/valkey-ca/ca.crt"),
        "nothing is mounted where /run/secrets/kvgrpc/valkey-ca/ca.crt",
    ),
    "another's variable": (
        lambda m: _server(m)["env"].append({"name": "AWS_KEY", "value": "x"}),
        "nothing reads AWS_KEY",
    ),
    "probe's port": (lambda m: _server(m)["livenessProbe"]["grpc"].update(port=1), "livenessProbe asks"),
    "probe's name": (lambda m: _server(m)["livenessProbe"]["grpc"].update(service="readiness"), "livenessProbe asks"),
    "two handlers": (
        lambda m: _server(m)["livenessProbe"].update(
            exec={"command": ["kvgrpc", "healthcheck", "liveness", "--timeout-ms=1"]}
        ),
        "exactly one handler",
    ),
    "name": (lambda m: of_kind(m, "Service")["metadata"].update(name="Upper"), "no DNS-1123 name"),
    "root": (lambda m: _server(m)["securityContext"].update(runAsUser=0), "it is not confined"),
    "a pod that is no server": (
        lambda m: of_kind(m, "Job")["spec"]["template"]["metadata"].update(labels=_labels(m)),
        "the selector of Service chooses the pods of Job kvgrpc-arena",
    ),
    "a pod of two DaemonSets": (
        lambda m: of_kind(m, "ConfigMap", "-arena")["data"].update(
            {
                "daemonset.yaml": yaml.safe_dump(
                    merged(inner(m)[0], {"spec": {"template": {"metadata": {"labels": _labels(m)}}}})
                )
            }
        ),
        "the selector of DaemonSet chooses the pods of DaemonSet kvgrpc-arena",
    ),
    "the Job's manifest": (
        lambda m: of_kind(m, "ConfigMap", "-arena")["metadata"].update(name="x"),
        "there is no ConfigMap kvgrpc-arena",
    ),
    "key": (lambda m: of_kind(m, "ConfigMap", "-connection")["data"].clear(), "there is no key KVGRPC_ADDRESS"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checks_find(name: str) -> None:
    manifests = copy.deepcopy(render(*values(arena_persist="true", **TCP)))
    spoil, sentence = BROKEN[name]
    spoil(manifests)
    assert any(sentence in text for text in faults(manifests)), faults(manifests)


# ---- values that are refused ----------------------------------------------------------------------------------------

TLS: dict[str, object] = {"discovery": "service", "tls_secretName": "s"}
METRICS: dict[str, object] = {"metrics_enabled": "true"}
PLAIN: dict[str, object] = {
    "objectStore_url": "s3://b",
    "objectStore_endpoint": "http://m:9000",
    "objectStore_insecure": "true",
}
MOONCAKE: dict[str, object] = {"mooncake_master": "m:1", "versionsUrl": "s3://b"}
CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"mode": "sidecar", "discovery": "service", "tcp_insecure": "true"}, "set discovery=socket, or mode=daemonset"),
    ({"mode": "sidecar", "discovery": "hostPort", "tcp_insecure": "true"}, "set discovery=socket, or mode=daemonset"),
    ({"mode": "sidecar", "arena_persist": "true"}, "set arena.persist=false, or mode=daemonset"),
    ({"mode": "sidecar", "arena_remove": "true"}, "set arena.remove=false, or mode=daemonset"),
    ({"arena_remove": "true", "arena_persist": "true"}, "it is kept, or removed; set one of them"),
    ({"mode": "sidecar", "disk_size": "1Gi"}, "a sidecar's folders end with its pod; empty it, or set mode=daemonset"),
    ({"cards_enabled": "true", "flags_cards": "false"}, "contradict each other; set one of them"),
    ({"arena_keepOnUninstall": "true"}, "has no effect without arena.persist; set it, or arena.keepOnUninstall=false"),
    ({"disk_hostPath": "/data/kv"}, "disk.hostPath has no effect without disk.size"),
    ({"disk_size": "1Gi", "disk_hostPath": "/var/lib"}, "disk.hostPath=/var/lib is a folder of the system"),
    ({"disk_size": "1Gi", "disk_hostPath": "/run/kvgrpc"}, "folder of arena.hostPath or disk.hostPath, too"),
    ({"disk_size": "1Gi", "disk_hostPath": "/dev/shm/kvgrpc-arena"}, "are the same folder; name two"),
    ({"disk_size": "1Gi", "flushSeconds": 60, "terminationGracePeriodSeconds": 70}, "end after it (63 seconds)"),
    ({"mode": "sidecar", "networkPolicy_enabled": "true"}, "set networkPolicy.enabled=false, or mode=daemonset"),
    ({"discovery": "service"}, "Set tls.secretName, or discovery=socket, or tcp.insecure=true if the network is"),
    ({"discovery": "hostPort"}, "Set tls.secretName, or discovery=socket, or tcp.insecure=true if the network is"),
    ({"tls_secretName": "s"}, "a socket has no TLS; set discovery=service or hostPort, or empty it"),
    ({**TCP, "tls_secretName": "s"}, "set tcp.insecure=false, or empty tls.secretName"),
    ({**TCP, "tls_serverName": "s"}, "have no effect without tls.secretName; set it, or empty them"),
    ({**TLS, "tls_clientCertificates": "true"}, "would show the server's own certificate; set tls.clientSecretName"),
    ({**TLS, "tls_healthPort": 50051}, "tls.healthPort=50051 is another port, too (tcp.port or metrics.port)"),
    ({"access_tokenSecretName": "s"}, "nobody asks for a token without access.secretName; set it, or empty"),
    ({**TCP, "fullnameOverride": "1st"}, "does not begin with a letter, which a Service's must; set fullnameOverride"),
    ({**TCP, "networkPolicy_enabled": "true"}, "list the engines' peers in networkPolicy.from"),
    ({"networkPolicy_from[0].ipBlock.cidr": "10.0.0.0/8"}, "networkPolicy.from has no effect: set"),
    ({"metrics_rules_enabled": "true"}, "set metrics.enabled=true, or all of them false"),
    ({**METRICS, "mode": "sidecar", "metrics_podMonitor_enabled": "true"}, "set metrics.podMonitor.enabled=false"),
    ({**METRICS, **TCP, "metrics_port": 50051}, "metrics.port=50051 is tcp.port, too; change one of them"),
    ({**METRICS, "networkPolicy_enabled": "true"}, "list its peers in networkPolicy.metricsFrom"),
    ({"networkPolicy_metricsFrom[0].ipBlock.cidr": "10.0.0.0/8"}, "networkPolicy.metricsFrom has no effect: set"),
    ({"networkPolicy_enabled": "true", "otlp_endpoint": "http://c:4318"}, "list the peers of those that are set"),
    ({"networkPolicy_enabled": "true", "valkey_url": "redis://v"}, "list the peers of those that are set"),
    ({"networkPolicy_enabled": "true", "objectStore_url": "s3://b"}, "list the peers of those that are set"),
    ({"networkPolicy_enabled": "true", **MOONCAKE}, "list the peers of those that are set"),
    ({"mooncake_master": "m:1"}, "set versionsUrl (or objectStore.url or valkey.url)"),
    ({"versionsUrl": "s3://b"}, "there is none; set mooncake.master or another, or empty it"),
    ({**MOONCAKE, "objectStore_url": "s3://b"}, "already; empty it"),
    ({**MOONCAKE, "valkey_url": "redis://v", "versionsUrl": "redis://w"}, "already; empty it"),
    ({**MOONCAKE, "valkey_secretName": "s"}, "have no effect without valkey.url; set it, or empty them"),
    ({**MOONCAKE, "versionsUrl": "redis://w", "objectStore_secretName": "s"}, "have no effect without objectStore.url"),
    ({**MOONCAKE, "versionsUrl": "redis://w", "valkey_caSecretName": "s"}, "write valkeys:// or rediss://, or empty"),
    ({**MOONCAKE, "flushSeconds": 60, "terminationGracePeriodSeconds": 70}, "end after it (63 seconds)"),
    ({"valkey_secretName": "s"}, "have no effect without valkey.url; set it, or empty them"),
    ({"valkey_caSecretName": "s"}, "have no effect without valkey.url; set it, or empty them"),
    ({"valkey_url": "valkey://v", "valkey_caSecretName": "s"}, "write valkeys:// or rediss://, or empty"),
    ({"objectStore_secretName": "s"}, "have no effect without objectStore.url; set it, or empty them"),
    ({"objectStore_insecure": "true"}, "have no effect without objectStore.url; set it, or empty them"),
    ({"objectStore_url": "gs://b", "objectStore_region": "eu"}, "are for s3://, and gs://b is not"),
    ({"objectStore_url": "az://c"}, "objectStore.account is the storage account of an az:// URL; set both, or none"),
    ({"objectStore_url": "s3://b", "objectStore_account": "acct"}, "of an az:// URL; set both, or none"),
    ({**PLAIN, "objectStore_insecure": "false"}, "Write https://, or set objectStore.insecure=true"),
    ({**PLAIN, "objectStore_endpoint": "https://m"}, "objectStore.insecure has no effect without"),
    ({**PLAIN, "objectStore_caSecretName": "s"}, "objectStore.insecure is without; set one of them"),
    ({"valkey_url": "redis://v", "flushSeconds": 60, "terminationGracePeriodSeconds": 70}, "end after it (63 seconds)"),
    ({"networkPolicy_to[0].ipBlock.cidr": "10.0.0.0/8"}, "networkPolicy.to has no effect: set"),
    ({"l1_hugePages": "2Mi", "arena_persist": "true"}, "exclude each other, as --huge-pages and --arena-path do"),
    ({"l1_hugePages": "1Gi", "l1_size": "1536Mi"}, "l1.size=1536Mi is no multiple of l1.hugePages=1Gi; change l1.size"),
    ({"terminationGracePeriodSeconds": 27}, "does not hold drainSeconds=25 and the server's end after it (3 seconds)"),
    ({"terminationGracePeriodSeconds": 30, "arena_persist": "true"}, "server's end after it (6 seconds)"),
    ({"terminationGracePeriodSeconds": 29, "otlp_endpoint": "http://c:4318"}, "server's end after it (5 seconds)"),
    ({"engine_users": "{1000}", "socket_mode": '"0600"'}, "socket.mode=0600 keeps them out; set socket.mode=0660"),
    ({"resources_cpuLimit": "500m"}, "resources.cpuLimit=500m is less than resources.cpuRequest=1; raise the limit"),
    ({"socket_hostPath": "/run"}, "socket.hostPath=/run is a folder of the system"),
    ({"socket_hostPath": "/var/run"}, "socket.hostPath=/var/run is a folder of the system"),
    ({"arena_hostPath": "/dev/shm"}, "arena.hostPath=/dev/shm is a folder of the system"),
    ({"socket_hostPath": "/run/x/../../etc"}, "is a folder of the system"),
    ({"socket_hostPath": "/dev/shm/kvgrpc-arena", "arena_persist": "true"}, "arena.hostPath or disk.hostPath, too"),
]  # fmt: skip
NO_VALUES: list[tuple[dict[str, object], str]] = [
    ({"mode": "deployment"}, "mode"),
    ({"tls_enabled": "true"}, "enabled"),
    ({"tls_secretName": "No.Name_"}, "secretName"),
    ({"tiers_enabled": "true"}, "tiers"),
    ({"metrics_port": 0}, "port"),
    ({"otlp_endpoint": "collector:4318"}, "endpoint"),
    ({"l1_sizes": "4Gi"}, "sizes"),
    ({"l1_size": "4GB"}, "size"),
    ({"l1_size": "0Gi"}, "size"),
    ({"user": 0}, "user"),
    ({"arena_kubectlImage": ""}, "kubectlImage"),
    ({"socket_mode": '"0999"'}, "mode"),
    ({"flags_l1__size": "1GiB"}, "l1-size"),
    ({"flags_insecure": "true"}, "insecure"),
    ({"flags_lease__ms": "soon"}, "lease-ms"),
    ({"updateStrategy_maxUnavailable": 0}, "maxUnavailable"),
    ({"updateStrategy_maxUnavailable": "0%"}, "maxUnavailable"),
    ({"tcp_port": 70000}, "port"),
    ({"hostname": "Not.One"}, "hostname"),
    ({"image_digest": "sha256:short"}, "digest"),
    ({"valkey_url": "valkey://user:secret@v"}, "url"),
    ({"valkey_url": "http://v"}, "url"),
    ({"valkey_password": "x"}, "password"),
    ({"valkey_ttlSeconds": 0}, "ttlSeconds"),
    ({"valkey_ttlSeconds": 86401}, "ttlSeconds"),
    ({"objectStore_url": "file:///srv"}, "url"),
    ({"objectStore_url": "s3://key:secret@b"}, "url"),
    ({"objectStore_endpoint": "minio:9000"}, "endpoint"),
    ({"objectStore_account": "No-Name"}, "account"),
    ({"flags_valkey__url": "valkey://v"}, "valkey-url"),
    ({"flags_mooncake__master": "m:1"}, "mooncake-master"),
    ({"mooncake_master": "m"}, "master"),
    ({"mooncake_master": "tcp://m:1"}, "master"),
    ({"versionsUrl": "file:///srv"}, "versionsUrl"),
    ({"versionsUrl": "s3://key:secret@b"}, "versionsUrl"),
]


def refusal(version: str, sets: dict[str, object]) -> str:
    arguments = [
        part
        for key, value in sets.items()
        for part in (
            "--set-json" if str(value).startswith('"') else "--set",
            f"{key.replace('__', '-').replace('_', '.')}={value}",
        )
    ]
    done = template(*arguments, version=version)
    assert done.returncode != 0, f"{sets} is taken"
    return done.stderr


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize(("sets", "sentence"), CONTRADICTIONS, ids=lambda one: str(one)[:60])
def test_a_contradiction_is_refused_with_what_to_change(version: str, sets: dict[str, object], sentence: str) -> None:
    assert sentence in refusal(version, sets)


@pytest.mark.parametrize(("sets", "name"), NO_VALUES, ids=lambda one: str(one)[:60])
def test_what_is_no_value_is_refused_by_its_name(sets: dict[str, object], name: str) -> None:
    for version in HELMS:
        text = refusal(version, sets)
        assert "schema" in text and name in text
