# SPDX-License-Identifier: Apache-2.0
"""The tier in an object store: over a real S3 server process and over a local folder, and what may go wrong there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvgrpc.breaker import BreakerSettings
from kvgrpc.core.types import ObjectName, Versions
from kvgrpc.tiers import objectstore
from kvgrpc.tiers.base import FaultReason, Tier, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.objectstore import ObjectStoreTier, ObjectStoreVersions, object_key
from kvgrpc.tiers.version_file import keep
from kvgrpc.tiers.versions import begin_at, begin_both, save_at
from tests.e2e.harness import until
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write
from tests.tiers.stores import BUCKET, Moto, Proxy, http_answer, moto

URL = f"s3://{BUCKET}"
SMALL_PIECE = 64 << 10
DEADLINE_S = 30.0
"""Of a request: the S3 server is slow, and the machine may be busy."""
LONG_NS = 60_000_000_000
"""That a breaker stays open, however busy the machine is."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with moto(tmp_path_factory.mktemp("moto")) as one:
        yield one


@pytest.fixture
def s3(server: Moto, monkeypatch: pytest.MonkeyPatch) -> Moto:
    """The server, with its address in the environment."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A place of the test's own."""
    return request.node.name.replace("[", "-").replace("]", "")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that objects of some hundred KiB travel in several."""
    monkeypatch.setattr(objectstore, "PIECE_BYTES", SMALL_PIECE)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 wants them large."""
    monkeypatch.setattr(objectstore, "PART_BYTES", SMALL_PIECE)


class TestLocalFolder(TierConformance):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[ObjectStoreTier]:
        self.folder = tmp_path / "objects of ours"
        self.folder.mkdir()
        tier = ObjectStoreTier(self.folder.as_uri())
        yield tier
        await tier.close()

    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        path = self.folder / object_key(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        return (self.folder / object_key(name)).read_bytes()


@pytest.mark.usefixtures("small_pieces", "small_parts")
class TestLocalFolderInPieces(TestLocalFolder):
    """What is larger than one piece takes other ways."""

    async def test_many_pieces(self, tier: Tier) -> None:
        size_bytes = 20 * SMALL_PIECE + 17
        object = object_name("a", size_bytes)
        await tier.write(object, parts(data("a", size_bytes), 5, SMALL_PIECE * 3 + 1))
        assert await read(tier, object, 1000, SMALL_PIECE * 7) == data("a", size_bytes)

    @pytest.mark.parametrize("kept", [SMALL_PIECE, SMALL_PIECE + 1, 3 * SMALL_PIECE])
    async def test_short_in_a_later_piece(self, tier: Tier, kept: int) -> None:
        object = await write(tier, "a", 5 * SMALL_PIECE)
        await self.put_raw(tier, object.name, (await self.get_raw(tier, object.name))[:kept])
        assert await fault_of(tier, object) is FaultReason.SHORT

    async def test_flipped_in_a_later_piece(self, tier: Tier) -> None:
        object = await write(tier, "a", 5 * SMALL_PIECE)
        raw = bytearray(await self.get_raw(tier, object.name))
        raw[4 * SMALL_PIECE] ^= 1
        await self.put_raw(tier, object.name, bytes(raw))
        assert await fault_of(tier, object) is FaultReason.CORRUPT
        assert await tier.exists([object.name]) == [False], "and it is gone"
        assert tier.counters["damaged_objects"] == 1


class TestS3(TierConformance):
    @pytest.fixture
    async def tier(self, s3: Moto, prefix: str) -> AsyncIterator[ObjectStoreTier]:
        self.client, self.prefix = s3.client(), prefix
        tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
        yield tier
        await tier.close()

    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        key = f"{self.prefix}/{object_key(name)}"
        await asyncio.to_thread(self.client.put_object, Bucket=BUCKET, Key=key, Body=kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        got = self.client.get_object(Bucket=BUCKET, Key=f"{self.prefix}/{object_key(name)}")
        return await asyncio.to_thread(got["Body"].read)

    async def test_large_objects_go_up_in_parts(self, tier: Tier) -> None:
        size_bytes = (18 << 20) + 5
        content = data("a", 1 << 20) * 18 + b"tail!"
        object = object_name("large", size_bytes)
        await tier.write(object, parts(content, 3 << 20))
        facts = self.client.head_object(Bucket=BUCKET, Key=f"{self.prefix}/{object_key(object.name)}")
        assert facts["ETag"].strip('"').endswith("-3"), "a multipart upload of three"
        assert await read(tier, object, 9 << 20) == content


# ---- faults ----


def guarded(url: str, deadline_s: float, delay_ns: int = 50_000_000) -> Guarded:
    settings = GuardSettings(deadline_s, 1.0, BreakerSettings(3, delay_ns, 2 * delay_ns))
    return Guarded(ObjectStoreTier(url, DEADLINE_S, plain_http=True), settings)


@pytest.fixture
async def proxy(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    async with Proxy(s3.port) as one:
        for name, value in s3.environment(one.port).items():
            monkeypatch.setenv(name, value)
        yield one


@pytest.mark.parametrize(("status", "asked"), [("400 Bad Request", 1), ("503 Slow Down", 1 + objectstore.RETRIES)])
async def test_errors_are_repeated_so_often_and_not_more(proxy: Proxy, prefix: str, status: str, asked: int) -> None:
    """Field report 56."""
    tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    proxy.answer = http_answer(status)
    with pytest.raises(TierFault, match="IO"):
        await write(tier, "a", 1 << 20)
    assert proxy.requests == asked
    proxy.answer = None
    assert await tier.exists([object_name("a", 1 << 20).name]) == [False]
    assert await read(tier, await write(tier, "a", 1 << 20)) == data("a", 1 << 20)
    await tier.close()


async def test_access_refused_is_a_fault_without_a_key_in_it(proxy: Proxy, prefix: str) -> None:
    tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    proxy.answer = http_answer("403 Forbidden", body)
    for call in (
        tier.exists(["ab" * 32]),
        tier.remove("ab" * 32),
        write(tier, "a", 8),
        read(tier, object_name("a", 8)),
    ):
        with pytest.raises(TierFault, match="IO"):
            await call
    assert proxy.requests == 5, "nothing is repeated; a read asks for the size, too"
    await tier.close()


@pytest.mark.usefixtures("small_pieces")
async def test_a_cut_body_is_never_short_data(proxy: Proxy, prefix: str) -> None:
    """Field report 56: the store closes in the middle of every answer."""
    tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    object = await write(tier, "a", 3 * SMALL_PIECE)
    for cut in (100, HEADER_BYTES + 500):
        proxy.cut_after = cut
        assert await fault_of(tier, object) is FaultReason.IO
    proxy.cut_after = SMALL_PIECE // 2
    assert await read(tier, object) == data("a", 3 * SMALL_PIECE), "each piece goes on where it was cut"
    proxy.cut_after = None
    assert await read(tier, object) == data("a", 3 * SMALL_PIECE), "a broken connection damages nothing"
    await tier.close()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "flip_at", [9, 40, 150, 400, 1000, HEADER_BYTES, HEADER_BYTES + 700, HEADER_BYTES + SMALL_PIECE]
)
async def test_a_bit_that_flips_on_the_way_is_never_data(proxy: Proxy, prefix: str, flip_at: int) -> None:
    """In the head of an answer or in its body, in the object's header or in its bytes: a fault, or not even that."""
    object = await write(tier := ObjectStoreTier(f"{URL}/{prefix}", 5.0, plain_http=True), "a", 3 * SMALL_PIECE)
    await tier.close()
    tier = ObjectStoreTier(f"{URL}/{prefix}", 5.0, plain_http=True)  # with connections of its own
    proxy.flip_at = flip_at
    buffer = bytearray(object.size_bytes)
    with contextlib.suppress(TierFault):
        await tier.read(object, parts(buffer))
        assert bytes(buffer) == data("a", 3 * SMALL_PIECE)
    proxy.flip_at = None
    await tier.close()
    tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    assert await write(tier, "a", 3 * SMALL_PIECE) == object
    assert await read(tier, object) == data("a", 3 * SMALL_PIECE)
    await tier.close()


async def test_a_slow_store_ends_at_the_deadline_and_touches_nothing_later(proxy: Proxy, prefix: str) -> None:
    tier = guarded(f"{URL}/{prefix}", DEADLINE_S)
    object = await write(tier, "a", 1 << 20)
    slow, into = guarded(f"{URL}/{prefix}", 1.0), bytearray(1 << 20)
    proxy.bytes_per_s = 200_000
    began = time.monotonic()
    with pytest.raises(TierFault, match="TIMEOUT"):
        await slow.read(object, parts(into))
    assert time.monotonic() - began < 4
    into[:] = b"\xa5" * len(into)
    proxy.bytes_per_s = None
    assert await read(tier, object) == data("a", 1 << 20)
    assert into == b"\xa5" * len(into)
    await slow.close()
    await tier.close()


@pytest.mark.usefixtures("small_pieces")
async def test_a_cancelled_read_has_let_go(proxy: Proxy, prefix: str) -> None:
    tier = ObjectStoreTier(f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    object = await write(tier, "a", 16 * SMALL_PIECE)
    proxy.bytes_per_s = 2_000_000
    for passed in (1, 2 * SMALL_PIECE, 9 * SMALL_PIECE):
        into, proxy.passed = bytearray(object.size_bytes), 0
        reading = asyncio.create_task(tier.read(object, parts(into)))
        await until(lambda passed=passed: proxy.passed >= passed)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        into[:] = b"\xa5" * len(into)
        proxy.bytes_per_s = None
        assert await read(tier, object) == data("a", object.size_bytes)
        assert into == b"\xa5" * len(into), "nothing came late"
        proxy.bytes_per_s = 2_000_000
    await tier.close()


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    """One that a test may end."""
    with moto(tmp_path) as one:
        for name, value in one.environment().items():
            monkeypatch.setenv(name, value)
        yield one


async def test_a_server_that_dies_in_the_middle_of_a_read(own_server: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field reports 14 and 20: a fault, then what it has lost are misses, then it is in use again."""
    async with Proxy(own_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
        tier = guarded(URL, DEADLINE_S)
        object = await write(tier, "a", 12 << 20)
        proxy.bytes_per_s, proxy.passed = 1_000_000, 0
        reading = asyncio.create_task(fault_of(tier, object))
        await until(lambda: proxy.passed > 100_000)
        own_server.kill()
        proxy.bytes_per_s = None
        assert await reading is FaultReason.IO
        for _ in range(2):
            await fault_of(tier, object)
        assert not tier.healthy
        await asyncio.to_thread(own_server.start)
        end = time.monotonic() + 30
        while (reason := await fault_of(tier, object)) is not FaultReason.MISSING:
            assert reason in (FaultReason.IO, FaultReason.SKIPPED)
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        while True:
            try:
                await write(tier, "a", 12 << 20)
                break
            except TierFault:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
        assert await read(tier, object) == data("a", 12 << 20)
        await tier.close()


async def test_a_server_that_stands_still(own_server: Moto) -> None:
    """Field report 13: bounded by the deadline, then not asked; in use again when it goes on."""
    tier = guarded(URL, DEADLINE_S)
    object = await write(tier, "a", 64)
    quick = guarded(URL, 0.3, LONG_NS)
    own_server.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            began = time.monotonic()
            assert await fault_of(quick, object) is FaultReason.TIMEOUT
            assert time.monotonic() - began < 3
        assert await fault_of(quick, object) is FaultReason.SKIPPED
    finally:
        own_server.signal(signal.SIGCONT)
    assert await read(tier, object) == data("a", 64)
    await tier.close()
    await quick.close()


async def test_wrong_keys_are_refused_by_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="1") as strict:  # the bucket is made; then it knows nobody
        for name, value in strict.environment().items():
            monkeypatch.setenv(name, value)
        tier = ObjectStoreTier(URL, DEADLINE_S, plain_http=True)
        with pytest.raises(TierFault, match="IO"):
            await write(tier, "a", 64)
        with pytest.raises(TierFault, match="IO"):
            await tier.exists([object_name("a", 64).name])
        await tier.close()


async def test_what_cannot_be_removed_is_found_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ObjectStoreTier(tmp_path.as_uri())
    object = await write(tier, "a", 64)
    path = tmp_path / object_key(object.name)
    path.write_bytes(path.read_bytes()[:-1])

    async def refused(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(objectstore.obstore, "delete_async", refused)
    assert await fault_of(tier, object) is FaultReason.SHORT
    assert path.exists()
    assert await tier.exists([object.name]) == [False]
    with pytest.raises(TierMiss):
        await read(tier, object)
    await write(tier, "a", 64)
    assert await read(tier, object) == data("a", 64)
    await tier.close()


async def test_a_larger_object_under_the_name_is_not_fetched(tmp_path: Path) -> None:
    """Sizes are checked before memory is taken."""
    tier = ObjectStoreTier(tmp_path.as_uri())
    object = await write(tier, "a", 64)
    path = tmp_path / object_key(object.name)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert await read(tier, object) == data("a", 64), "bytes behind the object are not looked at"
    assert await fault_of(tier, ObjectName(object.name, 1 << 30)) is FaultReason.FOREIGN
    await tier.close()


# ---- versions ----


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_versions_of_two_servers_come_together(s3: Moto, tmp_path: Path, prefix: str, kind: str) -> None:
    place = ObjectStoreVersions(tmp_path.as_uri() if kind == "file" else f"{URL}/{prefix}", DEADLINE_S, plain_http=True)
    begun = begin_at(place)
    assert begun.first, "nobody knows what is there"
    assert begin_at(place) == begun
    one = Versions(begun.first, {b"a" * 32: (1, 7)}, {})
    two = Versions(begun.first, {b"b" * 32: (1, 9)}, {b"s" * 32: (b"b" * 32, 11)})
    for number in range(3):
        save_at(place, begun, one)
        save_at(place, begun, two)
        assert begin_at(place) == Versions(begun.first, {**one.bases, **two.bases}, two.spaces), number
    seen, text = place.load()
    assert not place.swap(seen - 1, text), "somebody was quicker"
    assert not place.swap(seen - 4, text), "nor where the number is free again"


def test_without_the_store_a_server_begins_where_nobody_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    place = ObjectStoreVersions((tmp_path / "file").as_uri())
    assert begin_both(place, None).first != begin_both(place, None).first
    keep(tmp_path / "versions.json", Versions(7))
    assert begin_both(place, tmp_path / "versions.json") == Versions(7)
    with pytest.raises(OSError, match=r"."):
        save_at(place, Versions(), Versions(first=3))
