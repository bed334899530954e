"""Provide one small interface over file, memory and S3-compatible stores."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import stat
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Self
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
from upriver.store.buffers import PIECE_BYTES, BufferSequence
from upriver.store.direct import Direct
from upriver.store.names import check_name, check_prefix, store_uri
from upriver.store.observer import OnBytes, ReadObserver
from upriver.store.s3 import access_to, open_s3, patient, secrets_of, site_of

MULTIPART_BYTES = 64 * 2**20
"""Largest object that travels in one request, as AWS advises below 100 MB. Larger ones travel in parts of
this size."""

STREAM_PART_BYTES = 64 * 2**20
"""Part size of an object that is written while it is made. The 10,000 parts that S3 allows then hold 640 GB.
Swift takes an MD5 of a read from the beginning of a part on, and two of a part that is read whole. So parts
should be much larger than a single read."""

STREAM_PARTS = 2
"""Most parts in flight, and so in memory, at once."""

PATIENT_BYTES = 2**20
"""Largest request with the usual timeout. A larger one may take as long as a whole attempt. A smaller one is
given up sooner if the store stops responding."""

MOST_COPIED_BYTES = 512 * 1024
"""Largest piece that obstore passes on at once. Its threads allocate the pieces, and glibc keeps for each
thread the memory that was freed there."""

OBSERVED_BYTES = 64 * 1024
"""Fewest bytes of a piece in which an observed object is read whole. So parallel reads over a slow link are
seen to progress together."""

_REFUSED = (PermissionDeniedError, UnauthenticatedError)
_HTTP_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
_S3_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_CREDENTIALS = re.compile(
    r"performing (PUT|GET) http://[^/ ]+/latest/(api/token|meta-data/iam/security-credentials)\b"
)
"""A request that did not go to the store: without credentials obstore asks the cloud for them."""

_NO_SPACE = re.compile(r"\(os error (?:28|122)\)|No space left on device|Disk quota exceeded")
_FULL = ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded")
"""Codes of full stores: of Swift, Ceph and MinIO."""

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()

_asked_in: int | None = None
"""Process of the first request through obstore. It has obstore's threads, and its forks have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """Description of an object by its store.

    Attributes:
        path: Name of the object, relative to the store.
        size: Size in bytes.
        etag: Tag that changes whenever the object does; empty if the store has none.
        modified_s: Time of the last write by the store's clock, in seconds since 1970.
    """

    path: str
    size: int
    etag: str
    modified_s: float


def _ignore(_: object) -> None:
    """Ignore progress."""


async def _ignore_async(num_bytes: int) -> None:
    """Ignore progress, in an event loop."""


class Store:
    """Objects by name, in one store that the operator configured.

    Every name is relative and checked. Every error names the object and the store. A put is atomic:
    afterwards the object is either new as a whole or unchanged.

    Attributes:
        name: Name of the store for clients and servers.
        uri: Location on this side, without credentials.
        observer: Sees each read; None if there is none.
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
        self.observer: ReadObserver | None = None

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        name: str = "default",
        options: Mapping[str, str] | None = None,
    ) -> Store:
        """Open ``file:///absolute/path``, ``memory://name``, ``s3://bucket/prefix`` or a local folder.

        Memory stores of one URI share their content within a process.

        Args:
            uri: URI, or the path of a folder: ``./photos`` is ``file://`` and its absolute path.
            options: For S3 only, see :func:`upriver.store.s3.open_s3`.

        Raises:
            ConfigError: If the URI or an option is invalid.
            StoreError: If a file store's folder does not exist.
        """
        uri = store_uri(uri)
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
        raise ConfigError(
            f"a store is file:///PATH, memory://NAME, s3://BUCKET/PREFIX or a folder's path, got {uri!r}"
        )

    def observed_by(self, observer: ReadObserver) -> Self:
        """Return the same store, with an observer of its reads."""
        observed = copy.copy(self)
        observed.observer = observer
        return observed

    def __repr__(self) -> str:
        return f"Store(name={self.name!r}, uri={self.uri!r})"

    @property
    def options(self) -> Mapping[str, str]:
        """The options that :meth:`open` received. They may hold credentials."""
        return dict(self._options)

    @property
    def is_shared(self) -> bool:
        """True if another process can open it: it does not lie in this process's memory."""
        return not isinstance(self._backend, MemoryStore)

    @property
    def is_far(self) -> bool:
        """True if the store is reached over a network."""
        return isinstance(self._backend, S3Store)

    @property
    def is_local(self) -> bool:
        """True if its objects are local files."""
        return self._root is not None

    def site(self) -> str:
        """Return a name that stores behind the same link share: those of one bucket, or of one disk.

        Raises:
            OSError: If a file store's folder does not exist any more.
        """
        if isinstance(self._backend, S3Store):
            return site_of(self._backend)
        return self.uri if self._root is None else f"device {self._root.stat().st_dev}"

    def direct(self, most: int) -> Direct | None:
        """Return connections for :meth:`read_into_async`, at most `most`, for one event loop.

        Return None for a store that is not reached over a network.
        """
        if not isinstance(self._backend, S3Store):
            return None
        return Direct(access_to(self._backend, self._options), most=most)

    # ------------------------------------------------------------------------------------- reading

    def get(
        self, path: str, *, etag: str | None = None, on_answer: Callable[[ObjectInfo], None] = _ignore
    ) -> bytes:
        """Read a whole object.

        Args:
            etag: If given, read only an object with this ETag.
            on_answer: Function to call with the object's description before the read.

        Raises:
            ObjectNotFound: If no such object exists.
            ObjectChanged: If it has another ETag.
            StoreError: If the store cannot be read.
            Exception: An error of ``on_answer``; nothing is read then.
        """
        with self._reading(path) as came, self._errors("read", path):
            return self._read(path, etag, came, on_answer=on_answer)

    async def get_async(self, path: str, *, etag: str | None = None) -> bytes:
        """Run :meth:`get` in an event loop."""
        with self._reading(path) as came, self._errors("read", path):
            return await self._read_async(path, etag, came)

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Read bytes [start, stop) of an object; with ``etag`` only if the object has it.

        Raises:
            ObjectNotFound: If no such object exists.
            ObjectChanged: If it has another ETag.
            StoreError: If the object ends before ``stop``, or the store cannot be read.
        """
        if _is_empty_range(start, stop):
            return b""
        with self._reading(path, start, stop) as came, self._errors("read", path):
            return self._whole(self._read(path, etag, came, (start, stop)), path, start, stop)

    async def get_range_async(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Run :meth:`get_range` in an event loop."""
        if _is_empty_range(start, stop):
            return b""
        with self._reading(path, start, stop) as came, self._errors("read", path):
            return self._whole(await self._read_async(path, etag, came, (start, stop)), path, start, stop)

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
        """Read an object from ``start`` on into memory, piece by piece and without a copy of the whole.

        Args:
            into: Buffers to fill one after the other; writable and contiguous.
            etag: If given, read only an object with this ETag.
            on_bytes: Function to call with 0 when the response begins, and with the size of each written
                piece.
            piece_bytes: Fewest bytes of a piece, except the last; for a file the most.

        Raises:
            ConfigError: If a buffer cannot be written.
            ObjectNotFound: If no such object exists.
            ObjectChanged: If it has another ETag.
            StoreError: If the object ends too early, or the store cannot be read. As with all errors but the
                first, some memory may have been written.
            Exception: An error of ``on_bytes``; nothing more is read then.
        """
        places = BufferSequence(into)
        with self._reading(path, start, start + places.left) as came:
            for num_bytes in self._filling(path, start, places, etag, self._piece_bytes(piece_bytes)):
                if came is not None:
                    came(num_bytes)
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
        """Run :meth:`read_into` in an event loop, which can cancel it at any moment.

        The next piece waits for ``on_bytes``. The calling thread reads a file, one piece at a time.

        Args:
            direct: Connections from :meth:`direct`. Once open, they read objects with an ``etag``. Other
                reads, and those that fail there, go through obstore. That may call ``on_bytes`` with 0 once
                more, and cuts larger pieces to ``MOST_COPIED_BYTES``.
        """
        places = BufferSequence(into)
        piece_bytes = self._piece_bytes(piece_bytes)
        filling = self._filling_async(path, start, places, etag, piece_bytes, direct)
        with self._reading(path, start, start + places.left) as came:
            async with aclosing(filling) as pieces:
                async for num_bytes in pieces:
                    if came is not None:
                        await asyncio.to_thread(came, num_bytes)
                    await on_bytes(num_bytes)

    async def read_first_async(
        self,
        path: str,
        most_bytes: int,
        *,
        on_answer: Callable[[ObjectInfo], None] = _ignore,
        piece_bytes: int = PIECE_BYTES,
    ) -> AsyncGenerator[bytes, None]:
        """Yield an object's first bytes as they arrive, in an event loop; fewer if the object ends.

        Args:
            most_bytes: Number of wanted bytes, at least 1.
            on_answer: Function to call with the object's description before the read.
            piece_bytes: Fewest bytes of a piece, except the last.

        Raises:
            ObjectNotFound: If no such object exists.
            StoreError: If the object is empty, or the store cannot be read.
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

    def _reading(
        self, path: str, start: int | None = None, stop: int | None = None
    ) -> AbstractContextManager[OnBytes | None]:
        """Surround a read, so that the observer sees it."""
        return nullcontext() if self.observer is None else self.observer.reading(self, path, start, stop)

    def _piece_bytes(self, piece_bytes: int) -> int:
        return piece_bytes if self.observer is None else min(piece_bytes, self.observer.piece_bytes)

    def _read(
        self,
        path: str,
        etag: str | None,
        came: OnBytes | None,
        byte_range: tuple[int, int] | None = None,
        *,
        on_answer: Callable[[ObjectInfo], None] = _ignore,
    ) -> bytes:
        """Return an object's bytes, and tell ``came`` as they come."""
        tell = came or _ignore
        if self._root is not None:
            tell(0)
            data = self._read_file(self._root, path, *(byte_range or ()), etag=etag, on_answer=on_answer)
            tell(len(data))
            return data
        answer = obstore.get(self._backend, self._checked(path), options=_options(etag, byte_range))
        tell(0)
        on_answer(_info(path, answer.meta))
        if came is None:
            return answer.bytes().to_bytes()
        pieces = []
        for piece in answer.stream(min_chunk_size=OBSERVED_BYTES):
            tell(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    async def _read_async(
        self,
        path: str,
        etag: str | None,
        came: OnBytes | None,
        byte_range: tuple[int, int] | None = None,
    ) -> bytes:
        if self._root is not None:
            return await asyncio.to_thread(self._read, path, etag, came, byte_range)
        options = _options(etag, byte_range)
        answer = await obstore.get_async(self._backend, self._checked(path), options=options)
        if came is None:
            return (await answer.bytes_async()).to_bytes()
        await asyncio.to_thread(came, 0)
        data = (await answer.bytes_async()).to_bytes()
        await asyncio.to_thread(came, len(data))
        return data

    def _filling(
        self, path: str, start: int, places: BufferSequence, etag: str | None, piece_bytes: int
    ) -> Iterator[int]:
        """Fill memory, and yield the numbers for `on_bytes` of `read_into`."""
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
        """Return bytes [start, stop) of a file that is in the state of ``etag``; fewer if the file ends.

        obstore would compare ETags of its own, without the change time.
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
        # Without O_NONBLOCK a FIFO would block its opener until another process writes to it.
        real = local.inside(root, check_name(path))
        file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(path)
        return FileIO(file, "rb")

    def _filling_from_file(
        self, root: Path, path: str, start: int, places: BufferSequence, etag: str | None, piece_bytes: int
    ) -> Iterator[int]:
        """Read a file from the page cache: obstore would pass it on in pieces of 8 KiB.

        A file that is written in place has another ETag afterwards. The ETag is checked after each read and
        before the bytes are reported, so reported bytes are always those of the object.
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
        """Return the description of an object.

        Raises:
            ObjectNotFound: If no such object exists.
            StoreError: If the store cannot be read.
        """
        with self._errors("read", path):
            if self._root is not None:
                return self._head_file(self._root, path)
            return _info(path, obstore.head(self._backend, self._checked(path)))

    async def head_async(self, path: str) -> ObjectInfo:
        """Run :meth:`head` in an event loop."""
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
        """Return True if the object exists."""
        try:
            self.head(path)
        except ObjectNotFound:
            return False
        return True

    async def exists_async(self, path: str) -> bool:
        """Run :meth:`exists` in an event loop."""
        try:
            await self.head_async(path)
        except ObjectNotFound:
            return False
        return True

    def list(
        self, prefix: str = "", *, on_unreachable: local.OnUnreachable | None = None
    ) -> Iterator[ObjectInfo]:
        """List every object under ``prefix``, a folder or one object's name, in no promised order.

        Args:
            prefix: Start of the listing; empty for all.
            on_unreachable: Function to call with each entry of a file store that cannot be listed: a symbolic
                link that leads out of the store or nowhere, a FIFO, a file without read permission.

        Raises:
            StoreError: If the store cannot be read. Without ``on_unreachable`` also if a symbolic link leads
                out of a file store or nowhere, or a FIFO, socket or device exists.
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
        """Return the names of the folders right below ``prefix``; in a file store also empty folders.

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
        """Check that a bucket has no keys that begin with a slash: obstore lists them without it.

        Raises:
            StoreError: If such keys exist.
        """
        if isinstance(self._backend, S3Store) and not self._backend.prefix:
            listed = obstore.list_with_delimiter(self._backend)
            if "" in listed["common_prefixes"]:
                raise StoreError(
                    f"store {self.name!r} ({self.uri}) holds keys that begin with '/'; a name here is "
                    "relative: copy them to keys without it, or name a folder beside them"
                )

    # ------------------------------------------------------------------------------------- writing

    def put(self, path: str, data: bytes | bytearray | memoryview, *, private: bool = False) -> None:
        """Write a whole object and replace an existing one.

        Args:
            private: If true, a file store lets only the owner access the file, and folders made for it. Other
                stores ignore it.

        Raises:
            StoreError: If the write fails; an existing object is unchanged.
        """
        with self._errors("write", path):
            if self._root is not None:
                return self._put_file(self._root, path, [data], private=private)
            obstore.put(self._writing(len(data)), self._checked(path), data, **_in_parts(data))

    async def put_async(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Run :meth:`put` in an event loop."""
        with self._errors("write", path):
            if self._root is not None:
                return await asyncio.to_thread(self._put_file, self._root, path, [data])
            await obstore.put_async(self._writing(len(data)), self._checked(path), data, **_in_parts(data))

    def put_stream(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write an object that is never whole in memory; it travels in parts.

        Args:
            pieces: Content from the first byte to the last; the store consumes it while it sends.

        Raises:
            StoreError: If the write fails; an existing object is unchanged.
            Exception: An error of ``pieces``; nothing is written then.
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

    def _put_file(
        self,
        root: Path,
        path: str,
        pieces: Iterable[bytes | bytearray | memoryview],
        *,
        private: bool = False,
    ) -> None:
        local.put(root, self._checked(path), pieces, private=private)

    def _writing(self, num_bytes: int) -> LocalStore | MemoryStore | S3Store:
        """Return the backend for requests of at most that many bytes."""
        return self._backend if num_bytes <= PATIENT_BYTES else self._patient

    @cached_property
    def _patient(self) -> LocalStore | MemoryStore | S3Store:
        return patient(self._backend, self._options) if isinstance(self._backend, S3Store) else self._backend

    def delete(self, path: str) -> None:
        """Remove an object, or the file of an interrupted upload in a file store.

        A store that cannot tell whether the object existed raises no error.

        Raises:
            StoreError: If it could not be removed.
        """
        with self._errors("delete", path):
            name = self._checked(path)
            if self._root is not None and local.is_staged(name):  # obstore does not touch these
                local.inside(self._root, name).unlink()
            else:
                obstore.delete(self._backend, name)

    # ------------------------------------------------------------------------------------ checking

    def _checked(self, path: str) -> str:
        """Return the name of an object after all checks."""
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
            f"object {path!r} in store {self.name!r} is no longer the one that was indexed or looked up; "
            "if it is a sample, index again, else try again"
        )

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Convert errors of obstore to ours, which name object and store and repeat no credentials."""
        try:
            yield
        except UpriverError:
            raise
        except (BaseError, OSError, ValueError) as exc:
            raise self._typed(exc, verb, path) from None

    def _typed(self, exc: Exception, verb: str, path: str) -> StoreError:
        """Return our error for an error of obstore.

        obstore resumes a body that breaks off. It reports the store's response to that as a general error,
        whose kind is only in the text.
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
            # Stores repeat the signed text, including the access key, so only the code of their response is
            # shown.
            return AccessDenied(f"{what}: the store refuses these credentials{f' ({code})' if code else ''}")
        is_full = verb == "write" and (status == "507" or code in _FULL or bool(_NO_SPACE.search(str(exc))))
        reason = (isinstance(exc, OSError) and exc.strerror) or _first_line(exc)
        if is_full and over_http:
            reason = f"the store has no room left{f' ({code})' if code else ''}"
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        return (StorageFull if is_full else StoreError)(f"{what}: {reason}")


def _check_process(store: Store) -> None:
    """Check that this process is no fork of one that has used stores: its threads are missing here.

    Raises:
        StoreError: If it is such a fork.
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
    try:
        root = Path(path).resolve()
    except ValueError as error:  # a zero byte
        raise ConfigError(f"no directory has the name of store {uri!r}: {error}") from None
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise StoreError(f"the directory {str(root)!r} of store {uri!r} {problem}")
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
        if not (etag.isascii() and etag.isprintable()):  # obstore would panic
            raise StoreError(f"no object has the ETag {etag[:80]!r}")
        options["if_match"] = etag
    if byte_range is not None:
        options["range"] = byte_range
    return options


def _in_parts(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    return {"use_multipart": len(data) > MULTIPART_BYTES, "chunk_size": MULTIPART_BYTES}


def _info(path: str, meta: Mapping[str, Any]) -> ObjectInfo:
    etag = meta["e_tag"] or ""
    if etag and not etag.startswith(('"', "W/")):
        etag = f'"{etag}"'  # some servers omit the quotes in listings, yet want them in If-Match
    modified_s = meta["last_modified"].timestamp()
    return ObjectInfo(path=path, size=meta["size"], etag=etag, modified_s=modified_s)


def _file_info(path: str, status: os.stat_result) -> ObjectInfo:
    etag = local.etag_of(status)
    return ObjectInfo(path=path, size=status.st_size, etag=etag, modified_s=status.st_mtime)


def _said(exc: BaseException) -> tuple[str, str]:
    """Return status and code of a store's response, if the error's text has them."""
    status, code = _HTTP_STATUS.search(str(exc)), _S3_CODE.search(str(exc))
    return status[1] if status else "", code[1] if code else ""


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().split("\n", 1)[0][:300]
