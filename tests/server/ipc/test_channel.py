"""Check that messages between front and worker arrive one by one, however they were sent."""

import os
import socket
import struct
from contextlib import suppress

import pytest

from upriver.server.ipc.channel import MAX_FDS, Channel, ChannelClosed
from upriver.server.ipc.messages import Forget, FromFront, LoadProgram, MapSlot


@pytest.fixture
def ends():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(one, FromFront), Channel(other, FromFront)
    for channel in channels:
        channel.set_timeout(60)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def files(tmp_path):
    found = [os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in range(MAX_FDS + 1)]
    yield found
    for fd in found:
        os.close(fd)


def is_same(fd, other):
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(other))
    finally:
        os.close(fd)


def test_messages_that_wait_come_one_by_one_each_with_its_own_descriptors(ends, files):
    sender, receiver = ends
    load = LoadProgram(key="a", digest="d", graph_nbytes=1, weights_nbytes=2)
    sent = [
        (Forget(slots=(1,)), []),
        (MapSlot(slot=2, nbytes=3), files[:1]),
        (Forget(slots=(4,)), []),
        (load, files[1:3]),
        (Forget(slots=tuple(range(1000))), []),
        (MapSlot(slot=5, nbytes=6), files[3:4]),
    ]
    for message, fds in sent:
        sender.send(message, fds)
    for message, fds in sent:
        got, got_fds = receiver.receive()
        assert got == message
        assert len(got_fds) == len(fds)
        assert all(is_same(fd, other) for fd, other in zip(got_fds, fds, strict=True))
    assert not receiver.has_news()


def test_a_message_that_waits_behind_another_is_news(ends):
    sender, receiver = ends
    for slot in (1, 2):
        sender.send(Forget(slots=(slot,)))
    receiver.receive()
    assert receiver.has_news()
    assert receiver.receive()[0] == Forget(slots=(2,))


@pytest.mark.parametrize("said", [0, 2], ids=["none said", "more said"])
def test_descriptors_that_a_message_does_not_have_are_the_end(ends, files, said):
    sender, receiver = ends
    body = b"\x82\xa4type\xa6Forget\xa5slots\x90"
    socket.send_fds(sender._socket, [struct.pack(">II", len(body), said) + body], files[:1])
    with pytest.raises(ChannelClosed, match="descriptors"):
        receiver.receive()


def test_descriptors_that_come_without_end_are_not_kept(ends, files):
    sender, receiver = ends
    before = len(os.listdir("/proc/self/fd"))
    with suppress(OSError):
        socket.send_fds(sender._socket, [struct.pack(">II", 100, 1)], files[:MAX_FDS])
        for _ in range(8):
            socket.send_fds(sender._socket, [b"x"], files[:MAX_FDS])
    with pytest.raises(ChannelClosed, match="no message"):
        receiver.receive()
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) <= before
