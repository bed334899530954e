"""Check that shared memory between front and worker is never reused while a reader still holds it."""

import gc
import mmap
import os

import pytest
import torch

from tests.server.running import wait_for
from upriver.protocol import lay_out
from upriver.server.ipc.shared_memory import (
    FREE_SLOTS,
    KEPT_BYTES,
    SealedFile,
    SlotPool,
    map_privately,
    map_shared,
)


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


def kept_bytes(*slots):
    return sum(os.fstat(slot.fd).st_blocks for slot in slots) * 512


def filled(slot, value=1):
    slot.array(slot.nbytes)[:] = value
    return slot


def test_large_slots_keep_their_memory_as_far_as_it_is_counted():
    pool = SlotPool()
    slots = [filled(pool.take(KEPT_BYTES // 2)) for _ in range(3)]
    for slot in slots:
        pool.give_back(slot)
    assert kept_bytes(*slots) == KEPT_BYTES
    again = pool.take(KEPT_BYTES // 2)
    assert again is slots[0]
    assert again.array(1)[0] == 1  # its pages are unchanged


def test_a_slot_larger_than_all_that_is_kept_takes_nothing_while_it_is_free():
    pool = SlotPool()
    small, large = filled(pool.take(1 << 20)), filled(pool.take(2 * KEPT_BYTES))
    for slot in (small, large):
        pool.give_back(slot)
    assert (kept_bytes(small), kept_bytes(large)) == (1 << 20, 0)
    pool.give_back(filled(pool.take(2 * KEPT_BYTES)))
    assert kept_bytes(small) == 1 << 20


def test_sizes_of_now_take_the_place_of_those_of_before():
    pool = SlotPool()
    before = [filled(pool.take(KEPT_BYTES // 4)) for _ in range(4)]
    for slot in before:
        pool.give_back(slot)
    for _ in range(2):
        now = filled(pool.take(KEPT_BYTES))
        pool.give_back(now)
    assert kept_bytes(now) == KEPT_BYTES
    assert kept_bytes(*before) == 0


def test_a_slot_holds_nothing_of_another_tenant():
    pool = SlotPool()
    slot = filled(pool.take(1 << 20, owner="alice"), 7)
    pool.give_back(slot)
    assert pool.take(1 << 20, owner="bob") is slot
    assert not slot.array(slot.nbytes).any()
    filled(slot, 8)
    pool.give_back(slot)
    assert pool.take(1 << 20, owner="bob") is slot
    assert (slot.array(slot.nbytes) == 8).all()


def test_a_tenant_gets_its_own_slot_back_first():
    pool = SlotPool()
    slots = {name: filled(pool.take(1 << 20, owner=name)) for name in ("alice", "bob")}
    for slot in slots.values():
        pool.give_back(slot)
    assert pool.take(1 << 20, owner="bob") is slots["bob"]


def test_at_rest_nothing_is_kept():
    pool = SlotPool()
    free, lent = filled(pool.take(1 << 20)), filled(pool.take(1 << 20))
    pool.give_back(free)
    pool.rest()
    assert (kept_bytes(free), kept_bytes(lent)) == (0, 1 << 20)
    assert pool.take(1 << 20) is free


def test_an_answer_leaves_no_byte_of_what_its_slot_held():
    layout = lay_out([torch.ones(3, dtype=torch.uint8), torch.ones(5), torch.ones(1, dtype=torch.bool)])
    slot = filled(SlotPool().take(layout.nbytes), 255)
    layout.write_into(slot.array(slot.nbytes).data)
    assert slot.array(layout.nbytes).tobytes() == b"".join(layout.parts)
    assert b"\xff" not in slot.array(layout.nbytes).tobytes()


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
    wait_for(lambda: set(os.listdir("/proc/self/fd")) <= before)  # other tests' threads may have some
