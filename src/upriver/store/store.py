"""One small interface over file, memory and S3-compatible stores."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import LocalStore, MemoryStore, S3Store

from upriver.errors import (
    AccessDenied,
    ConfigError,
    ObjectChanged,
    ObjectNotFound,
    StorageFull,
    StoreError,
    UpriverError,
)
from upriver.store import local
from upriver.store.direct import Direct
from upriver.store.names import check_name, check_prefix
from upriver.store.places import PIECE_BYTES, BufferSequence
from upriver.store.s3 import access_to, open_s3, patient, secrets_of, site_of

MULTIPART_BYTES = 64 * 2**20
"""Objects up to this size travel in one request, as AWS advises below 100 MB; larger ones in parts of it."""

STREAM_PART_BYTES = 64 * 2**20
"""Of an object that is written as it is made; with it the 10,000 parts that S3 allows hold 640 GB. Swift
takes an MD5 of what is read from the beginning of a part on, and two of a part that is read whole, so parts
are to be much larger than what is read at once."""

STREAM_PARTS = 2
"""How many of them may be under way, and so in memory, at once."""

PATIENT_BYTES = 2**20
"""What is larger may take as long to send as a whole attempt may. The rest is small enough to be given up
sooner, where a store has stopped to answer."""

MOST_COPIED_BYTES = 512 * 1024
"""Of a piece that obstore hands on at once: it is memory of one of its threads, of which glibc keeps for each
what was freed there."""

_REFUSED = (PermissionDeniedError, UnauthenticatedError)
_HTTP_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
_S3_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_CREDENTIALS = re.compile(
    r"performing (PUT|GET) http://[^/ ]+/latest/(api/token|meta-data/iam/security-credentials)\b"
)
"""A request that did not go to the store: nobody gave credentials, so a cloud is asked for them."""

_NO_SPACE = re.compile(r"\(os error (?:28|122)\)|No space left on device|Disk quota exceeded")
_FULL = ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded")
"""Codes of stores that are full: of Swift, Ceph and MinIO."""

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()

_asked_in: int | None = None
"""The process that asked obstore for something first: its threads are of that one, and a fork has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        path: Its name, relative to the store.
        size: Bytes.
        etag: Changes whenever the object does; empty where the store has none.
        modified_s: When it was written last, by the store's clock, in seconds since 1970.
    """

    path: str
    size: int
    etag: str
    modified_s: float


def _ignore(_: object) -> None:
    """For whom it is enough to be told when all is there."""


async def _ignore_async(num_bytes: int) -> None:
    """:func:`_ignore` for an event loop."""


class Store:
    """Objects by name, in one store that the operator configured.

    Every name is relative and checked; every error names the object and the store. A put is atomic: the whole
    new object is there afterwards, or what was there before.

    Attributes:
        name: What clients and servers call this store.
        uri: Where it is on this side; holds no credentials.
    """

    def __init__(
        self,
        backend: LocalStore | MemoryStore | S3Store,
        *,
        name: str,
        uri: str,
        root: Path | None = None,
        secrets: tuple[str, ...] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.uri = uri
        self._backend = backend
        self._root = root
        self._secrets = secrets
        self._options = dict(options or {})

    @classmethod
    def open(cls, uri: str, *, name: str = "default", options: Mapping[str, str] | None = None) -> Store:
        """Open ``file:///absolute/path``, ``memory://name`` or ``s3://bucket/prefix``.

        Memory stores of one URI share their content within a process.

        Args:
            uri: Where the objects are.
            name: What clients and servers call it.
            options: For S3 only, see :func:`upriver.store.s3.open_s3`.

        Raises:
            ConfigError: If the URI or an option is not understood.
            StoreError: If a file store's directory does not exist.
        """
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise ConfigError("a store URI holds no credentials; give them as options or in the environment")
        if parts.query or parts.fragment:
            raise ConfigError(f"a store URI has no query and no fragment, got {uri!r}")
        if options and parts.scheme != "s3":
            raise ConfigError(f"store {uri!r} takes no options, got {', '.join(sorted(options))}")
        if parts.scheme == "file":
            root = _file_root(uri)
            return cls(LocalStore(prefix=root), name=name, uri=root.as_uri(), root=root)
        if parts.scheme == "memory":
            return cls(_memory_store(uri.rstrip("/")), name=name, uri=uri)
        if parts.scheme == "s3" and parts.netloc:
            if "//" in parts.path:
                raise ConfigError(
                    f"store {uri!r}: keys with an empty segment, such as '/photos', cannot be read; "
                    "copy them to keys without it"
                )
            prefix = check_prefix(unquote(parts.path).lstrip("/"))
            try:
                backend = open_s3(parts.netloc, prefix, options or {})
            except UpriverError:
                raise
            except (BaseError, ValueError) as exc:
                raise ConfigError(f"cannot open store {uri!r}: {_first_line(exc)}") from None
            return cls(backend, name=name, uri=uri, secrets=secrets_of(options or {}), options=options)
        raise ConfigError(f"a store URI is file:///PATH, memory://NAME or s3://BUCKET/PREFIX, got {uri!r}")

    def __repr__(self) -> str:
        return f"Store(name={self.name!r}, uri={self.uri!r})"

    @property
    def is_far(self) -> bool:
        """Whether it is over a network."""
        return isinstance(self._backend, S3Store)

    @property
    def is_local(self) -> bool:
        """Whether its objects are files of this machine."""
        return self._root is not None

    def site(self) -> str:
        """What is the same for all stores at the end of one way: a bucket's folders, or those of a disk.

        Raises:
            OSError: If a file store's folder is no more.
        """
        if isinstance(self._backend, S3Store):
            return site_of(self._backend)
        return self.uri if self._root is None else f"device {self._root.stat().st_dev}"

    def direct(self, most: int) -> Direct | None:
        """Connections for :meth:`read_into_async`, so many at most, of the event loop that enters it.

        None for a store that is not over a network.
        """
        if not isinstance(self._backend, S3Store):
            return None
        return Direct(access_to(self._backend, self._options), most=most)

    # ------------------------------------------------------------------------------------- reading

    def get(
        self, path: str, *, etag: str | None = None, on_answer: Callable[[ObjectInfo], None] = _ignore
    ) -> bytes:
        """The whole object; with ``etag`` only if it is still that one.

        Args:
            path: The object.
            etag: Read only if the object is still that one.
            on_answer: Called with what the store says of the object, before any of it is read.

        Raises:
            ObjectNotFound: If there is no such object.
            ObjectChanged: If its ETag is another one.
            StoreError: If the store cannot be read.
            Exception: What ``on_answer`` raises; nothing is read then.
        """
        with self._errors("read", path):
            if self._root is not None:
                return self._read_file(self._root, path, etag=etag, on_answer=on_answer)
            answer = obstore.get(self._backend, self._checked(path), options=_options(etag))
            on_answer(_info(path, answer.meta))
            return answer.bytes().to_bytes()

    async def get_async(self, path: str, *, etag: str | None = None) -> bytes:
        """:meth:`get` for an event loop."""
        with self._errors("read", path):
            if self._root is not None:
                return await asyncio.to_thread(self._read_file, self._root, path, etag=etag)
            answer = await obstore.get_async(self._backend, self._checked(path), options=_options(etag))
            return (await answer.bytes_async()).to_bytes()

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Bytes [start, stop) of an object; with ``etag`` only if it is still that one.

        Raises:
            ObjectNotFound: If there is no such object.
            ObjectChanged: If its ETag is another one.
            StoreError: If the object ends before ``stop``, or the store cannot be read.
        """
        if _is_empty_range(start, stop):
            return b""
        with self._errors("read", path):
            if self._root is not None:
                data = self._read_file(self._root, path, start, stop, etag=etag)
            else:
                options = _options(etag, (start, stop))
                data = obstore.get(self._backend, self._checked(path), options=options).bytes().to_bytes()
        return self._whole(data, path, start, stop)

    async def get_range_async(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """:meth:`get_range` for an event loop."""
        if _is_empty_range(start, stop):
            return b""
        with self._errors("read", path):
            if self._root is not None:
                data = await asyncio.to_thread(self._read_file, self._root, path, start, stop, etag=etag)
            else:
                options = _options(etag, (start, stop))
                answer = await obstore.get_async(self._backend, self._checked(path), options=options)
                data = (await answer.bytes_async()).to_bytes()
        return self._whole(data, path, start, stop)

    def read_into(
        self,
        path: str,
        start: int,
        into: memoryview | Sequence[memoryview],
        *,
        etag: str | None = None,
        on_bytes: Callable[[int], None] = _ignore,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Bytes of an object from ``start`` on, put into memory as they arrive; no whole copy is made.

        Args:
            path: The object.
            start: Its first byte that is wanted.
            into: Where to, one buffer after the other until all are full; writable and contiguous.
            etag: Read only if the object is still that one.
            on_bytes: Called with 0 when the store begins to answer, and after each piece with its size.
            piece_bytes: Of each piece at least, but for the last; of a file's at most.

        Raises:
            ConfigError: If a buffer cannot be written.
            ObjectNotFound: If there is no such object.
            ObjectChanged: If its ETag is another one.
            StoreError: If the object ends too early, or the store cannot be read. Some of the memory may have
                been written then, as with all errors but the first.
            Exception: What ``on_bytes`` raises; nothing more is read then.
        """
        places = BufferSequence(into)
        for num_bytes in self._filling(path, start, places, etag, piece_bytes):
            on_bytes(num_bytes)

    async def read_into_async(
        self,
        path: str,
        start: int,
        into: memoryview | Sequence[memoryview],
        *,
        etag: str | None = None,
        on_bytes: Callable[[int], Awaitable[None]] = _ignore_async,
        piece_bytes: int = PIECE_BYTES,
        direct: Direct | None = None,
    ) -> None:
        """:meth:`read_into` for an event loop, which can break it off at any moment.

        What ``on_bytes`` waits for holds up the next piece. A file is read by the calling thread, a piece at
        a time.

        Args:
            direct: Of :meth:`direct`: what has an ``etag`` is read by its connections, once there are some,
                and what these cannot read in the usual way, which may call ``on_bytes`` with 0 once more, and
                has pieces of ``MOST_COPIED_BYTES`` where larger ones were asked for.
        """
        places = BufferSequence(into)
        async with aclosing(self._filling_async(path, start, places, etag, piece_bytes, direct)) as pieces:
            async for num_bytes in pieces:
                await on_bytes(num_bytes)

    async def read_first_async(
        self,
        path: str,
        most_bytes: int,
        *,
        on_answer: Callable[[ObjectInfo], None] = _ignore,
        piece_bytes: int = PIECE_BYTES,
    ) -> AsyncGenerator[bytes, None]:
        """An object's first bytes as they arrive, for an event loop; fewer where it has no more.

        Args:
            path: The object.
            most_bytes: That are wanted, one at least.
            on_answer: Called with what the store says of the object, before any of it is read.
            piece_bytes: Of each piece at least, but for the last.

        Raises:
            ObjectNotFound: If there is no such object.
            StoreError: If it is empty, or the store cannot be read.
        """
        with self._errors("read", path):
            if self._root is not None:
                data = self._read_file(self._root, path, 0, most_bytes, on_answer=on_answer)
                if not data:
                    raise ValueError("the object is empty")
                for at in range(0, len(data), piece_bytes):
                    yield data[at : at + piece_bytes]
                return
            options = _options(None, (0, most_bytes))
            answer = await obstore.get_async(self._backend, self._checked(path), options=options)
            on_answer(_info(path, answer.meta))
            async for piece in answer.stream(min_chunk_size=piece_bytes):
                yield piece

    def _filling(
        self, path: str, start: int, places: BufferSequence, etag: str | None, piece_bytes: int
    ) -> Iterator[int]:
        """Fill memory; gives what `read_into` tells."""
        stop = start + places.left
        if _is_empty_range(start, stop):
            return
        with self._errors("read", path):
            if self._root is not None:
                yield from self._filling_from_file(self._root, path, start, places, etag, piece_bytes)
            else:
                answer = obstore.get(
                    self._backend, self._checked(path), options=_options(etag, (start, stop))
                )
                yield 0
                for piece in answer.stream(min_chunk_size=piece_bytes):
                    places.take(piece)
                    yield len(piece)
        self._check_full(places, path, start, stop)

    async def _filling_async(
        self,
        path: str,
        start: int,
        places: BufferSequence,
        etag: str | None,
        piece_bytes: int,
        direct: Direct | None,
    ) -> AsyncGenerator[int, None]:
        stop = start + places.left
        if self._root is not None or _is_empty_range(start, stop):
            for num_bytes in self._filling(path, start, places, etag, piece_bytes):
                yield num_bytes
            return
        with self._errors("read", path):
            name = self._checked(path)
            if direct is not None and etag:
                _options(etag)
                async with aclosing(direct.filling(name, start, places, etag, piece_bytes)) as pieces:
                    async for num_bytes in pieces:
                        yield num_bytes
            if places.left:
                options = _options(etag, (stop - places.left, stop))
                answer = await obstore.get_async(self._backend, name, options=options)
                yield 0
                async for piece in answer.stream(min_chunk_size=min(piece_bytes, MOST_COPIED_BYTES)):
                    places.take(piece)
                    yield len(piece)
        self._check_full(places, path, start, stop)

    def _read_file(
        self,
        root: Path,
        path: str,
        start: int = 0,
        stop: int | None = None,
        *,
        etag: str | None = None,
        on_answer: Callable[[ObjectInfo], None] = _ignore,
    ) -> bytes:
        """Bytes [start, stop) of a file, as many as it has, while it is in the state that ``etag`` names.

        obstore would compare ETags of its own, which know nothing of the change time.
        """
        _check_process(self)
        with self._opened(root, path) as file:
            status = self._check_same(path, etag, file.fileno())
            on_answer(_file_info(path, status))
            stop = status.st_size if stop is None else min(stop, status.st_size)
            parts = []
            while start < stop and (part := os.pread(file.fileno(), stop - start, start)):
                parts.append(part)
                start += len(part)
            self._check_same(path, etag, file.fileno())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _opened(self, root: Path, path: str) -> FileIO:
        # Without O_NONBLOCK a FIFO would hold its opener until somebody writes to it.
        real = local.inside(root, check_name(path))
        file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(path)
        return FileIO(file, "rb")

    def _filling_from_file(
        self, root: Path, path: str, start: int, places: BufferSequence, etag: str | None, piece_bytes: int
    ) -> Iterator[int]:
        """Straight from the page cache: obstore would hand a file on in pieces of 8 KiB.

        A file that is written in place has another ETag from then on. It is looked at between each read and
        the word of it, so that nobody is told of bytes that are not those of the object.
        """
        with self._opened(root, path) as file:
            self._check_same(path, etag, file.fileno())
            yield 0
            file.seek(start)
            while room := places.room(piece_bytes):
                num_bytes = file.readinto(room)
                self._check_same(path, etag, file.fileno())
                if not num_bytes:
                    return
                places.filled(num_bytes)
                yield num_bytes

    def head(self, path: str) -> ObjectInfo:
        """Size and ETag of an object.

        Raises:
            ObjectNotFound: If there is no such object.
            StoreError: If the store cannot be read.
        """
        with self._errors("read", path):
            if self._root is not None:
                return self._head_file(self._root, path)
            return _info(path, obstore.head(self._backend, self._checked(path)))

    async def head_async(self, path: str) -> ObjectInfo:
        """:meth:`head` for an event loop."""
        with self._errors("read", path):
            if self._root is not None:
                return self._head_file(self._root, path)
            return _info(path, await obstore.head_async(self._backend, self._checked(path)))

    def _head_file(self, root: Path, path: str) -> ObjectInfo:
        _check_process(self)
        status = local.inside(root, check_name(path)).stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(path)
        return _file_info(path, status)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.head(path)
        except ObjectNotFound:
            return False
        return True

    async def exists_async(self, path: str) -> bool:
        """:meth:`exists` for an event loop."""
        try:
            await self.head_async(path)
        except ObjectNotFound:
            return False
        return True

    def list(
        self, prefix: str = "", *, on_unreachable: local.OnUnreachable | None = None
    ) -> Iterator[ObjectInfo]:
        """Every object under ``prefix``, a directory or one object's own name; in no promised order.

        Args:
            prefix: Where to begin; empty for all.
            on_unreachable: Called with each entry of a file store's folders that cannot be given: a symbolic
                link that leads out of the store or nowhere, a FIFO, a file without permission to read it.

        Raises:
            StoreError: If the store cannot be read; without ``on_unreachable`` also if a symbolic link leads
                out of a file store or nowhere, or there is a FIFO, socket or device.
        """
        prefix = check_prefix(prefix)
        with self._errors("list", prefix):
            if self._root is not None:
                for name, status in local.walk(self._root, prefix, on_unreachable):
                    yield _file_info(name, status)
                return
            _check_process(self)
            if not prefix:
                self._check_slashes()
            found = False
            for chunk in obstore.list(self._backend, prefix or None, chunk_size=1000):
                for meta in chunk:
                    found = True
                    yield _info(meta["path"], meta)
        if prefix and not found and self.exists(prefix):
            yield self.head(prefix)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders right below ``prefix``, without it; of a file store empty ones, too.

        Raises:
            StoreError: If the store cannot be read.
        """
        prefix = check_prefix(prefix)
        with self._errors("list", prefix):
            if self._root is not None:
                return local.folders(self._root, prefix)
            _check_process(self)
            listed = obstore.list_with_delimiter(self._backend, prefix or None)
            return [name.rpartition("/")[2] for name in listed["common_prefixes"] if name]

    def link_in(self, path: str) -> str:
        """Return the first part of a name that is a symbolic link; empty if none is."""
        return "" if self._root is None else local.link_in(self._root, path)

    def _check_slashes(self) -> None:
        """Refuse a bucket with keys that begin with a slash: obstore lists them without it.

        Raises:
            StoreError: If there are some.
        """
        if isinstance(self._backend, S3Store) and not self._backend.prefix:
            listed = obstore.list_with_delimiter(self._backend)
            if "" in listed["common_prefixes"]:
                raise StoreError(
                    f"store {self.name!r} ({self.uri}) holds keys that begin with '/'; a name here is "
                    "relative: copy them to keys without it, or name a folder beside them"
                )

    # ------------------------------------------------------------------------------------- writing

    def put(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a whole object, replacing what was there.

        Raises:
            StoreError: If it could not be written; what was there before is still there.
        """
        with self._errors("write", path):
            if self._root is not None:
                return self._put_file(self._root, path, [data])
            parts = len(data) > MULTIPART_BYTES
            obstore.put(
                self._writing(len(data)),
                self._checked(path),
                data,
                use_multipart=parts,
                chunk_size=MULTIPART_BYTES,
            )

    async def put_async(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """:meth:`put` for an event loop."""
        with self._errors("write", path):
            if self._root is not None:
                return await asyncio.to_thread(self._put_file, self._root, path, [data])
            parts = len(data) > MULTIPART_BYTES
            await obstore.put_async(
                self._writing(len(data)),
                self._checked(path),
                data,
                use_multipart=parts,
                chunk_size=MULTIPART_BYTES,
            )

    def put_stream(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """:meth:`put` of an object that never stands in memory whole; it travels in parts.

        Args:
            pieces: The object, from its first byte to its last, asked for as they are sent.

        Raises:
            StoreError: If it could not be written; what was there before is still there.
            Exception: What ``pieces`` raises; then nothing is written either.
        """
        with self._errors("write", path):
            if self._root is not None:
                return self._put_file(self._root, path, pieces)
            obstore.put(
                self._writing(STREAM_PART_BYTES),
                self._checked(path),
                iter(pieces),
                use_multipart=True,
                chunk_size=STREAM_PART_BYTES,
                max_concurrency=STREAM_PARTS,
            )

    def _put_file(self, root: Path, path: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        local.put(root, self._checked(path), pieces)

    def _writing(self, num_bytes: int) -> LocalStore | MemoryStore | S3Store:
        """By what requests are sent of which the largest has that many bytes."""
        return self._backend if num_bytes <= PATIENT_BYTES else self._patient

    @cached_property
    def _patient(self) -> LocalStore | MemoryStore | S3Store:
        return patient(self._backend, self._options) if isinstance(self._backend, S3Store) else self._backend

    def delete(self, path: str) -> None:
        """Remove an object, or what an upload to a file store left that was cut off.

        No error where a store cannot tell whether it was there.

        Raises:
            StoreError: If it could not be removed.
        """
        with self._errors("delete", path):
            name = self._checked(path)
            if self._root is not None and local.is_staged(name):  # which obstore does not touch
                local.inside(self._root, name).unlink()
            else:
                obstore.delete(self._backend, name)

    # ------------------------------------------------------------------------------------ checking

    def _checked(self, path: str) -> str:
        """What is about to be asked for, if it may be."""
        check_name(path)
        if self._root is not None:
            local.inside(self._root, path)
        _check_process(self)
        return path

    def _whole(self, data: bytes, path: str, start: int, stop: int) -> bytes:
        if len(data) != stop - start:
            raise self._ended_early(path, start, stop, len(data))
        return data

    def _check_full(self, places: BufferSequence, path: str, start: int, stop: int) -> None:
        if places.left:
            raise self._ended_early(path, start, stop, stop - start - places.left)

    def _check_same(self, path: str, etag: str | None, file: int) -> os.stat_result:
        status = os.fstat(file)
        if etag is not None and not local.is_same(status, etag):
            raise self._changed(path)
        return status

    def _ended_early(self, path: str, start: int, stop: int, got: int) -> StoreError:
        return StoreError(
            f"object {path!r} in store {self.name!r} ended early: bytes {start} to {stop} asked for, "
            f"{got} got"
        )

    def _changed(self, path: str) -> ObjectChanged:
        return ObjectChanged(
            f"object {path!r} in store {self.name!r} is no longer the one that was indexed; index again"
        )

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Turn what obstore raises into our errors, which name object and store and repeat no credentials."""
        try:
            yield
        except UpriverError:
            raise
        except (BaseError, OSError, ValueError) as exc:
            raise self._typed(exc, verb, path) from None

    def _typed(self, exc: Exception, verb: str, path: str) -> StoreError:
        """What an error of obstore's is among ours.

        A body that breaks off is asked for again from there on, and obstore tells what the store says to that
        as a general error: its kind is then in the text alone.
        """
        over_http = isinstance(self._backend, S3Store)
        status, code = _said(exc) if over_http else ("", "")
        if isinstance(exc, PreconditionError) or status == "412":
            return self._changed(path)
        what = f"cannot {verb} {path!r} in store {self.name!r} ({self.uri})"
        if over_http and _NO_CREDENTIALS.search(_first_line(exc)):
            return StoreError(
                f"{what}: there are no credentials, and the machine has none of its own; give the options "
                "access_key_id and secret_access_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "anonymous=true"
            )
        if code == "NoSuchBucket":
            return StoreError(f"{what}: there is no such bucket, or not for these credentials")
        if verb != "write" and (isinstance(exc, FileNotFoundError) or status == "404"):
            return ObjectNotFound(f"no object {path!r} in store {self.name!r} ({self.uri})")
        if over_http and (isinstance(exc, _REFUSED) or status in ("401", "403")):
            # Stores repeat what was signed, the access key included: of their answer only its code is told.
            return AccessDenied(f"{what}: the store refuses these credentials{f' ({code})' if code else ''}")
        is_full = verb == "write" and (status == "507" or code in _FULL or bool(_NO_SPACE.search(str(exc))))
        reason = (isinstance(exc, OSError) and exc.strerror) or _first_line(exc)
        if is_full and over_http:
            reason = f"the store has no room left{f' ({code})' if code else ''}"
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        return (StorageFull if is_full else StoreError)(f"{what}: {reason}")


def _check_process(store: Store) -> None:
    """In a fork of a process that has used stores, a request may wait for threads that are not there.

    Raises:
        StoreError: If this is one.
    """
    global _asked_in
    if _asked_in is None:
        _asked_in = os.getpid()
    if _asked_in != os.getpid():
        raise StoreError(
            f"store {store.name!r} ({store.uri}) cannot be used in this process: it was forked from one that "
            "has used stores, whose threads it does not have; start processes by spawn or forkserver, or "
            "fork before the first use"
        )


def _file_root(uri: str) -> Path:
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise ConfigError(f"a file store is file:///ABSOLUTE/PATH, got {uri!r}")
    root = Path(path).resolve()
    if not root.is_dir():
        raise StoreError(f"the directory of store {uri!r} does not exist")
    return root


def _memory_store(uri: str) -> MemoryStore:
    with _memory_lock:
        return _memory.setdefault(uri, MemoryStore())


def _is_empty_range(start: int, stop: int) -> bool:
    if not 0 <= start <= stop:
        raise ConfigError(f"a byte range is 0 <= start <= stop, got {start} to {stop}")
    return start == stop


def _options(etag: str | None, byte_range: tuple[int, int] | None = None) -> Any:
    options: dict[str, Any] = {}
    if etag is not None:
        if not (etag.isascii() and etag.isprintable()):  # obstore would end in a panic
            raise StoreError(f"no object has the ETag {etag[:80]!r}")
        options["if_match"] = etag
    if byte_range is not None:
        options["range"] = byte_range
    return options


def _info(path: str, meta: Mapping[str, Any]) -> ObjectInfo:
    etag = meta["e_tag"] or ""
    if etag and not etag.startswith(('"', "W/")):
        etag = f'"{etag}"'  # some servers leave the quotes out of listings, yet want them in If-Match
    modified_s = meta["last_modified"].timestamp()
    return ObjectInfo(path=path, size=meta["size"], etag=etag, modified_s=modified_s)


def _file_info(path: str, status: os.stat_result) -> ObjectInfo:
    etag = local.etag_of(status)
    return ObjectInfo(path=path, size=status.st_size, etag=etag, modified_s=status.st_mtime)


def _said(exc: BaseException) -> tuple[str, str]:
    """Status and code of a store's answer, as far as an error's text has them."""
    status, code = _HTTP_STATUS.search(str(exc)), _S3_CODE.search(str(exc))
    return status[1] if status else "", code[1] if code else ""


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().split("\n", 1)[0][:300]
