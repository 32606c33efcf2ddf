# SPDX-License-Identifier: Apache-2.0
"""As much of a Kubernetes API server as helm needs for install, upgrade, rollback and uninstall, in memory.

Objects are kept as they come; patches are merged as far as the chart's kinds need it. What the real one refuses and a
chart gets wrong most easily is refused here, too: names that are taken, and changes of a DaemonSet's selector.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.deploy.chart import merged

Object = dict[str, Any]
KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "services": "Service",
        "pods": "Pod",
        "namespaces": "Namespace",
    },
    "apps/v1": {"daemonsets": "DaemonSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PROTOBUF = b"k8s\0"


class Cluster:
    """What the server holds: objects by (plural, namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.lock = threading.Lock()
        self.address = ""

    def names(self, *without: str) -> set[str]:
        return {f"{plural}/{name}" for plural, _, name in self.objects if plural not in without}

    def kubeconfig(self, folder: Path) -> Path:
        part = {"name": "fake"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{**part, "cluster": {"server": self.address}}],
            "contexts": [{**part, "context": {"cluster": "fake", "user": "fake"}}],
            "users": [{**part, "user": {}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        return folder / "kubeconfig"


@contextmanager
def api_server() -> Iterator[Cluster]:
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Api", (_Api,), {"cluster": cluster}))
    cluster.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Api(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        known = self._discovery(path)
        if known is not None:
            return self._answer(200, known)
        plural, namespace, name = self._place(path)
        with self.cluster.lock:
            if name:
                found = self.cluster.objects.get((plural, namespace, name))
                return (
                    self._answer(200, found) if found else self._refuse(404, "NotFound", f"{plural} {name} not found")
                )
            items = [
                one for (kind, where, _), one in self.cluster.objects.items() if (kind, where) == (plural, namespace)
            ]
        chosen = [one for one in items if self._selected(one)]
        return self._answer(200, {"apiVersion": "v1", "kind": f"{_kind(plural)}List", "metadata": {}, "items": chosen})

    def do_POST(self) -> None:
        plural, namespace, _ = self._place(urlsplit(self.path).path)
        body = self._body()
        name = body["metadata"]["name"]
        with self.cluster.lock:
            if (plural, namespace, name) in self.cluster.objects:
                return self._refuse(409, "AlreadyExists", f"{plural} {name} already exists")
            self.cluster.objects[plural, namespace, name] = self._stored(plural, namespace, body)
        return self._answer(201, self.cluster.objects[plural, namespace, name])

    def do_PUT(self) -> None:
        self._change(lambda _, body: body)

    def do_PATCH(self) -> None:
        whole = "apply-patch" in self.headers["Content-Type"]
        self._change(lambda old, body: body if whole else _without_nulls(merged(old, body)))

    def do_DELETE(self) -> None:
        self._raw()
        with self.cluster.lock:
            gone = self.cluster.objects.pop(self._place(urlsplit(self.path).path), None)
        if gone is None:
            return self._refuse(404, "NotFound", "not found")
        return self._answer(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def _change(self, changed: Any) -> None:
        key = plural, namespace, name = self._place(urlsplit(self.path).path)
        body = self._body()
        with self.cluster.lock:
            old = self.cluster.objects.get(key)
            if old is None and "apply-patch" not in self.headers["Content-Type"]:
                return self._refuse(404, "NotFound", f"{plural} {name} not found")
            new = self._stored(plural, namespace, changed(old or {}, body))
            if old and plural == "daemonsets" and old["spec"]["selector"] != new["spec"]["selector"]:
                return self._refuse(422, "Invalid", "spec.selector: field is immutable")
            self.cluster.objects[key] = new
        return self._answer(200, new)

    def _stored(self, plural: str, namespace: str, body: Object) -> Object:
        version = next(version for version, kinds in KINDS.items() if plural in kinds)
        metadata = {**body["metadata"], "namespace": namespace, "uid": body["metadata"]["name"], "resourceVersion": "1"}
        return {**body, "apiVersion": version, "kind": _kind(plural), "metadata": metadata}

    def _selected(self, one: Object) -> bool:
        wanted = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0]
        labels = one["metadata"].get("labels", {})
        return all(labels.get(pair.split("=")[0]) == pair.split("=")[1] for pair in wanted.split(",") if pair)

    def _discovery(self, path: str) -> Object | None:
        groups = [version.split("/") for version in KINDS if "/" in version]
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in groups]}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in KINDS:
            return None
        resources = [
            {"name": plural, "singularName": "", "namespaced": kind != "Namespace", "kind": kind, "verbs": VERBS}
            for plural, kind in KINDS[version].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    @staticmethod
    def _place(path: str) -> tuple[str, str, str]:
        parts = path.partition("/namespaces/")[2].split("/")
        namespace, plural, name = [*parts, "", ""][:3]
        return plural or "namespaces", namespace, name

    def _raw(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _body(self) -> Object:
        raw = self._raw()
        if raw.startswith(PROTOBUF):
            return _secret(_fields(raw[len(PROTOBUF) :])[2][0])
        return yaml.safe_load(raw) if raw else {}

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
        self._answer(code, {**status, "reason": reason, "message": message})

    def _answer(self, code: int, body: Object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _kind(plural: str) -> str:
    return next(kinds[plural] for kinds in KINDS.values() if plural in kinds)


def _group(name: str, version: str) -> Object:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _without_nulls(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_nulls(value) for key, value in tree.items() if value is not None and key[0] != "$"}
    return [_without_nulls(one) for one in tree] if isinstance(tree, list) else tree


def _fields(raw: bytes) -> dict[int, list[Any]]:
    """A protobuf message without its schema: values by field number."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        number, kind = divmod(varint(), 8)
        value: Any = varint()
        if kind == 2:
            value, at = raw[at : at + value], at + value
        found.setdefault(number, []).append(value)
    return found


def _secret(raw: bytes) -> Object:
    """A release's Secret, which helm sends as protobuf: metadata 1 (name 1, labels 11), data 2, type 3."""
    fields = _fields(raw)
    metadata = _fields(fields[1][0])
    labels = [_fields(pair) for pair in metadata.get(11, [])]
    data = [_fields(pair) for pair in fields.get(2, [])]
    return {
        "metadata": {
            "name": metadata[1][0].decode(),
            "labels": {pair[1][0].decode(): pair[2][0].decode() for pair in labels},
        },
        "data": {pair[1][0].decode(): base64.b64encode(pair[2][0]).decode() for pair in data},
        "type": fields[3][0].decode(),
    }
