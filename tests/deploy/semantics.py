# SPDX-License-Identifier: Apache-2.0
"""What the schemas of Kubernetes do not say about manifests: each function answers what is wrong, as sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner

from kvgrpc.cli.healthcheck import healthcheck
from kvgrpc.cli.serve import serve
from kvgrpc.config.settings import Settings
from kvgrpc.service.health import LIVENESS, READINESS
from tests.deploy.chart import Manifest, inner, pod_specs

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
HANDLERS = {"exec", "grpc", "httpGet", "tcpSocket"}
SECRET = {"VALKEY_USERNAME", "VALKEY_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
SECRET |= {"GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_KEY"}
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 0.001, "": 1}


def quantity(text: object) -> float:
    found = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|Ti|m|)", str(text))
    assert found, f"{text!r} is no quantity"
    return float(found[1]) * UNITS[found[2]]


def faults(manifests: list[Manifest]) -> list[str]:
    """Everything that is wrong, of whatever kind."""
    manifests = [*manifests, *inner(manifests)]
    found = [*names(manifests), *selectors(manifests), *references(manifests)]
    for pod, spec in pod_specs(manifests):
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        found += [f"{pod}: {text}" for text in pod_faults(spec, containers)]
        for container in containers:
            found += [f"{pod}/{container['name']}: {text}" for text in container_faults(container)]
            if container["name"] == "kvgrpc":
                found += [f"{pod}/kvgrpc: {text}" for text in server_faults(container)]
    return found


def names(manifests: list[Manifest]) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for one in manifests:
        key = one["kind"], one["metadata"]["name"]
        pattern = LABEL if one["kind"] in ("Service", "Pod", "Job") else SUBDOMAIN
        if not pattern.fullmatch(key[1]):
            yield f"{key} is no DNS-1123 name"
        if key in seen:
            yield f"{key} is there twice"
        seen.add(key)
        labels = {
            **one["metadata"]["labels"],
            **one.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}),
        }
        for label, value in labels.items():
            if not re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", str(value)):
                yield f"{key}: label {label}={value!r}"


def selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Each chooses the pods that it is for, and no others: a DaemonSet's its own, all else the server's."""
    sets = [one for one in manifests if one["kind"] == "DaemonSet"]
    pods: dict[str, dict[str, str]] = {}
    servers: set[str] = set()
    for one in manifests:
        template = one if one["kind"] == "Pod" else one.get("spec", {}).get("template")
        if template is not None:
            name = f"{one['kind']} {one['metadata']['name']}"
            pods[name] = template["metadata"]["labels"]
            servers |= {name for c in template["spec"]["containers"] if c["name"] == "kvgrpc"}
    chosen = [(one["kind"], one["spec"]["selector"], servers) for one in manifests if one["kind"] == "Service"]
    chosen += [
        (one["kind"], one["spec"][field]["matchLabels"], servers)
        for kind, field in (("NetworkPolicy", "podSelector"), ("PodMonitor", "selector"))
        for one in manifests
        if one["kind"] == kind
    ]
    chosen += [
        ("DaemonSet", one["spec"]["selector"]["matchLabels"], {f"DaemonSet {one['metadata']['name']}"}) for one in sets
    ]
    for kind, selector, wanted in chosen:
        found = {name for name, labels in pods.items() if selector.items() <= labels.items()}
        yield from (f"the selector of {kind} is not in the labels of {name}" for name in wanted - found)
        yield from (f"the selector of {kind} chooses the pods of {name}" for name in found - wanted)
    ports = {
        port["name"]
        for one in sets
        for c in one["spec"]["template"]["spec"]["containers"]
        for port in c.get("ports", ())
    }
    for one in manifests:
        if one["kind"] == "Service":
            yield from (
                f"no container has port {p['targetPort']}" for p in one["spec"]["ports"] if p["targetPort"] not in ports
            )


def references(manifests: list[Manifest]) -> Iterator[str]:
    """ConfigMaps and keys that pods name are rendered."""
    maps = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}
    for pod, spec in pod_specs(manifests):
        for volume in spec["volumes"]:
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{pod}: there is no ConfigMap {volume['configMap']['name']}"
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for variable in container.get("env", ()):
                asked = variable.get("valueFrom", {}).get("configMapKeyRef")
                if asked and asked["key"] not in maps.get(asked["name"], {}):
                    yield f"{pod}: there is no key {asked['key']} in ConfigMap {asked['name']}"


def pod_faults(spec: dict[str, Any], containers: list[dict[str, Any]]) -> Iterator[str]:
    volumes = [volume["name"] for volume in spec["volumes"]]
    if len(volumes) != len(set(volumes)):
        yield "two volumes of one name"
    mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", ())}
    yield from (f"a mount has no volume {name}" for name in mounted - set(volumes))
    yield from (f"volume {name} is mounted nowhere" for name in set(volumes) - mounted)
    if len({container["name"] for container in containers}) != len(containers):
        yield "two containers of one name"
    if not LABEL.fullmatch(spec.get("hostname", "x")):
        yield f"host name {spec['hostname']!r}"
    if not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        return
    yield "it takes a namespace of the node"


def container_faults(container: dict[str, Any]) -> Iterator[str]:
    if not LABEL.fullmatch(container["name"]):
        yield "its name is no DNS-1123 label"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
    if len(paths) != len(set(paths)):
        yield "two mounts at one path"
    limits = container.get("resources", {}).get("limits", {})
    for name, asked in container.get("resources", {}).get("requests", {}).items():
        if name in limits and quantity(asked) > quantity(limits[name]):
            yield f"it requests more {name} than its limit"
    for port in container.get("ports", ()):
        if not PORT_NAME.fullmatch(port["name"]):
            yield f"port name {port['name']!r}"
        if port.get("hostPort", port["containerPort"]) != port["containerPort"]:
            yield "host port and port differ"
    for probe in (container[name] for name in PROBES if name in container):
        if len(HANDLERS & set(probe)) != 1:
            yield "a probe has not exactly one handler"


def server_faults(container: dict[str, Any]) -> Iterator[str]:
    """Flags, variables and probes are the program's, and the container is as confined as it is said to be."""
    options = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    if container["command"] != ["kvgrpc", "serve"]:
        yield f"command {container['command']}"
    given = [arg.split("=", 1)[0] for arg in container["args"]]
    yield from (f"`kvgrpc serve` has no option {flag}" for flag in given if flag not in options)
    repeated = {flag for flag in given if given.count(flag) > 1} - {"--allow-uid", "--quota", "--listen"}
    yield from (f"{flag} is given twice" for flag in repeated)
    variables = {f"KVGRPC_{name.upper()}" for name in Settings.model_fields}
    variables |= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CUPY_CACHE_DIR"}
    variables |= SECRET | {
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AWS_REGION",
        "AWS_ENDPOINT",
        "AWS_ALLOW_HTTP",
        "SSL_CERT_FILE",
    }
    yield from (f"nothing reads {one['name']}" for one in container["env"] if one["name"] not in variables)
    for one in container["env"]:
        if one["name"] in SECRET and "secretKeyRef" not in one.get("valueFrom", {}):
            yield f"{one['name']} does not come from a Secret"
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    given_files = [arg.partition("=")[2] for arg in container["args"]] + [
        one.get("value", "") for one in container["env"]
    ]
    for path in given_files:
        if path.startswith("/run/secrets/") and not any(path.startswith(f"{mount}/") for mount in mounts):
            yield f"nothing is mounted where {path} is looked for"
    named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    ports = {port for port in (named.get("health", named.get("grpc")),) if port is not None}
    for name in PROBES:
        yield from probe_faults(name, container.get(name), ports)
    context = container["securityContext"]
    wanted = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if {name: context.get(name) for name in wanted} != wanted or context["runAsUser"] == 0:
        yield "it is not confined"


def probe_faults(name: str, probe: dict[str, Any] | None, ports: set[int]) -> Iterator[str]:
    asked = LIVENESS if name == "livenessProbe" else READINESS
    if probe is None:
        return
    if "grpc" in probe and probe["grpc"] not in [{"port": port, "service": asked} for port in ports]:
        yield f"{name} asks {probe['grpc']}"
    if "exec" in probe:
        program, command, *arguments = probe["exec"]["command"]
        understood = CliRunner().invoke(healthcheck, [*arguments, "--help"]).exit_code == 0
        if (program, command, arguments[0]) != ("kvgrpc", "healthcheck", asked) or not understood:
            yield f"{name} runs {probe['exec']['command']}"
        (within_ms,) = (int(one.split("=")[1]) for one in arguments if one.startswith("--timeout-ms="))
        if within_ms >= probe["timeoutSeconds"] * 1000:
            yield f"{name} is ended before it can answer"
