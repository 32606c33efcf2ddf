# SPDX-License-Identifier: Apache-2.0
"""Tenants: who is let in, what each may call, and that none reaches what is another's."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import ClearTarget, Hello
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import space_digest
from kvgrpc.core.types import Reader, Role, TokenRange
from kvgrpc.service.access import token_hash
from kvgrpc.service.calls import ADMIN_SERVICE, CACHE_SERVICE, RULES
from tests.e2e.harness import BLOCK, CHUNK, Engine, Stream, outcomes, tokens_of
from tests.e2e.written import chunks_of, writing
from tests.security.guarded import Authority, Guarded, guarded, new_token, write_access

PROMPT, BLOCKS = tokens_of(1, 2 * CHUNK), tuple(range(2 * CHUNK // BLOCK))


async def reason_of(act: Awaitable[object]) -> Reason | None:
    """None: it was answered."""
    try:
        await act
    except Refusal as refusal:
        return refusal.reason
    return None


class Tenants:
    """Two tenants that share no salt, one that may only look, an operator, and the file that says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "access.json"
        self.tokens = {name: new_token(folder, name) for name in ("red", "blue", "viewer", "operator")}
        self.forms: dict[str, dict[str, Any]] = {
            "red": {"salts": {"red": "64KiB", "both": None}},
            "blue": {"salts": {"blue": None, "both": None}},
            "viewer": {"may": ["viewer"]},
            "operator": {"may": ["viewer", "admin"]},
        }
        self.write()

    def write(self, **changes: dict[str, Any]) -> None:
        forms = {name: {"tokens": [self.tokens[name][1]], **form} for name, form in self.forms.items()}
        write_access(self.file, **{**forms, **changes})

    def texts(self) -> list[str]:
        """Every token and every hash."""
        return [text for file, hashed in self.tokens.values() for text in (Path(file).read_text().strip(), hashed)]

    def shown(self, name: str) -> Credentials:
        return Credentials(token_file=self.tokens[name][0])

    async def engine(self, server: Guarded, name: str, **facts: Any) -> Engine:
        server.shown = self.shown(name)
        return await server.engine(**{"salt": name, **facts})

    def client(self, server: Guarded, name: str, client_id: str = "c") -> AioClient:
        server.shown = self.shown(name)
        return server.client(client_id)


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(tmp_path)


async def test_without_a_known_token_nobody_calls_anything(tenants: Tenants, tmp_path: Path):
    stranger = Credentials(token_file=new_token(tmp_path, "stranger")[0])
    async with guarded("--access", str(tenants.file), tcp=True) as server:
        for shown in (Credentials(), stranger):
            for address in (server.address, server.served.address):
                async with AioClient(address, "c", ChannelOptions(credentials=shown)) as client:
                    for ask in (client.handshake(Hello()), client.get_status(), client.clear(ClearTarget(all=True))):
                        assert await reason_of(ask) is Reason.UNAUTHENTICATED


async def test_an_engine_of_a_tenant_works(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        engine = await tenants.engine(server, "red")
        assert outcomes(await engine.store(PROMPT, BLOCKS)) == ["STORED"] * 2
        answer = await engine.lookup(PROMPT)
        assert outcomes(await engine.retrieve(answer, BLOCKS)) == ["LOADED"] * 2
        assert engine.image.wrong_tokens(BLOCKS) == []


async def test_roles(tenants: Tenants):
    """What each may call, over every method of the contract."""
    async with guarded("--access", str(tenants.file)) as server:
        watch = f"/{CACHE_SERVICE}/Watch"
        for name, allowed in (
            ("red", {path for path in RULES if ADMIN_SERVICE not in path}),
            (
                "viewer",
                {
                    *(f"/{ADMIN_SERVICE}/{reads}" for reads in ("GetStatus", "ListEngines", "ListSpaces", "Inspect")),
                    watch,
                },
            ),
            ("operator", {path for path in RULES if ADMIN_SERVICE in path or path == watch}),
        ):
            client = tenants.client(server, name)
            channel = client._stubs().channel
            for path in RULES:
                streams = path.endswith(("/Attach", "/ReadChunks", "/Watch"))
                method = channel.unary_stream(path) if streams else channel.unary_unary(path)
                call: Any = method(b"", metadata=client._metadata, timeout=1 if path == watch else 10)
                code = (await call.code()).name
                assert (code != "PERMISSION_DENIED") is (path in allowed), (name, path, code)
                assert code != "UNAUTHENTICATED"


async def test_no_tenant_finds_or_writes_under_anothers_salt(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        red, blue = await tenants.engine(server, "red"), await tenants.engine(server, "blue")
        await red.store(PROMPT, BLOCKS)
        assert await red.hits(PROMPT) == 2 and await blue.hits(PROMPT) == 0
        for salt in ("red", "", "blue "):
            blue.space = type(blue.space)(blue.space.space_base, "", salt)
            assert await reason_of(blue.lookup(PROMPT)) is Reason.NOT_ALLOWED
            assert await reason_of(blue.store(PROMPT, BLOCKS)) is Reason.NOT_ALLOWED


async def test_what_both_list_they_share(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        red = await tenants.engine(server, "red", salt="both")
        blue = await tenants.engine(server, "blue", salt="both")
        await red.store(PROMPT, BLOCKS)
        answer = await blue.lookup(PROMPT)
        assert outcomes(await blue.retrieve(answer, BLOCKS)) == ["LOADED"] * 2
        assert blue.image.wrong_tokens(BLOCKS) == []


async def test_names_of_one_tenant_are_of_no_use_to_another(tenants: Tenants):
    """Client ids, engine ids and job ids of red, all known to blue: it neither uses, ends nor blocks them."""
    async with guarded("--access", str(tenants.file)) as server:
        red = await tenants.engine(server, "red")
        await red.store(PROMPT, BLOCKS)
        answer = await red.lookup(PROMPT)
        blue = tenants.client(server, "blue", red.worker.client_id)
        assert await reason_of(blue.query(red.engine_id, answer.job_id)) is Reason.NOT_ATTACHED
        stream = await server.attach(blue, red.engine_id, Role.WORKER)  # names that are blue's own from here on
        free = api.FreeRequest(red.engine_id, answer.job_id, 1)
        assert await reason_of(blue.query(red.engine_id, answer.job_id)) is Reason.JOB_UNKNOWN
        assert await reason_of(blue.free(free)) is Reason.JOB_UNKNOWN
        assert (await blue.end_request(red.engine_id, "request-1")).released_pins == 0
        retrieve = red.retrieve_request(answer.job_id, BLOCKS)
        assert await reason_of(blue.retrieve(retrieve)) is Reason.NOT_REGISTERED
        await stream.close()
        assert outcomes(await red.retrieve(answer, BLOCKS)) == ["LOADED"] * 2


async def test_quotas_are_the_files_and_change_with_it(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        red = await tenants.engine(server, "red")
        for seed in range(8):
            await red.store(tokens_of(seed, 4 * CHUNK), tuple(range(4 * CHUNK // BLOCK)))
        operator = tenants.client(server, "operator")
        held = (await operator.list_spaces())[0].bytes
        assert 0 < held <= 64 << 10
        tenants.forms["red"]["salts"]["red"] = "1MiB"
        tenants.write()
        await asked_until(operator, lambda: "was read again" in server.served.log)
        for seed in range(8):
            await red.store(tokens_of(seed, 4 * CHUNK), tuple(range(4 * CHUNK // BLOCK)))
        assert held < (await operator.list_spaces())[0].bytes <= 1 << 20


async def test_a_revoked_token_ends_and_a_broken_file_changes_nothing(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        client, viewer = tenants.client(server, "red"), tenants.client(server, "viewer", "v")
        assert await reason_of(client.handshake(Hello())) is None
        tenants.file.write_text("{")
        await asked_until(viewer, lambda: "was not taken" in server.served.log)
        assert await reason_of(client.handshake(Hello())) is None
        tenants.write(red={"tokens": [token_hash(secrets.token_urlsafe(32))]})
        await asked_until(viewer, lambda: "was read again" in server.served.log)
        assert await reason_of(client.handshake(Hello())) is Reason.UNAUTHENTICATED


async def asked_until(client: AioClient, condition: Any) -> None:
    """The file is looked at when somebody calls."""
    while not condition():
        await client.get_status()


async def test_a_tenant_has_its_number_of_clients(tenants: Tenants):
    tenants.forms["red"]["clients"] = 2
    tenants.write()
    async with guarded("--access", str(tenants.file)) as server:
        red = [tenants.client(server, "red", f"c{number}") for number in range(3)]
        blue = tenants.client(server, "blue", "b")
        streams = [await server.attach(one, "engine-0123456789", Role.WORKER) for one in red[:2]]
        assert await reason_of(server.attach(red[2], "engine-0123456789", Role.WORKER)) is Reason.CLIENT_LIMIT
        await server.attach(blue, "engine-0123456789", Role.WORKER)
        await streams[0].close()
        while await reason_of(server.attach(red[2], "engine-0123456789", Role.WORKER)) is Reason.CLIENT_LIMIT:
            pass  # until the server has seen the end of the stream


async def test_a_tenant_at_its_number_of_clients_takes_its_sessions_up_again(tenants: Tenants):
    """The server may not have seen the end of a stream yet; the number is of clients, and not of streams."""
    tenants.forms["red"]["clients"] = 1
    tenants.write()
    async with guarded("--access", str(tenants.file)) as server:
        red = tenants.client(server, "red")
        first = await server.attach(red, "engine-0123456789", Role.WORKER)
        again = await server.attach(red, "engine-0123456789", Role.WORKER, first.session_id)
        assert again.events[0].resumed
        other = tenants.client(server, "red", "other")
        assert await reason_of(server.attach(other, "engine-0123456789", Role.WORKER)) is Reason.CLIENT_LIMIT


async def test_a_tenants_sessions_that_may_be_taken_up_again_are_counted(tenants: Tenants):
    """Else one tenant could have all of the server's places with streams that it opens and closes."""
    tenants.forms["red"]["clients"] = 2
    tenants.write()
    grace_ms = 60_000
    async with guarded("--access", str(tenants.file), "--clients", "6", "--reattach-grace-ms", str(grace_ms)) as server:
        reasons = set[Reason | None]()
        for number in range(8):
            red = tenants.client(server, "red", f"c{number}")
            stream = Stream(red, "engine-0123456789", Role.WORKER, secrets.token_bytes(16))
            reasons.add(await reason_of(stream.open()))
            await stream.close()
        assert reasons == {None, Reason.CLIENT_LIMIT}
        await server.attach(tenants.client(server, "blue", "b"), "engine-0123456789", Role.WORKER)


async def test_a_certificate_is_a_tenants_and_the_socket_can_be(tenants: Tenants, tmp_path: Path):
    authority = Authority(tmp_path)
    server_pair, client_pair = authority.sign("server", "127.0.0.1"), authority.sign("client", "red.example")
    other_pair = authority.sign("other", "nobody.example")
    tenants.forms["red"]["certificates"] = ["red.example"]
    tenants.write(socket="viewer")  # type: ignore[arg-type] - beside the tenants
    flags = ("--tls-cert", str(server_pair[0]), "--tls-key", str(server_pair[1]), "--tls-client-ca", str(authority.ca))
    async with guarded("--access", str(tenants.file), *flags, tcp=True) as server:
        for pair, expected in ((client_pair, None), (other_pair, Reason.UNAUTHENTICATED)):
            shown = Credentials(str(authority.ca), *map(str, pair))
            async with AioClient(server.address, "c", ChannelOptions(credentials=shown)) as client:
                assert await reason_of(client.handshake(Hello())) is expected
        async with AioClient(server.served.address, "c", ChannelOptions(credentials=Credentials())) as client:
            assert await reason_of(client.get_status()) is None
            assert await reason_of(client.handshake(Hello())) is Reason.NOT_ALLOWED


async def test_no_log_line_and_no_metric_has_a_token(tenants: Tenants):
    async with guarded("--access", str(tenants.file), "--log-level", "debug") as server:
        client = tenants.client(server, "red")
        await client.handshake(Hello())
        assert await reason_of(client.get_status()) is Reason.NOT_ALLOWED
        text = server.served.log
    for hidden in tenants.texts():
        assert hidden not in text


async def test_commands_show_a_token(tenants: Tenants):
    async with guarded("--access", str(tenants.file)) as server:
        command = [sys.executable, "-m", "kvgrpc", "status", "--json", "--address", server.served.address]
        shown = {**os.environ, "KVGRPC_TOKEN_FILE": tenants.tokens["viewer"][0]}
        with open(tenants.tokens["viewer"][0]) as file:  # noqa: ASYNC230
            token = file.read()
        for more, env, given, code in (
            ([], dict(os.environ), "", 1),
            (["--token-file", tenants.tokens["viewer"][0]], dict(os.environ), "", 0),
            (["--token-file", "/dev/stdin"], dict(os.environ), token, 0),  # as `kubectl exec -i` hands it in
            ([], shown, "", 0),
            (["--token-file", "/none/x"], dict(os.environ), "", 1),
        ):
            done = subprocess.run(  # noqa: ASYNC221
                [*command, *more], input=given, capture_output=True, text=True, timeout=30, check=False, env=env
            )
            assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_a_new_token_and_its_hash():
    done = subprocess.run([sys.executable, "-m", "kvgrpc", "token"], capture_output=True, text=True, check=True)
    assert len(done.stdout.strip()) >= 43
    assert done.stderr.strip().endswith(token_hash(done.stdout.strip()))


def test_a_token_is_not_sent_in_clear_beyond_the_loopback(tmp_path: Path):
    shown = Credentials(token_file=new_token(tmp_path, "t")[0])
    with pytest.raises(ValueError, match="would travel in clear"):
        AioClient("cache.example:50051", "c", ChannelOptions(credentials=shown))


async def test_a_tenant_is_told_of_its_own_salts_only(tenants: Tenants) -> None:
    async with guarded("--access", str(tenants.file)) as server:
        red, blue = await tenants.engine(server, "red"), await tenants.engine(server, "blue")
        own = tenants.client(server, "red", "router").watch(api.WatchRequest())
        every = tenants.client(server, "viewer", "router").watch(api.WatchRequest())
        stolen = tenants.client(server, "red", "thief").watch(api.WatchRequest(cache_salts=frozenset({"blue"})))
        for stream in (own, every):
            await anext(stream)
        assert await reason_of(anext(stolen)) is Reason.NOT_ALLOWED
        await blue.store(PROMPT, BLOCKS)
        await red.store(PROMPT, BLOCKS)
        told = await anext(own)
        assert (told.sequence, told.space) == (2, space_digest(red.space)), "nothing of blue came before it"
        assert [(await anext(every)).space for _ in range(2)] == [space_digest(blue.space), space_digest(red.space)]
        for stream in (own, every):
            await stream.aclose()


async def test_a_tenant_reads_bytes_of_its_own_lookups_only(tenants: Tenants) -> None:
    async with guarded("--access", str(tenants.file)) as server:
        red, blue = await tenants.engine(server, "red"), await tenants.engine(server, "blue")
        await red.store(PROMPT, BLOCKS)
        job_id = (await red.lookup(PROMPT)).job_id
        asked = api.ReadChunksRequest(red.engine_id, job_id, Reader(0, 0), TokenRange(0, 2 * CHUNK))
        assert await reason_of(blue.scheduler.read_objects(asked)) is Reason.ENGINE_UNKNOWN
        theirs = replace(asked, engine_id=blue.engine_id)
        assert await reason_of(blue.scheduler.read_objects(theirs)) is Reason.JOB_UNKNOWN
        found, _ = await red.scheduler.read_objects(asked)
        assert found[1] == red.image.object_bytes(BLOCKS[CHUNK // BLOCK :])


async def test_a_tenant_writes_bytes_under_its_own_salts_only(tenants: Tenants) -> None:
    async with guarded("--access", str(tenants.file)) as server:
        red, blue = await tenants.engine(server, "red"), await tenants.engine(server, "blue")
        found, begin = chunks_of(red, 0, 2), writing(red, PROMPT)
        theirs = replace(begin, engine_id=blue.engine_id)
        assert await reason_of(blue.scheduler.write_objects(theirs, found)) is Reason.NOT_ALLOWED
        assert await reason_of(blue.scheduler.write_objects(begin, found)) is Reason.NOT_ALLOWED
        own = replace(theirs, space=blue.space)
        assert await reason_of(blue.scheduler.write_objects(replace(own, engine_id=red.engine_id), found)) is (
            Reason.ENGINE_UNKNOWN
        )
        assert outcomes(await blue.scheduler.write_objects(own, found)) == ["STORED"] * 2
        assert (await red.hits(PROMPT), await blue.hits(PROMPT)) == (0, 2)
