"""Messages and file descriptors over a Unix socket, blocking, between the front and one worker."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from upriver.errors import TooLarge

_HEAD = struct.Struct(">II")
MAX_MESSAGE_BYTES = 16 << 20
"""Messages hold names and numbers; what is large lies in shared memory."""
MAX_FDS = 4

_M = TypeVar("_M")


class ChannelClosed(ConnectionError):
    """The other process is gone, or talks nonsense, which is as good as gone."""


class Channel(Generic[_M]):
    """One end: sends anything that msgspec can encode, receives ``kind``.

    Args:
        sock: A connected Unix stream socket; closed with the channel.
        kind: What the other side may say.
    """

    def __init__(self, sock: socket.socket, kind: type[_M]) -> None:
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(kind)

    def set_timeout(self, seconds: float | None) -> None:
        """How long one message may take from here on; TimeoutError then."""
        self._socket.settimeout(seconds)

    def stay_apart(self) -> None:
        """Keep this end from processes that this one starts: they may outlive it, and keep it open."""
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=self.close)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors that the other side gets copies of.

        Raises:
            TooLarge: If it is longer than any may be; nothing was sent then, and the channel is as it was.
            ChannelClosed: If the other process is gone.
        """
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message to or from a worker has at most {MAX_MESSAGE_BYTES} bytes, got {len(body)}"
            )
        try:
            socket.send_fds(self._socket, [_HEAD.pack(len(body), len(fds))], list(fds))
            self._socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[_M, list[int]]:
        """The next message and its descriptors, which the caller closes.

        Raises:
            ChannelClosed: If the other process is gone, or talks nonsense.
        """
        head, fds = self._receive_head()
        try:
            nbytes, num_fds = _HEAD.unpack(head)
            if nbytes > MAX_MESSAGE_BYTES or num_fds != len(fds):
                raise ChannelClosed(f"a message of {nbytes} bytes with {len(fds)} of {num_fds} descriptors")
            return self._decoder.decode(self._exactly(nbytes)), fds
        except msgspec.MsgspecError as error:
            _close_all(fds)
            raise ChannelClosed(f"a message of unknown form: {error}") from None
        except BaseException:
            _close_all(fds)
            raise

    def has_news(self) -> bool:
        """Whether the other process has said something that was not received yet, or is gone."""
        looked = select.poll()
        looked.register(self._socket, select.POLLIN)
        return bool(looked.poll(0))

    def close(self) -> None:
        """Close this end; the other one sees the end of the stream."""
        self._socket.close()

    def _receive_head(self) -> tuple[bytes, list[int]]:
        try:
            head, fds, _, _ = socket.recv_fds(
                self._socket, _HEAD.size, MAX_FDS, flags=socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from None
        try:
            if not head:
                raise ChannelClosed("the other process is gone")
            return head + self._exactly(_HEAD.size - len(head)), fds
        except BaseException:
            _close_all(fds)
            raise

    def _exactly(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        view, done = memoryview(buffer), 0
        while done < nbytes:
            try:
                got = self._socket.recv_into(view[done:])
            except ConnectionResetError as error:
                raise ChannelClosed(str(error)) from None
            if not got:
                raise ChannelClosed("the other process is gone")
            done += got
        return bytes(buffer)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
