# SPDX-License-Identifier: Apache-2.0
"""Run as a process by test_fork.py: uses every client, forks, uses them in children and again in the parent.

Prints one JSON line: what each child said, and how the parent fared.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from kvgrpc import api
from kvgrpc.client import AioClient, Client, ForkedProcessError, SchedulerClient, WorkerClient
from tests.client.fakes import ENGINE, IDENTITY
from tests.client.memory import register_request, tokens

CHILDREN = 8


def connected_sockets(address: str) -> int:
    """Descriptors of this process that are sockets connected to the server."""
    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as copy:
                found += copy.getpeername() == address.removeprefix("unix:")
        except OSError:
            pass
    return found


def outcome(act: Any) -> str:
    try:
        return f"ok {act()}"
    except ForkedProcessError:
        return "refused"


def child(results: Any, clients: tuple[Client, SchedulerClient, WorkerClient], address: str) -> None:
    client, scheduler, worker = clients
    start = time.monotonic()
    said = [
        outcome(lambda: client.handshake(api.Hello())),
        outcome(lambda: scheduler.try_lookup("r1", tokens(32))),
        outcome(lambda: scheduler.discard("r1")),
        outcome(lambda: worker.store(tokens(32), ((1,),))),
        outcome(worker.blocks_in_flight),
        outcome(lambda: Client(address).handshake(api.Hello())),
        outcome(lambda: SchedulerClient(address, ENGINE, IDENTITY).start()),
    ]
    for each in clients:
        each.close()
    results.put({"said": said, "sockets": connected_sockets(address), "seconds": time.monotonic() - start})


def fresh_child(results: Any, address: str) -> None:
    """A spawned process: uses a client of its own."""
    with Client(address) as client:
        results.put({"said": [outcome(lambda: client.handshake(api.Hello()).server_version)]})


def collect(context: Any, target: Any, args: tuple[Any, ...], count: int) -> tuple[list[Any], list[int | None]]:
    results = context.SimpleQueue()
    processes = [context.Process(target=target, args=(results, *args)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return [results.get() for code in codes if code == 0], codes


def main(address: str) -> None:
    client = Client(address)
    scheduler = SchedulerClient(address, ENGINE, IDENTITY)
    worker = WorkerClient(address, register_request())
    client.handshake(api.Hello())
    assert scheduler.start()
    assert worker.start()
    assert connected_sockets(address) == 3
    said, codes = collect(multiprocessing.get_context("fork"), child, ((client, scheduler, worker), address), CHILDREN)
    start = time.monotonic()
    parent = {
        "version": client.handshake(api.Hello()).server_version,
        "hit_tokens": scheduler.lookup("r2", tokens(32), timeout_s=2).hit_tokens,
        "stored": worker.store(tokens(32), ((1,) * 8,), range=api.TokenRange(0, 32)).result(5)[0].count,
        "attached": scheduler.attached and worker.attached,
    }
    seconds = time.monotonic() - start
    fresh, fresh_codes = collect(multiprocessing.get_context("spawn"), fresh_child, (address,), 1)
    for each in (client, scheduler, worker):
        each.close()
    print(
        json.dumps(
            {
                "children": said,
                "codes": codes,
                "parent": parent,
                "seconds": seconds,
                "fresh": fresh,
                "fresh_codes": fresh_codes,
            }
        )
    )


def die_with_a_child(address: str) -> None:
    """Attaches, forks a child that lives on, and is killed. Prints the child's id first."""
    worker = WorkerClient(address, register_request())
    assert worker.start()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def keep_a_pipe(address: str) -> None:
    """Forks a child that closes its end of a pipe and lives on; prints what the parent then reads of it."""
    worker = WorkerClient(address, register_request())
    assert worker.start()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        signal.pause()
    os.close(write_end)
    ended = bool(select.select([read_end], [], [], 5.0)[0]) and os.read(read_end, 1) == b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("ended" if ended else "held open", flush=True)


def close_in_a_child(address: str) -> None:
    """Closes an AioClient of the parent in a child, and uses it again in the parent."""
    loop = asyncio.new_event_loop()
    client = AioClient(address)
    loop.run_until_complete(client.handshake(api.Hello()))
    pid = os.fork()
    if pid == 0:
        asyncio.new_event_loop().run_until_complete(client.close())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    info = loop.run_until_complete(client.handshake(api.Hello()))
    loop.run_until_complete(client.close())
    print(os.waitstatus_to_exitcode(status), info.server_version, flush=True)


if __name__ == "__main__":
    parts = {"die": die_with_a_child, "pipe": keep_a_pipe, "close": close_in_a_child}
    parts.get(sys.argv[2] if sys.argv[2:] else "", main)(sys.argv[1])
