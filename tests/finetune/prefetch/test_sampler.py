"""Check how an epoch's samples are packed where some rows are kept here or by servers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upriver.finetune.prefetch.sampler import EpochWork, epoch_order


@given(data=st.data(), num_samples=st.integers(1, 60), step=st.integers(0, 8))
def test_packs_hold_each_missing_sample_once_and_in_the_order_of_need(
    data: st.DataObject, num_samples: int, step: int
) -> None:
    sets = st.frozensets(st.integers(0, num_samples - 1))
    kept, stored = data.draw(sets), data.draw(sets)
    order = epoch_order(num_samples, seed=3, epoch=1, batch_size=7, micro_batch=4, shuffle=True)
    work = EpochWork.of(order, step=step, kept=kept, stored=stored)
    packs = [list(pack) for pack in work.micro_batches[work.first :]]
    flat = [sample for pack in packs for sample in pack]
    assert flat == [order.ids[at] for at in work.positions]
    starts = [order.ids.index(pack[0]) for pack in packs]
    assert starts == sorted(starts)
    if not work.is_packed:
        assert list(work.micro_batches) == order.micro_batches
        return
    wanted = [sample for sample in order.ids[step * 7 :] if sample not in kept]
    assert sorted(flat) == sorted(wanted)
    for index, pack in enumerate(packs):
        assert {sample in stored for sample in pack} == {index in work.stored}
        assert pack == sorted(pack, key=order.ids.index)
    for there in (True, False):
        assert [len(pack) for pack in packs if (pack[0] in stored) is there][:-1] == [4] * (
            sum((pack[0] in stored) is there for pack in packs) - 1
        )
