# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc status` and what the command line as a whole promises."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvgrpc import api
from kvgrpc.api import ArenaStatus, ClientStatus, EngineStatus, ServerStatus, SpaceStatus, TierStatus, WritePolicy
from kvgrpc.cli.inspect import Found
from kvgrpc.cli.inspect import _screen as inspected  # pyright: ignore[reportPrivateUsage]
from kvgrpc.cli.reached import problem
from kvgrpc.cli.root import main
from kvgrpc.cli.screen import Snapshot, as_json, as_screen
from kvgrpc.client import Client
from kvgrpc.config.settings import Settings
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.inspection import InspectedChunk, Keeper
from kvgrpc.core.types import Role, SpaceIdentity
from kvgrpc.operators import RestartStatus
from tests.served import serving


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvgrpc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def snapshot() -> Snapshot:
    worker = ClientStatus("worker-1", Role.WORKER, True, True, 1, 3, 64 << 20, 1, 2)
    scheduler = ClientStatus("scheduler-1", Role.SCHEDULER, False, False, 0, 0, 0, 0, 0)
    space = SpaceStatus(
        b"\1" * 16, SpaceIdentity("[bold]llama", "r1", "bfloat16", 2, "x", "y"), "", "ab" * 8, 3, 10, 5, 1
    )
    arena = ArenaStatus(1 << 30, 1 << 29, 0, 1 << 28, 1 << 28, 0, 0, 0)
    counters = {"lookup_tokens": 1000, "hit_tokens": 920, "stores": 4, "evicted_chunks": 0}
    return Snapshot(
        ServerStatus("0.1.0", b"\2" * 16, 93_784_000, 256, True, arena, 10, 1, 1, 2, 3, 4, 1, counters=counters),
        (EngineStatus("cd" * 8, (scheduler, worker), 3, 4, False),),
        (space,),
    )


def test_one_screen_says_it_all():
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(as_screen(snapshot()))
    text = console.export_text()
    for words in (
        "draining",
        "1 d 02:03:04",
        "512 MiB of 1 GiB",
        "hit rate 92.0% of tokens",
        "worker-1",
        "1/3",
        "64 MiB",
    ):
        assert words in text
    assert "broken stream" in text
    assert "[bold]llama" in text, "what peers send is text, not markup"
    assert len(text.splitlines()) < 40


HOSTILE = "evil\x1b[2J\x1b]0;title\x07\x9b31m\u202ered\nline"


def test_what_clients_have_named_does_not_steer_the_terminal():
    found, out = snapshot(), io.StringIO()
    identity = SpaceIdentity(HOSTILE, "\x1b[5m", f"d{HOSTILE}", 2, "x", "y")
    space = replace(found.spaces[0], identity=identity, lora=HOSTILE)
    kept = api.Inspection(
        (InspectedChunk(b"k" * 16, 2, 0, 4096, 1, 0),), (Keeper(1, 1000, "ef" * 8, HOSTILE, b""),), False, ({},), 0, ()
    )
    console = Console(width=400, file=out, force_terminal=True, color_system=None)
    console.print(as_screen(replace(found, spaces=(space,))))
    console.print(inspected(Found(space, kept)), highlight=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # what rich itself says of bold and dim
    assert "evil" in text and "line" in text
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert not any(line.startswith("line") for line in text.splitlines())


def test_the_screen_says_what_is_copied_down_where_there_is_something_below():
    found = snapshot()
    for tiers, said in (((), False), ((TierStatus("disk", True, 0, 0),), True)):
        console = Console(width=160, file=io.StringIO(), record=True)
        spaces = (replace(found.spaces[0], write_policy=WritePolicy.SECOND_USE),)
        console.print(as_screen(replace(found, server=replace(found.server, tiers=tiers), spaces=spaces)))
        text = console.export_text()
        assert ("copied down" in text, "second-use" in text) == (said, said)


def test_the_screen_says_what_became_of_an_earlier_servers_arena():
    def shown(restart: RestartStatus) -> str:
        found = snapshot()
        console = Console(width=140, file=io.StringIO(), record=True)
        console.print(as_screen(replace(found, server=replace(found.server, restart=restart))))
        return console.export_text()

    assert "it began empty: its index is damaged" in shown(RestartStatus(refused="its index is damaged"))
    checking = RestartStatus(checking=True, found_objects=9, restored_objects=4, dropped_objects=1)
    assert "5 of 9 objects of an earlier server are checked" in shown(checking)
    assert "earlier server" not in shown(RestartStatus(found_objects=9, restored_objects=9))


def test_json_has_the_protocols_names():
    found = json.loads(as_json(snapshot()))
    assert found["server"]["arena"]["pinned_bytes"] == 1 << 28
    assert found["server"]["server_epoch"] == "02" * 16
    assert found["engines"][0]["clients"][1]["role"] == "worker"
    assert found["spaces"][0]["generation"] == 3


def test_status_of_a_running_server():
    with serving("--l1-size", "64MiB") as server:
        screen = run("status", "--address", server.address)
        assert screen.returncode == 0, screen.stderr
        assert "of 64 MiB" in screen.stdout
        found = json.loads(run("status", "--address", server.address, "--json").stdout)
    assert found["server"]["arena"]["total_bytes"] == 64 << 20
    assert found["engines"] == []


def test_status_without_a_server_says_what_to_do(tmp_path: Path):
    done = run("status", "--address", f"unix:{tmp_path}/none")
    assert done.returncode == 1
    assert f"no server answers at unix:{tmp_path}/none" in done.stderr
    assert "kvgrpc serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_refused_was_answered():
    silent, strange = Refusal(Reason.SERVER_UNREACHABLE, "no"), Refusal(Reason.UNAUTHENTICATED, "who?")
    assert "--ca-file" in problem("host:1", silent) and "--ca-file" not in problem("unix:/s", silent)
    assert "expired" in problem("host:1", silent) and "--server-name" in problem("host:1", silent)
    assert "refuses: who?" in problem("host:1", strange) and "--token-file" in problem("host:1", strange)
    assert "--access" in problem("host:1", Refusal(Reason.NOT_ALLOWED, "tenant a may not"))
    assert "did not answer: late" in problem("host:1", Refusal(Reason.DEADLINE, "late"))


def test_a_wrong_address_is_explained():
    done = run("status", "--address", "not an address")
    assert done.returncode == 1
    assert "host:port" in done.stderr


def test_ids_are_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    client_id = "scheduler-" + 32 * "5"
    with serving("--l1-size", "64MiB") as server, Client(server.address, client_id) as client:
        session = client.attach(32 * "e", Role.SCHEDULER, bytes(16))
        next(session)
        assert client_id in run("status", "--address", server.address).stdout
        session.close()


def test_a_command_that_is_mistyped_is_guessed():
    assert "Did you mean 'status'?" in run("statsu").stderr
    assert "No such command 'xyzzy'" in run("xyzzy").stderr


@pytest.mark.parametrize(("group", "least"), [((), 10), (("trace",), 2)])
def test_what_a_command_does_fits_a_terminal(group: tuple[str, ...], least: int) -> None:
    text = CliRunner().invoke(main, [*group, "--help"], terminal_width=80).output
    commands = text.partition("Commands:\n")[2].splitlines()
    assert len(commands) >= least
    assert [line for line in commands if not line.endswith(".") or line.endswith("...")] == []


def test_measurements_of_the_other_kind_are_refused():
    assert "kvgrpc bench gpu" in run("bench", "--only", "gpu_calls").stderr
    assert run("bench", "gpu", "--only", "core").returncode == 2


def test_a_place_for_figures_that_is_not_there_is_refused_before_measuring(tmp_path: Path):
    done = run("bench", "--only", "core", "--quick", "--json", f"{tmp_path}/no/figures.json")
    assert done.returncode == 2 and f"{tmp_path}/no is no folder that can be written to" in done.stderr
    assert done.stdout == ""


def test_help_has_every_setting():
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in text] == []


def test_every_switch_is_a_switch():
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    switches = [name for name, field in Settings.model_fields.items() if field.annotation in (bool, bool | None)]
    assert {"insecure", "reflection", "huge_pages"} <= set(switches)
    for name in switches:
        flag = name.replace("_", "-")
        assert f"--{flag} / --no-{flag}" in text


def test_the_demo_without_torch_says_which_extra_to_install():
    program = "import sys; sys.modules['torch'] = None; from kvgrpc.cli.root import main; main(['demo'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "Error: the demo's engines need torch, which is an extra: pip install 'kvgrpc[torch]'\n"
    assert done.stdout == "", "nothing was started"


@pytest.mark.parametrize(
    ("module", "flag", "url", "name"),
    [
        ("redis", "--valkey-url", "valkey://127.0.0.1:1", "valkey"),
        ("obstore", "--object-store-url", "file:///srv/objects", "objectstore"),
    ],
)
def test_a_tier_without_its_extra_names_the_flag_that_was_given(module: str, flag: str, url: str, name: str):
    arguments = ["serve", "--l1-size", "64MiB", flag, url]
    program = f"import sys; sys.modules[{module!r}] = None; from kvgrpc.cli.root import main; main({arguments})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {flag} needs {module} ") and f"kvgrpc[{name}]" in done.stderr


def test_the_command_line_loads_no_torch():
    program = "import sys, kvgrpc.cli.root; print(sorted({'torch', 'numpy', 'cupy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
