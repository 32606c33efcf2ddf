# SPDX-License-Identifier: Apache-2.0
"""The tier in an object store: S3, GCS, Azure or a local folder, by URL, through obstore.

    PREFIX/objects/ab/ab12…    one object each, envelope and payload
    PREFIX/versions/NNN        kvgrpc.tiers.versions

All servers of one URL are one cache. What is kept there is the store's own business: no limit, no eviction; rules of
the bucket take old objects away. Credentials come from where obstore finds them: the environment, the machine's role.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, check_header
from kvgrpc.tiers.pieces import Draining, Filling, RemoteTier, run_whole

if TYPE_CHECKING:  # stubs only
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Of a read."""
PART_BYTES = 8 << 20
"""Of a write; what is larger is a multipart upload."""
PIECES_AHEAD = 3
"""Of one object while another of its pieces is taken in."""
PIECES_MOST = 12
WRITES_MOST = 4
PARTS_AT_ONCE = 2
PROBES_MOST = 64
RETRIES = 2
"""Of a request that met a dropped connection or a 5xx."""
FOLDER = "file://"
STORES: Any = {"file": LocalStore, "s3": S3Store, "gs": GCSStore, "az": AzureStore}


_list: Any = obstore.list  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
"""Its stubs are not whole."""


def open_store(url: str, deadline_s: float, plain_http: bool) -> ObjectStore:
    """Raises BaseError, OSError or ValueError: the store cannot be had, or not yet."""
    if url.startswith(FOLDER):
        if not os.path.isdir(unquote(url.removeprefix(FOLDER))):  # one that is made may be where another is mounted
            raise OSError(errno.ENOENT, f"the folder of {url} is not there; the server never makes it")
        return STORES["file"].from_url(url)
    client: ClientConfig = {  # what is given here hides the variables of obstore
        "connect_timeout": timedelta(seconds=2),
        "timeout": timedelta(seconds=deadline_s),
        "allow_http": plain_http,
    }
    retry: RetryConfig = {
        "max_retries": RETRIES,
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
        "retry_timeout": timedelta(seconds=deadline_s),
    }
    return STORES[url.partition(":")[0]].from_url(url, client_options=client, retry_config=retry)


def object_key(name: str) -> str:
    return f"objects/{name[:2]}/{name}"


class ObjectStoreTier(RemoteTier):
    """Keeps objects under ``url``. ``deadline_s`` bounds one request, its retries included.

    Threads: one event loop; bytes are copied and hashed by threads of its own.
    """

    def __init__(
        self, url: str, deadline_s: float = 10.0, *, plain_http: bool = False, name: str = "objectstore"
    ) -> None:
        super().__init__(name, self._count)
        self._url = url
        self._deadline_s = deadline_s
        self._plain_http = plain_http
        self._store: ObjectStore | None = None
        self._pieces = asyncio.Semaphore(PIECES_MOST)
        self._writes = asyncio.Semaphore(WRITES_MOST)
        self._probes = asyncio.Semaphore(PROBES_MOST)
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="kvgrpc-objects")
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="kvgrpc-objects-folder")
        self._rooms = Rooms()

    async def _opened(self) -> ObjectStore:
        """A folder each time, since it may have gone: a write would make it."""
        try:
            if self._url.startswith(FOLDER):
                looking = self._looks.submit(open_store, self._url, self._deadline_s, self._plain_http)
                return await asyncio.wrap_future(looking)
            if self._store is None:
                self._store = open_store(self._url, self._deadline_s, self._plain_http)
            return self._store
        except (BaseError, OSError, ValueError) as error:
            raise _fault(error, self._url) from error

    # ---- Tier ----

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return list(await _all([self._is_there(name) for name in names]))

    async def _is_there(self, name: str) -> bool:
        async with self._probes:
            return name not in self._bad and await self._size(name) >= 0

    async def _size(self, name: str) -> int:
        """Bytes of what is kept under this name; -1: nothing is."""
        try:
            return (await obstore.head_async(await self._opened(), object_key(name)))["size"]
        except FileNotFoundError:
            return -1
        except (BaseError, OSError, ValueError) as error:
            raise _fault(error, name) from error

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        async with self._reading(object.name):
            await self._read(object, Filling(object, into))

    async def _read(self, object: ObjectName, filling: Filling) -> None:
        """Piece after piece; the next ones are on their way while one is taken in."""
        whole = HEADER_BYTES + object.size_bytes
        starts = deque(range(PIECE_BYTES, whole, PIECE_BYTES))
        coming = deque([asyncio.create_task(self._fetch(object, 0, min(whole, PIECE_BYTES), None))])
        try:
            body, tag = await coming[0]
            check_header(object, body)  # before more is asked for
            while coming:
                body, _ = await coming[0]
                while starts and len(coming) <= PIECES_AHEAD:
                    start = starts.popleft()
                    length = min(whole - start, PIECE_BYTES)
                    coming.append(asyncio.create_task(self._fetch(object, start, length, tag)))
                await run_whole(self._copies, filling.stop, filling.take, body)
                del body
                coming.popleft().add_done_callback(self._let_go)
            filling.end()
        finally:
            for task in coming:
                task.cancel()
                task.add_done_callback(self._let_go)

    def _let_go(self, fetched: asyncio.Task[tuple[memoryview, str | None]]) -> None:
        """A piece has been taken in, or nobody wants it."""
        if not fetched.cancelled() and fetched.exception() is None:
            self._pieces.release()

    async def _fetch(
        self, object: ObjectName, start: int, length: int, tag: str | None
    ) -> tuple[memoryview, str | None]:
        """Bytes of the object, for which a place among the pieces is kept."""
        await self._pieces.acquire()
        try:
            options: GetOptions = {"range": (start, start + length)}
            if tag is not None:
                options["if_match"] = tag
            try:
                got = await obstore.get_async(await self._opened(), object_key(object.name), options=options)
                self._check_size(object, got.meta["size"], start)
                return memoryview(await got.bytes_async()), got.meta["e_tag"]
            except FileNotFoundError:
                raise TierMiss(f"{object.name}: not kept") from None
            except PreconditionError:
                raise TierMiss(f"{object.name}: replaced while it was read") from None
            except (BaseError, OSError, ValueError) as error:
                size = await self._size(object.name)  # a range behind the end is an error of many kinds
                if 0 <= size < start + length:
                    raise TierFault(FaultReason.SHORT, f"{object.name}: {size} bytes are too few") from error
                raise _fault(error, object.name) from error
        except BaseException:
            self._pieces.release()
            raise

    @staticmethod
    def _check_size(object: ObjectName, size: int, start: int) -> None:
        """The first piece says the rest by its header; what comes later must be there."""
        if size < HEADER_BYTES or (start and size < HEADER_BYTES + object.size_bytes):
            raise TierFault(FaultReason.SHORT, f"{object.name}: {size} bytes are too few")

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        async with self._writes:
            whole, draining = HEADER_BYTES + object.size_bytes, Draining(data)
            try:
                header = await run_whole(self._copies, draining.stop, draining.seal, object)
                await self._put(object.name, self._rooms.parts(header, draining), whole)
            except FileNotFoundError as error:
                raise TierFault(FaultReason.IO, f"{object.name}: the bucket is not there") from error
            except (BaseError, OSError, ValueError) as error:
                raise _fault(error, object.name) from error
            finally:
                draining.stop()
            self._written(object)

    async def _put(self, name: str, pieces: Iterator[memoryview], whole: int) -> None:
        store, key = await self._opened(), object_key(name)
        if whole <= PART_BYTES:
            await obstore.put_async(store, key, next(pieces), use_multipart=False)
        else:
            await obstore.put_async(store, key, pieces, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    async def remove(self, name: str) -> None:
        size = await self._size(name)
        if size < 0:
            return
        try:
            await obstore.delete_async(await self._opened(), object_key(name))
        except FileNotFoundError:
            return
        except (BaseError, OSError, ValueError) as error:
            raise _fault(error, name) from error
        self._usage.add(-size)

    async def _count(self) -> AsyncIterator[int]:
        try:
            async for page in _list(await self._opened(), prefix="objects", chunk_size=1000):
                yield sum(facts["size"] for facts in page)
        except FileNotFoundError:
            return
        except (BaseError, OSError, ValueError) as error:
            raise _fault(error, self._url) from error

    async def close(self) -> None:
        await self._usage.close()
        for pool in (self._copies, self._looks):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)


class Rooms:
    """Memory of parts, used again when the client has let go of it: fresh memory would cost more than the copies.

    Threads: any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[mmap.mmap] = []
        self._out: list[tuple[mmap.mmap, memoryview]] = []

    def parts(self, header: bytes, draining: Draining) -> Iterator[memoryview]:
        """Of one write."""
        at = len(header)
        while True:
            room = self._get()
            whole = memoryview(room)
            whole[:at] = header[:at]
            view = whole[: at + draining.take(whole[at:])]
            try:
                if not len(view):
                    return
                yield view
            finally:
                with self._lock:
                    self._out.append((room, view))
            at = 0

    def _get(self) -> mmap.mmap:
        with self._lock:
            out, self._out = self._out, []
            for room, view in out:
                if _let_go(view):
                    self._free.append(room)
                else:
                    self._out.append((room, view))
            room = self._free.pop() if self._free else None
        return room if room is not None and len(room) == PART_BYTES else mmap.mmap(-1, PART_BYTES)


def _let_go(view: memoryview) -> bool:
    """Whether nobody reads it any more."""
    try:
        view.release()
    except BufferError:
        return False
    return True


class ObjectStoreVersions:
    """VersionPlace: one small object a change, by number, made only if it is not there; the last one counts. More than
    that a store need not be able to do."""

    def __init__(self, url: str, deadline_s: float = 4.0, *, plain_http: bool = False) -> None:
        self.where = f"{url}/versions"
        self._url = url
        self._deadline_s = deadline_s
        self._plain_http = plain_http

    def _numbers(self, store: ObjectStore) -> list[int]:
        listed = _list(store, prefix="versions").collect()
        names = (facts["path"].rpartition("/")[2] for facts in listed)
        return sorted(int(name) for name in names if name.isdecimal())

    def load(self) -> tuple[int, bytes]:
        try:
            store = open_store(self._url, self._deadline_s, self._plain_http)
            for _ in range(3):
                numbers = self._numbers(store)
                if not numbers:
                    return 0, b""
                try:
                    return numbers[-1], bytes(obstore.get(store, _version_key(numbers[-1])).bytes())
                except FileNotFoundError:  # others have gone on by more than one meanwhile
                    continue
        except (BaseError, ValueError) as error:
            raise OSError(errno.EIO, _sentence(error)) from error
        raise OSError(errno.EAGAIN, f"{self.where} changes all the time")

    def swap(self, seen: int, text: bytes) -> bool:
        try:
            store = open_store(self._url, self._deadline_s, self._plain_http)
            obstore.put(store, _version_key(seen + 1), text, mode="create")
            numbers = self._numbers(store)
            for number in numbers[:-2]:
                obstore.delete(store, _version_key(number))
        except AlreadyExistsError:
            return False
        except (BaseError, ValueError) as error:
            raise OSError(errno.EIO, _sentence(error)) from error
        return numbers[-1] == seen + 1  # else it may have been made anew behind others that are newer


def _version_key(number: int) -> str:
    return f"versions/{number:012}"


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their answers, or the first fault, when all have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _fault(error: Exception, what: str) -> TierFault:
    return TierFault(FaultReason.IO, f"{what}: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    """The first of what obstore says in many lines."""
    return " ".join(str(error).partition("Debug source")[0].split())[:300]
