"""Shared memory between front and worker: never handed out while somebody still looks at it."""

import gc
import mmap
import os

import pytest

from upriver.server.memory import FREE_SLOTS, SealedFile, SlotPool, map_privately, map_shared


def test_a_lent_slot_comes_back_with_its_last_view():
    pool = SlotPool()
    slot = pool.take(1000)
    view = pool.lend(slot, 1000)
    piece = view[10:20]
    del view
    gc.collect()
    assert pool.take(1000) is not slot
    del piece
    assert pool.take(1000) is slot


def test_a_slot_that_fits_is_used_again_and_one_far_too_large_is_not():
    pool = SlotPool()
    small, large = pool.take(1), pool.take(50 << 20)
    pool.give_back(small)
    pool.give_back(large)
    assert pool.take(60_000) is small
    assert pool.take(40 << 20) is large


def test_free_slots_are_few_and_dropped_ones_are_told_once():
    pool = SlotPool()
    slots = [pool.take(1 << 20) for _ in range(7)]
    for slot in slots:
        pool.give_back(slot)
    assert pool.take(4 << 20) not in slots
    assert pool.dropped() == [slot.id for slot in slots[:3]]
    assert [pool.take(1 << 20) for _ in range(4)] == slots[3:]
    assert pool.take(1 << 20) not in slots
    assert pool.dropped() == []


def test_only_so_many_free_slots_keep_their_memory():
    pool = SlotPool()
    slots = [pool.take(1 << 20) for _ in range(FREE_SLOTS + 3)]
    for slot in slots:
        slot.array(slot.nbytes)[:] = 1
    for slot in slots:
        pool.give_back(slot)
    assert sum(os.fstat(slot.fd).st_blocks for slot in slots) * 512 == FREE_SLOTS << 20


def test_both_sides_see_the_same_bytes_and_neither_can_shrink_them():
    slot = SlotPool().take(100)
    theirs = map_shared(slot.fd, slot.nbytes)
    theirs[:5] = [1, 2, 3, 4, 5]
    assert slot.array(5).tolist() == [1, 2, 3, 4, 5]
    for nbytes in (0, slot.nbytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, nbytes)


def test_a_sealed_file_cannot_be_changed_by_anyone():
    file = SealedFile()
    file.append(b"weights")
    file.append(memoryview(b" and more"))
    file.seal()
    with pytest.raises(PermissionError):
        os.write(file.fd, b"x")
    with pytest.raises(PermissionError):
        mmap.mmap(file.fd, file.nbytes)
    view = map_privately(file.fd, file.nbytes)
    view[0] = 0
    assert bytes(file.view()) == b"weights and more"
    assert bytes(map_privately(file.fd, 0)) == b""


def test_descriptors_are_closed_with_their_owner():
    before = set(os.listdir("/proc/self/fd"))
    file, slot = SealedFile(), SlotPool().take(1)
    assert set(os.listdir("/proc/self/fd")) - before
    del file, slot
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # another test's thread may close one
