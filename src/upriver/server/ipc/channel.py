"""Send messages and file descriptors over a blocking Unix socket between the front and one worker."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Union

import msgspec

from upriver._threads.forks import reset_in_child
from upriver.errors import TooLarge

_HEAD = struct.Struct(">II")
MAX_MESSAGE_BYTES = 16 << 20
"""Most bytes of a message. Messages hold names and numbers; large data lies in shared memory."""
MAX_FDS = 4
READ_BYTES = 128 << 10
"""Bytes received at once: enough for all messages except those with the names of thousands of samples."""

_M = TypeVar("_M")


class ChannelClosed(ConnectionError):
    """Signal that the other process is gone, or sent an invalid message, which counts as gone."""


class Channel(Generic[_M]):
    """One end of the connection: send anything that msgspec can encode, receive ``kind``.

    Args:
        sock: A connected Unix stream socket; closed with the channel.
        kind: Base class of the messages from the other side.
    """

    def __init__(self, sock: socket.socket, kind: type[_M]) -> None:
        self._socket = sock
        accepted: Any = Union[tuple(kind.__subclasses__())]  # noqa: UP007
        self._decoder: msgspec.msgpack.Decoder[_M] = msgspec.msgpack.Decoder(accepted)
        self._came = bytearray()
        self._came_fds: list[int] = []

    def set_timeout(self, seconds: float | None) -> None:
        """Set the seconds that one message may take from now on; later it raises TimeoutError."""
        self._socket.settimeout(seconds)

    def stay_apart(self) -> None:
        """Close this end in processes that this one starts: they may outlive it, and would keep it open."""
        self._socket.set_inheritable(False)
        reset_in_child(self)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors that the other side gets copies of.

        Raises:
            TooLarge: If it is longer than any message may be. Nothing was sent then, and the channel is
                unchanged.
            ChannelClosed: If the other process is gone.
        """
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message to or from a worker has at most {MAX_MESSAGE_BYTES} bytes, got {len(body)}"
            )
        whole = _HEAD.pack(len(body), len(fds)) + body
        try:
            sent = socket.send_fds(self._socket, [whole], list(fds)) if fds else 0
            if sent < len(whole):
                self._socket.sendall(memoryview(whole)[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[_M, list[int]]:
        """Return the next message and its descriptors, which the caller closes.

        Raises:
            ChannelClosed: If the other process is gone, or sent an invalid message.
        """
        while (end := self._end_of_first()) is None:
            self._receive_more()
        _, num_fds = _HEAD.unpack_from(self._came)
        body, fds = self._came[_HEAD.size : end], self._came_fds[:num_fds]
        del self._came[:end], self._came_fds[: len(fds)]
        try:
            if self._came_fds and not self._came:
                raise ChannelClosed("descriptors that came with no message")
            return self._decoder.decode(body), fds
        except msgspec.MsgspecError as error:
            _close_all(fds)
            raise ChannelClosed(f"a message of unknown form: {error}") from None
        except BaseException:
            _close_all(fds)
            raise

    def has_news(self) -> bool:
        """Return whether the other process sent bytes that are not received yet, or is gone."""
        looked = select.poll()
        looked.register(self._socket, select.POLLIN)
        return bool(self._came or looked.poll(0))

    def close(self) -> None:
        """Close this end; the other one sees the end of the stream."""
        self._socket.close()
        _close_all(self._came_fds)
        self._came_fds.clear()

    forked = close

    def _end_of_first(self) -> int | None:
        """Return the end of the first message; None if it is not complete."""
        if len(self._came) < _HEAD.size:
            return None
        nbytes, num_fds = _HEAD.unpack_from(self._came)
        if nbytes > MAX_MESSAGE_BYTES or num_fds > len(self._came_fds):
            raise ChannelClosed(
                f"a message of {nbytes} bytes with {len(self._came_fds)} of {num_fds} descriptors"
            )
        end = int(_HEAD.size + nbytes)
        return end if len(self._came) >= end else None

    def _receive_more(self) -> None:
        """Receive the available bytes, which may be several messages; the kernel stops behind descriptors."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, READ_BYTES, MAX_FDS, flags=socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from None
        self._came += data
        self._came_fds += fds
        if not data:
            raise ChannelClosed("the other process is gone")
        if len(self._came_fds) > 2 * MAX_FDS:  # of a message that is not complete, and of the next one
            raise ChannelClosed("descriptors that came with no message")


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
