# SPDX-License-Identifier: Apache-2.0
"""As much of a Kubernetes API server as helm needs for install, upgrade, rollback and uninstall, and kubectl for what
the chart has it do, in memory.

Objects are kept as they come; patches are merged as far as the chart's kinds need it. What the real one refuses and a
chart gets wrong most easily is refused here, too: names that are taken, changes of a DaemonSet's selector, and what a
service account's Roles do not allow: who calls below the path ``/as/ACCOUNT`` is that one.
"""

from __future__ import annotations

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
from tests.deploy.protobuf import PROTOBUF, secret

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""
KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "services": "Service",
        "pods": "Pod",
        "namespaces": "Namespace",
        "serviceaccounts": "ServiceAccount",
    },
    "apps/v1": {"daemonsets": "DaemonSet"},
    "batch/v1": {"jobs": "Job"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
OPENAPI = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class Cluster:
    """What the server holds. ``changed`` guards all of it. ``held``: uids of objects with dependents, which a
    foreground deletion waits for; ``asked``: what service accounts did, and
    ``denied``: what they may not do, as (verb, plural, name)."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.changed = threading.Condition()
        self.address = ""
        self.closed = False
        self.held: set[str] = set()
        self.asked: set[tuple[str, str, str]] = set()
        self.denied: set[tuple[str, str, str]] = set()
        self.events: list[tuple[str, Key, Object]] = []
        """(type, key, object); what has the resource version N is number N - 1."""

    def put(self, key: Key, body: Object) -> Object:
        plural, namespace, name = key
        old = self.objects.get(key)
        version = len(self.events) + 1
        metadata = {**body["metadata"], "namespace": namespace, "resourceVersion": str(version)}
        metadata["uid"] = old["metadata"]["uid"] if old else f"{name}-{version}"
        if "spec" in body:
            same = old is not None and old["spec"] == body["spec"]
            metadata["generation"] = (old["metadata"]["generation"] if old else 0) + (0 if same else 1)
        api = next(api for api, kinds in KINDS.items() if plural in kinds)
        new = {**body, "apiVersion": api, "kind": _kind(plural), "metadata": metadata}
        self.objects[key] = new
        self._tell("MODIFIED" if old else "ADDED", key, new)
        return new

    def remove(self, key: Key) -> None:
        gone = self.objects.pop(key)
        metadata = {**gone["metadata"], "resourceVersion": str(len(self.events) + 1)}
        self._tell("DELETED", key, {**gone, "metadata": metadata})

    def put_status(self, key: Key, uid: str, status: Object) -> None:
        """As the controller of an object says; nothing where it has gone meanwhile."""
        with self.changed:
            old = self.objects.get(key)
            if old is not None and old["metadata"]["uid"] == uid:
                self.put(key, {**old, "status": status})

    def release(self, key: Key, uid: str) -> None:
        """The dependents of an object have ended."""
        with self.changed:
            self.held.discard(uid)
            old = self.objects.get(key)
            if old is not None and old["metadata"]["uid"] == uid and "deletionTimestamp" in old["metadata"]:
                self.remove(key)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _tell(self, kind: str, key: Key, one: Object) -> None:
        self.events.append((kind, key, one))
        self.changed.notify_all()

    def names(self, *without: str) -> set[str]:
        return {f"{plural}/{name}" for plural, _, name in self.objects if plural not in without}

    def kubeconfig(self, folder: Path, account: str = "") -> Path:
        server = f"{self.address}/as/{account}" if account else self.address
        part = {"name": "fake"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{**part, "cluster": {"server": server}}],
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
        cluster.close()
        server.shutdown()
        thread.join()
        server.server_close()


class _Api(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        good = super().parse_request()
        if good:
            url = urlsplit(self.path)
            self._query = parse_qs(url.query)
            self._account, self._path = "", url.path
            if url.path.startswith("/as/"):
                self._account, _, rest = url.path.removeprefix("/as/").partition("/")
                self._path = f"/{rest}"
        return good

    def do_GET(self) -> None:
        if self._path.startswith("/openapi/"):  # no schemas: nothing is checked by them
            return self._answer_raw(200 if self._path == "/openapi/v2" else 404, OPENAPI, b"")
        known = self._discovery(self._path)
        if known is not None:
            return self._answer(200, known)
        plural, namespace, name = self._place()
        watched = self._query.get("watch", ["0"])[0] in ("1", "true")
        if not self._may("get" if name else "watch" if watched else "list"):
            return None
        if watched:
            return self._watch(plural, namespace)
        with self.cluster.changed:
            version = str(len(self.cluster.events))
            if name:
                found = self.cluster.objects.get((plural, namespace, name))
                return (
                    self._answer(200, found) if found else self._refuse(404, "NotFound", f"{plural} {name} not found")
                )
            items = [
                one for (kind, where, _), one in self.cluster.objects.items() if (kind, where) == (plural, namespace)
            ]
        api = next(api for api, kinds in KINDS.items() if plural in kinds)
        head = {"apiVersion": api, "kind": f"{_kind(plural)}List", "metadata": {"resourceVersion": version}}
        return self._answer(200, {**head, "items": [one for one in items if self._selected(one)]})

    def _watch(self, plural: str, namespace: str) -> None:
        """Every event after the given resource version; without one, every object as it is, first."""
        if "sendInitialEvents" in self._query:  # as servers without that feature; clients list then
            return self._refuse(422, "Invalid", "sendInitialEvents: not supported")
        at = int(self._query.get("resourceVersion", ["0"])[0])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.cluster.changed:
            fresh = [] if at else [("ADDED", key, one) for key, one in self.cluster.objects.items()]
            at = at or len(self.cluster.events)
        while True:
            for kind, key, one in fresh:
                if key[:2] == (plural, namespace) and self._selected(one) and not self._send(kind, one):
                    return
            with self.cluster.changed:
                while len(self.cluster.events) == at and not self.cluster.closed:
                    self.cluster.changed.wait()
                fresh, at = self.cluster.events[at:], len(self.cluster.events)
                if self.cluster.closed:
                    return

    def _send(self, kind: str, one: Object) -> bool:
        """One event of a watch; False when nobody listens any more."""
        raw = json.dumps({"type": kind, "object": one}).encode() + b"\n"
        try:
            self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        except ConnectionError:
            self.close_connection = True
            return False
        return True

    def do_POST(self) -> None:
        body = self._body()
        if not self._may("create"):
            return None
        plural, namespace, _ = self._place()
        key = plural, namespace, body["metadata"]["name"]
        with self.cluster.changed:
            if key in self.cluster.objects:
                return self._refuse(409, "AlreadyExists", f"{plural} {key[2]} already exists")
            new = self.cluster.put(key, body)
        return self._answer(201, new)

    def do_PUT(self) -> None:
        self._change("update", lambda _, body: body)

    def do_PATCH(self) -> None:
        whole = "apply-patch" in self.headers["Content-Type"]
        self._change("patch", lambda old, body: body if whole else _without_nulls(merged(old, body)))

    def do_DELETE(self) -> None:
        raw = self._raw()
        if not self._may("delete"):
            return None
        options = json.loads(raw) if raw.startswith(b"{") else {}
        key = self._place()
        with self.cluster.changed:
            found = self.cluster.objects.get(key)
            if found is None:
                return self._refuse(404, "NotFound", "not found")
            if options.get("propagationPolicy") == "Foreground" and found["metadata"]["uid"] in self.cluster.held:
                going = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}
                self.cluster.put(key, {**found, "metadata": {**found["metadata"], **going}})
            else:
                self.cluster.remove(key)
        return self._answer(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def _change(self, verb: str, changed: Any) -> None:
        body = self._body()
        if not self._may(verb):
            return None
        key = plural, _, name = self._place()
        with self.cluster.changed:
            old = self.cluster.objects.get(key)
            if old is None and "apply-patch" not in self.headers["Content-Type"]:
                return self._refuse(404, "NotFound", f"{plural} {name} not found")
            new = changed(old or {}, body)
            if old and plural == "daemonsets" and old["spec"]["selector"] != new["spec"]["selector"]:
                return self._refuse(422, "Invalid", "spec.selector: field is immutable")
            new = self.cluster.put(key, new)
        return self._answer(200, new)

    def _may(self, verb: str) -> bool:
        """Whether the caller's Roles allow it; refuses if not. A list of one name counts as that name."""
        if not self._account:
            return True
        plural, namespace, name = self._place()
        name = name or self._field("metadata.name")
        group = self._path.split("/")[2] if self._path.startswith("/apis/") else ""
        with self.cluster.changed:
            good = any(
                group in rule["apiGroups"]
                and plural in rule["resources"]
                and verb in rule["verbs"]
                and name in rule.get("resourceNames", [name])
                for rule in _rules(self.cluster.objects, self._account, namespace)
            )
            (self.cluster.asked if good else self.cluster.denied).add((verb, plural, name))
        if good:
            return True
        self._refuse(403, "Forbidden", f"{self._account} cannot {verb} {plural} {name!r}")
        return False

    def _field(self, field: str) -> str:
        pairs = [pair.partition("=") for pair in self._query.get("fieldSelector", [""])[0].split(",")]
        return next((value for name, _, value in pairs if name == field), "")

    def _selected(self, one: Object) -> bool:
        wanted = self._query.get("labelSelector", [""])[0]
        labels = one["metadata"].get("labels", {})
        named = self._field("metadata.name") in ("", one["metadata"]["name"])
        return named and all(labels.get(pair.split("=")[0]) == pair.split("=")[1] for pair in wanted.split(",") if pair)

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

    def _place(self) -> Key:
        parts = self._path.partition("/namespaces/")[2].split("/")
        namespace, plural, name = [*parts, "", ""][:3]
        return plural or "namespaces", namespace, name

    def _raw(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _body(self) -> Object:
        raw = self._raw()
        if raw.startswith(PROTOBUF):
            return secret(raw)
        return yaml.safe_load(raw) if raw else {}

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
        self._answer(code, {**status, "reason": reason, "message": message})

    def _answer(self, code: int, body: Object) -> None:
        self._answer_raw(code, "application/json", json.dumps(body).encode())

    def _answer_raw(self, code: int, form: str, raw: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _kind(plural: str) -> str:
    return next(kinds[plural] for kinds in KINDS.values() if plural in kinds)


def _rules(objects: dict[Key, Object], account: str, namespace: str) -> Iterator[Object]:
    """The rules of the Roles that are bound to a service account of the namespace."""
    for (plural, where, _), binding in objects.items():
        subjects = binding.get("subjects", ()) if (plural, where) == ("rolebindings", namespace) else ()
        if {"kind": "ServiceAccount", "name": account, "namespace": namespace} in subjects:
            yield from objects["roles", namespace, binding["roleRef"]["name"]]["rules"]


def _group(name: str, version: str) -> Object:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _without_nulls(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_nulls(value) for key, value in tree.items() if value is not None and key[0] != "$"}
    return [_without_nulls(one) for one in tree] if isinstance(tree, list) else tree
