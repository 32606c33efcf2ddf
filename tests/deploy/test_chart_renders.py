# SPDX-License-Identifier: Apache-2.0
"""The chart renders: linted, by both majors of helm alike, for several versions of Kubernetes, valid by its schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvgrpc import __version__
from kvgrpc.config.credentials import plain_http, valkey_login
from kvgrpc.config.settings import Settings, load_settings
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    HELMS,
    KUBERNETES,
    NAMESPACE,
    NEWEST,
    ROOT,
    Manifest,
    helm,
    inner,
    of_kind,
    patch,
    patched_engine,
    pod_specs,
    render,
    rendered_text,
    template,
    values,
)
from tests.deploy.semantics import faults

GOLDEN = Path(__file__).parent / "golden"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TABLE: list[tuple[str, str]] = re.findall(
    r"^\| `([\w.]+)` \| `([^`]*)` \|", (CHART / "README.md").read_text().partition("\n## Values\n")[2], re.MULTILINE
)
OPERATORS_KINDS = {"PodMonitor", "PrometheusRule"}
DEFAULTS: list[Path | None] = [None]

every_example = pytest.mark.parametrize(
    "example", [*DEFAULTS, *EXAMPLES], ids=lambda path: path.stem if path is not None else "defaults"
)


def arguments(example: Path | None) -> tuple[str, ...]:
    return ("--values", str(example)) if example is not None else ()


@every_example
@pytest.mark.parametrize("version", HELMS)
def test_lint(version: str, example: Path | None) -> None:
    done = helm(version, "lint", "--strict", str(CHART), *arguments(example))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout and "[INFO]" not in done.stdout


@every_example
def test_both_majors_render_the_same_for_every_kubernetes(example: Path | None) -> None:
    texts = {
        rendered_text("--kube-version", kubernetes, *arguments(example), version=version)
        for version in HELMS
        for kubernetes in KUBERNETES
    }
    assert len(texts) == 1


@every_example
@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_what_is_rendered_is_valid(kubernetes: str, example: Path | None) -> None:
    manifests = render(*arguments(example))
    engine = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": patched_engine(manifests)}
    for manifest in [*manifests, *inner(manifests), engine]:
        if manifest["kind"] in OPERATORS_KINDS:  # no kinds of Kubernetes; tests/deploy/test_monitoring.py has them
            continue
        kubernetes_validate.validate(manifest, kubernetes.removesuffix(".0"), strict=True)


@pytest.mark.parametrize("name", ["123", "on", "null"])
@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_names_that_read_as_something_else_stay_names(name: str, mode: str) -> None:
    """YAML takes them for numbers and the like, and an API server takes none of these for a name."""
    texts = ["nameOverride", "priorityClassName", "serviceAccountName", "engine.container", "cards.runtimeClassName"]
    texts += ["valkey.secretName", "valkey.caSecretName", "objectStore.secretName", "access.secretName", "hostname"]
    texts += ["access.tokenSecretName"]
    plain: dict[str, object] = {
        "mode": mode,
        "cards_enabled": "true",
        "valkey_url": "valkeys://v",
        "metrics_enabled": "true",
    }
    plain |= {"objectStore_url": "s3://b"}
    if mode == "daemonset":
        texts += ["tls.secretName", "tls.clientSecretName", "tls.serverName"]
        plain |= {"discovery": "hostPort", "tls_clientCertificates": "true", "arena_persist": "true"}
    strings = [part for each in texts for part in ("--set-string", f"{each}={name}")]
    manifests = render(*values(**plain), *strings, release=name)
    engine = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": patched_engine(manifests)}
    for manifest in [*manifests, *inner(manifests), engine]:
        kubernetes_validate.validate(manifest, KUBERNETES[-1].removesuffix(".0"), strict=True)
    assert {str(one["metadata"]["labels"]["app.kubernetes.io/instance"]) for one in manifests} == {name}


def test_the_small_engine_runs_where_a_server_does() -> None:
    manifests = render("--values", str(CHART / "examples/tuned.yaml"))
    server, engine = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"], of_kind(manifests, "Pod")["spec"]
    for where in ("affinity", "tolerations", "imagePullSecrets", "priorityClassName"):
        assert engine[where] == server[where]


def test_an_older_kubernetes_is_refused() -> None:
    assert "kubeVersion" in template("--kube-version", "1.28.0").stderr


@pytest.mark.parametrize("version", HELMS)
def test_it_can_be_packaged(version: str, tmp_path: Path) -> None:
    done = helm(version, "package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    archive = tmp_path / f"kvgrpc-{__version__}.tgz"
    unpacked = helm(version, "template", "kvgrpc", str(archive), "--namespace", NAMESPACE)
    assert unpacked.stdout == rendered_text()


def test_versions_are_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.parametrize("name", ["socket", "service", "sidecar", "remote", "mooncake", "arena-file"])
def test_golden(name: str) -> None:
    """A render that was read by a person. After a meant change: `helm template`, as here, into the file."""
    text = rendered_text("--values", str(CHART / f"examples/{name}.yaml"), "--skip-tests")
    golden = GOLDEN / f"{name}.yaml"
    assert text == golden.read_text(), f"differs from {golden.name}: if that is meant, write it anew and read the diff"


# ---- the values and their texts ---------------------------------------------------------------------------------


def leaves(tree: dict[str, Any], at: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in tree.items():
        found |= leaves(value, f"{at}{key}.") if isinstance(value, dict) and value else {f"{at}{key}"}
    return found


def schema_leaves(schema: dict[str, Any], at: str = "") -> set[str]:
    found: set[str] = set()
    for key, part in schema["properties"].items():
        inner = "properties" in part and key != "flags"
        found |= schema_leaves(part, f"{at}{key}.") if inner else {f"{at}{key}"}
    return found


def test_schema_values_and_table_name_the_same() -> None:
    described = [name for name, _ in TABLE]
    assert set(described) == leaves(VALUES) == schema_leaves(SCHEMA) - {"global"}
    assert len(described) == len(set(described))


def test_the_table_has_the_defaults() -> None:
    rows = dict(TABLE)
    for name in leaves(VALUES):
        value: Any = VALUES
        for part in name.split("."):
            value = value[part]
        assert rows[name] == json.dumps(value), name


def test_every_object_of_the_schema_is_closed() -> None:
    def opened(part: dict[str, Any]) -> list[str]:
        own = [part] if "properties" in part and part.get("additionalProperties") is not False else []
        inner = [*part.get("properties", {}).values(), *([part["items"]] if "items" in part else [])]
        return [*map(str, own), *(text for one in inner for text in opened(one))]

    assert opened(SCHEMA) == []


def test_flags_are_the_servers_options_that_no_value_makes() -> None:
    own = {"--socket", "--socket-mode", "--socket-group", "--listen", "--insecure", "--allow-uid"}
    own |= {"--l1-size", "--arena-path", "--huge-pages", "--drain-ms", "--metrics-listen", "--otlp-endpoint"}
    own |= {"--disk-path", "--disk-size", "--flush-ms", "--valkey-url", "--valkey-ca", "--valkey-ttl-ms"}
    own |= {"--object-store-url", "--mooncake-master", "--versions-url"}
    own |= {"--tls-cert", "--tls-key", "--tls-client-ca", "--access", "--health-listen"}
    made = {flag.removeprefix("--") for flag in own}
    settings = {name.replace("_", "-") for name in Settings.model_fields}
    assert made <= settings
    assert set(SCHEMA["properties"]["flags"]["properties"]) == settings - made


def test_the_test_engine_is_the_example() -> None:
    copy = (CHART / "files/python_client.py").read_text()
    assert copy == (ROOT / "examples/python_client.py").read_text()
    assert of_kind(render(), "ConfigMap", "-test")["data"]["engine.py"].strip() == copy.strip()


# ---- what follows from what -------------------------------------------------------------------------------------


def servers(manifests: list[Manifest]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(spec of the pod, container) of every server."""
    return [
        (spec, one)
        for _, spec in pod_specs(manifests)
        for one in [*spec.get("initContainers", []), *spec["containers"]]
        if one["name"] == "kvgrpc"
    ]


def server(*sets: str) -> dict[str, Any]:
    return of_kind(render(*sets), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("size", "flag", "memory", "polls"), [("512Mi", "512MiB", "1024Mi", 31), ("4Gi", "4GiB", "4608Mi", 34)]
)
def test_the_size_of_l1_is_said_once(size: str, flag: str, memory: str, polls: int) -> None:
    container = server(*values(l1_size=size))
    assert f"--l1-size={flag}" in container["args"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == memory
    assert container["startupProbe"]["failureThreshold"] == polls
    assert container["startupProbe"]["periodSeconds"] == 2


def test_l1_in_huge_pages_asks_for_them() -> None:
    container = server(*values(l1_size="8Gi", l1_hugePages="2Mi"))
    assert "--huge-pages" in container["args"]
    assert container["resources"]["limits"]["hugepages-2Mi"] == "8Gi"
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "512Mi", "hugepages-2Mi": "8Gi"}


def test_the_drain_fits_into_the_grace_period() -> None:
    spec = of_kind(render(*values(drainSeconds=90)), "DaemonSet")["spec"]["template"]["spec"]
    assert "--drain-ms=90000" in spec["containers"][0]["args"]
    assert spec["terminationGracePeriodSeconds"] == 100


def test_what_waits_for_the_disk_fits_into_the_grace_period() -> None:
    spec = of_kind(render(*values(drainSeconds=90, flushSeconds=30, disk_size="1Ti")), "DaemonSet")["spec"]
    args = spec["template"]["spec"]["containers"][0]["args"]
    assert {"--disk-path=/disk", "--disk-size=1TiB", "--flush-ms=30000"} <= set(args)
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 130


MOONCAKE = {"mooncake_master": "m:50061", "versionsUrl": "s3://b/v"}


@pytest.mark.parametrize("tier", [{"valkey_url": "redis://v"}, {"objectStore_url": "s3://b"}, MOONCAKE])
def test_what_waits_for_a_shared_tier_fits_into_the_grace_period(tier: dict[str, str]) -> None:
    spec = of_kind(render(*values(flushSeconds=30, **tier)), "DaemonSet")["spec"]["template"]["spec"]
    assert "--flush-ms=30000" in spec["containers"][0]["args"]
    assert spec["terminationGracePeriodSeconds"] == 65


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_a_server_is_told_of_shared_tiers_as_it_reads_it(mode: str) -> None:
    """The rendered flags are settings, and the rendered variables are what logs the server in."""
    sets = {"valkey_url": "rediss://v:1/2", "valkey_secretName": "v", "valkey_caSecretName": "ca", "mode": mode}
    sets |= {"objectStore_url": "s3://b/p", "objectStore_endpoint": "http://m:9", "objectStore_insecure": "true"}
    for spec, container in servers(render(*values(**sets))):
        flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
        told = {name.replace("-", "_"): text for name, text in flags.items() if name.startswith(("valkey", "object"))}
        settings = load_settings(**told)
        assert (settings.valkey_url, settings.valkey_ttl_ms) == ("rediss://v:1/2", 86_400_000)
        assert settings.object_store_url == "s3://b/p"
        paths = {f"{one['mountPath']}/ca.crt": one["name"] for one in container["volumeMounts"]}
        (volume,) = [one for one in spec["volumes"] if one["name"] == paths[str(settings.valkey_ca)]]
        assert volume["secret"] == {"secretName": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        refs = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
        assert valkey_login({name: ref["key"] for name, ref in refs.items()}) == ("VALKEY_USERNAME", "VALKEY_PASSWORD")
        assert refs["VALKEY_USERNAME"].get("optional") and not refs["VALKEY_PASSWORD"].get("optional")
        assert plain_http({one["name"]: one.get("value", "") for one in container["env"]})


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        ({"objectStore_url": "s3://b"}, {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}),
        ({"objectStore_url": "gs://b"}, {"GOOGLE_SERVICE_ACCOUNT_KEY"}),
        ({"objectStore_url": "az://c", "objectStore_account": "acct"}, {"AZURE_STORAGE_ACCOUNT_KEY"}),
    ],
)
def test_each_store_gets_its_own_keys(sets: dict[str, str], keys: set[str]) -> None:
    manifests = render(*values(objectStore_secretName="s", objectStore_caSecretName="ca", **sets))
    (_, container), *_ = servers(manifests)
    assert {one["name"] for one in container["env"] if "valueFrom" in one} == keys
    assert {"name": "SSL_CERT_FILE", "value": "/run/secrets/kvgrpc/objectstore-ca/ca.crt"} in container["env"]
    assert faults(manifests) == []


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
@pytest.mark.parametrize(
    ("url", "sets", "keys"),
    [
        (
            "s3://b/v",
            {"objectStore_secretName": "s"},
            {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"},
        ),
        ("rediss://v", {"valkey_secretName": "s", "valkey_caSecretName": "ca"}, {"VALKEY_PASSWORD", "VALKEY_USERNAME"}),
    ],
)
def test_a_mooncake_store_and_where_its_versions_lie(mode: str, url: str, sets: dict[str, str], keys: set[str]) -> None:
    """The rendered flags are settings that go together, and who is let in to the versions is rendered, too."""
    for _, container in servers(render(*values(mode=mode, mooncake_master="[::1]:50061", versionsUrl=url, **sets))):
        flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
        told = ("mooncake-master", "versions-url", "valkey-ca")
        settings = load_settings(**{name.replace("-", "_"): flags[name] for name in told if name in flags})
        assert (settings.mooncake_master, settings.versions_url) == ("[::1]:50061", url)
        assert (settings.valkey_ca is not None) == ("valkey_caSecretName" in sets)
        assert {one["name"] for one in container["env"] if "valueFrom" in one} == keys
        assert not {"valkey-url", "object-store-url"} & set(flags)


def test_large_numbers_stay_whole() -> None:
    args = server("--values", str(CHART / "examples/tuned.yaml"))["args"]
    assert "--record-ms=1200000" in args and "--pin-share=0.4" in args and "--no-reflection" in args
    assert [flag for flag in args if flag.startswith("--quota")] == ["--quota=tenant-a=64GiB", "--quota=tenant-b=32GiB"]


def test_only_one_container_sees_what_is_to_be_removed() -> None:
    manifests = render(*values(arena_remove="true", arena_hostPath="/dev/shm/old", prepareFolders="false"))
    spec = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]
    (first,) = spec["initContainers"]
    assert (first["name"], first["securityContext"]["runAsUser"]) == ("arena", 65532)
    assert not any(one["name"] == "kvgrpc-arena" for one in spec["containers"][0]["volumeMounts"])
    assert not any("--arena-path" in arg for arg in spec["containers"][0]["args"])
    (volume,) = [one for one in spec["volumes"] if one["name"] == "kvgrpc-arena"]
    assert volume["hostPath"] == {"path": "/dev/shm/old", "type": "Directory"}
    assert faults(manifests) == []


def test_two_releases_share_no_folder_and_no_name() -> None:
    def owned(release: str) -> set[str]:
        manifests = render(*values(arena_persist="true", disk_size="1Gi"), release=release)
        spec = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]
        paths = {volume["hostPath"]["path"] for volume in spec["volumes"]} - {"/dev/shm"}
        return paths | {f"{one['kind']} {one['metadata']['name']}" for one in [*manifests, *inner(manifests)]}

    assert owned("one") & owned("two") == set()


@pytest.mark.parametrize(
    "sets",
    [
        {},
        {"mode": "sidecar"},
        {"discovery": "hostPort", "tcp_insecure": "true"},
        {"image_repository": "registry.example/kvgrpc"},
        {"arena_persist": "true"},
        {"arena_persist": "true", "arena_keepOnUninstall": "true"},
    ],
)
def test_notes_say_how_to_connect(sets: dict[str, str]) -> None:
    done = helm(NEWEST, "install", "kv", str(CHART), "--dry-run=client", "--namespace", NAMESPACE, *values(**sets))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "get configmap kv-kvgrpc-engine -o jsonpath='{.data.patch\\.yaml}'" in notes
    assert ("has no TLS" in notes) is ("discovery" in sets)
    assert ("hostPath" in notes) is ("mode" not in sets)
    assert ("no public registry" in notes) is ("image_repository" not in sets)
    assert ("helm uninstall" in notes) is (sets == {"arena_persist": "true"})
    assert "replaces the pod's own supplementalGroups" in notes


def test_the_patch_leaves_the_engines_own_settings() -> None:
    own = {"env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "m", "mountPath": "/models"}]}
    (engine,) = patched_engine(render(), **own)["containers"]
    assert engine["env"][0] == own["env"][0] and engine["volumeMounts"][0] == own["volumeMounts"][0]
    assert set(patch(render())["spec"]["template"]["spec"]) == {"hostname", "securityContext", "containers", "volumes"}
