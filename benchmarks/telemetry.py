# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.telemetry [--json FILE]``: what metrics and traces cost of the lookups a second.

Two servers at once, one without telemetry, one that is scraped every few seconds and sends metrics and one call in a
hundred as a trace to a collector here. They take turns, forwards and backwards; ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.peer_lmcache import free_port
from kvgrpc.bench.engine import store_prompts
from kvgrpc.bench.processes import answer, ask, running, serving, unwind_at_sigterm
from kvgrpc.bench.results import Figure, Report, figure
from kvgrpc.cli.bench import as_table

L1 = "512MiB"
SCRAPE_S = 5.0
CASES = [(length, clients) for length in ("1K", "32K") for clients in (1, 4)]
MOST = max(clients for _, clients in CASES)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes everything."""

    received = 0

    def do_POST(self) -> None:
        Collector.received += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def collecting() -> Iterator[str]:
    """Where the collector listens."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def scraping(port: int) -> Iterator[None]:
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                assert b"kvgrpc_" in page.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def measure(repetitions: int, seconds: float) -> list[Figure]:
    figures: list[Figure] = []
    with ExitStack() as stack:
        port, collector = free_port(), stack.enter_context(collecting())
        flags = ["--metrics-listen", str(port), "--otlp-endpoint", collector]
        servers = {
            "off": stack.enter_context(serving(L1)),
            "on": stack.enter_context(serving(L1, *flags, "--trace-share", "0.01")),
        }
        askers = {
            name: [stack.enter_context(running("kvgrpc.bench.asker", server.address)) for _ in range(MOST)]
            for name, server in servers.items()
        }
        for name, server in servers.items():
            asyncio.run(store_prompts(server.address))
            for asker in askers[name]:
                answer(asker)
        stack.enter_context(scraping(port))

        def rate(name: str, length: str, clients: int) -> float:
            for asker in askers[name][:clients]:
                ask(asker, json.dumps({"kind": "tokens", "length": length, "hit": True, "seconds": seconds}))
            said = [json.loads(answer(asker)) for asker in askers[name][:clients]]
            return sum(one["lookups"] / one["seconds"] for one in said)

        for length, clients in CASES:
            rates: dict[str, list[float]] = {"on": [], "off": []}
            for _ in range(repetitions + 1):
                for name in ("off", "on", "on", "off"):
                    rates[name].append(rate(name, length, clients))
            case = f"telemetry/{length} hit {clients} client{'s' * (clients > 1)}"
            pairs = {
                name: [sum(two) / 2 for two in zip(all[2::2], all[3::2], strict=True)] for name, all in rates.items()
            }
            figures += [figure(f"{case}, {name}", pairs[name], "1/s") for name in pairs]
            kept = [on / off for on, off in zip(pairs["on"], pairs["off"], strict=True)]
            figures.append(figure(f"{case} ratio", kept, "ratio", of="telemetry off", goal=">= 0.9"))
        assert Collector.received, "the collector got nothing"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one turn")
    parser.add_argument("--json", type=Path, help="write the result: a file, or a folder")
    options = parser.parse_args()
    unwind_at_sigterm()
    report = Report("telemetry", tuple(measure(options.repetitions, options.seconds)))
    Console().print(as_table(report.figures))
    if options.json is not None:
        report.write(options.json)


if __name__ == "__main__":
    main()
