# SPDX-License-Identifier: Apache-2.0
"""Alerts and dashboard: rendered as they are, tested by promtool, and asked of a Prometheus that scrapes a server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, of_kind, render
from tests.ports import free_port
from tests.served import wait_until
from tests.telemetry.watched import watched

PROMETHEUS, PROMTOOL = ROOT / "build/prometheus/prometheus", ROOT / "build/prometheus/promtool"
ALERTS = CHART / "files/alerts.yaml"
DASHBOARD = json.loads((CHART / "files/dashboard.json").read_text())
EXAMPLE = ("--values", str(CHART / "examples/monitored.yaml"))
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
LABELS = {"pod": "kvgrpc-x", "container": "kvgrpc", "namespace": "inference"}


def promtool(*arguments: str) -> str:
    assert PROMTOOL.exists(), "the tests of the alerts need promtool: make promtool"
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- alone ----------------------------------------------------------------------------------------------------------


def test_the_rules_are_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(ALERTS))


def test_each_alert_fires_on_what_it_is_for(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts_test.yaml").read_text()
    (tmp_path / "test.yaml").write_text(text.replace("ALERTS", str(ALERTS)))
    promtool("test", "rules", str(tmp_path / "test.yaml"))
    fired = {
        one["alertname"]
        for test in yaml.safe_load(text)["tests"]
        for one in test["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert fired == {rule["alert"] for rule in RULES}


def test_operations_says_what_to_do_about_each() -> None:
    text = (ROOT / "docs/operations.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(Kvgrpc\w+)` \|", text, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_the_chart_renders_them_as_they_are() -> None:
    manifests = render(*EXAMPLE)
    assert of_kind(manifests, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())
    assert json.loads(of_kind(manifests, "ConfigMap", "-dashboard")["data"]["kvgrpc.json"]) == DASHBOARD


def test_the_monitor_scrapes_the_servers_port() -> None:
    manifests = render(*EXAMPLE)
    monitor, pods = of_kind(manifests, "PodMonitor"), of_kind(manifests, "DaemonSet")["spec"]["template"]
    assert monitor["apiVersion"] == of_kind(manifests, "PrometheusRule")["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    (port,) = pods["spec"]["containers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", 9464)
    assert "--metrics-listen=0.0.0.0:9464" in pods["spec"]["containers"][0]["args"]
    (ingress,) = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert ingress["ports"] == [{"port": 9464, "protocol": "TCP"}] and ingress["from"]


def test_without_the_switches_none_of_it_is_there() -> None:
    kinds = {one["kind"] for one in render()}
    assert kinds & {"PodMonitor", "PrometheusRule"} == set()
    assert "metrics" not in json.dumps(of_kind(render(), "DaemonSet"))


def test_panels_do_not_overlap_and_have_titles() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert panel["title"] and not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


# ---- asked of a real Prometheus -------------------------------------------------------------------------------------


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$pod", ".*").replace("$__rate_interval", "1m")
    for rule in RULES:
        yield rule["alert"], rule["expr"]


class Prometheus:
    """Asks one that runs."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **arguments: str) -> Any:
        query = urllib.parse.urlencode({key.replace("match", "match[]"): value for key, value in arguments.items()})
        with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def up(self) -> bool:
        """Whether what a scrape found can be asked for: a target is called up a moment before."""
        try:
            return bool(self.ask("query", query="up == 1")["result"])
        except OSError:
            return False


def selectors(expression: str) -> list[str]:
    return re.findall(r"\b(?:kvgrpc|grpc_server|process)_\w+(?:\{[^}]*\})?", expression)


@contextlib.contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the target every second and has done it."""
    here = f"127.0.0.1:{free_port()}"
    job = {"job_name": "kvgrpc", "static_configs": [{"targets": [target], "labels": LABELS}]}
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(ALERTS)], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={here}"], stdout=log, stderr=log)
    prometheus = Prometheus(f"http://{here}")
    try:
        wait_until(lambda: prometheus.up() or process.poll() is not None, 60)
        assert process.poll() is None, (folder / "log").read_text()
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


async def test_every_query_of_alerts_and_dashboard_finds_what_a_server_shows(tmp_path: Path) -> None:
    async with watched() as server:
        target = server.metrics.removeprefix("http://").removesuffix("/metrics")
        with scraping(target, tmp_path) as prometheus:
            for title, expression in queries():
                prometheus.ask("query", query=expression)  # an expression that is none is answered 400
                for selector in selectors(expression):
                    if not selector.startswith("kvgrpc_tier_") or "kvgrpc_tier_bytes" in selector:
                        assert prometheus.ask("series", match=selector), (title, selector)
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"} and len(rules) == len(RULES)


@pytest.mark.parametrize("name", ["kvgrpc_tier_healthy", "kvgrpc_tier_reads_total"])
def test_queries_about_tiers_name_documented_metrics(name: str) -> None:
    """Of a server without lower tiers there are no such series."""
    documented = (ROOT / "docs/telemetry.md").read_text()
    asked = {re.sub(r"_(bucket|sum|count)$", "", one.split("{")[0]) for _, text in queries() for one in selectors(text)}
    tiers = {one for one in asked if one.startswith("kvgrpc_tier_")}
    assert name in tiers and all(f"`{one}`" in documented for one in tiers)
