"""Test the footprint of a request: of its program, from the graph, and of the samples before it."""

from contextlib import contextmanager

import pytest
import torch

from tests.pipeline.making import encoded, pixels, tone, wav, write
from tests.server.conftest import MICRO_BATCH, make_program
from tests.server.running import changed
from upriver.errors import Overloaded, ProtocolError
from upriver.pipeline import CenterCrop, Decode, DecodeWav, FixLength, Normalize, Resize, ToFloat, index
from upriver.program.capture.prefix import capture
from upriver.protocol import DEFAULT_CAPS, DatasetRef, RunRequest
from upriver.server.ipc.messages import Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.scheduling import footprint
from upriver.server.scheduling.footprint import (
    ANSWER_BYTES,
    COPIES,
    GRAPH_FACTOR,
    MAX_FORMS,
    WEIGHED_BYTES,
    KeptRowsFootprint,
    PositionFootprint,
    ProgramFootprints,
    input_of,
    kept_rows_bytes,
    read_form,
    request_bytes,
)
from upriver.server.tenants import ANYONE
from upriver.types import MicroBatch


class Several(torch.nn.Module):
    """Network with two inputs, and with two tensors that cross after its first stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 2)

    def forward(self, one, other):
        return self.second(self.first(one)) + other


def several():
    return capture(Several().eval(), (torch.zeros(3, 5), torch.zeros(3, 2)))


def sealed(graph):
    file = SealedFile()
    file.append(graph)
    file.seal()
    return file


@pytest.mark.parametrize("make", [lambda: make_program(0), several])
def test_what_a_program_takes_at_each_position_is_what_a_run_stops_at(make):
    program = make()
    given = tuple(value.spec.empty("cpu").zero_() for value in program.graph.inputs)
    for position in range(program.num_stages + 1):
        there = program.run(given, 0, position)
        form = read_form(program.graph_bytes, position)
        assert (form.micro_batch, form.count) == (program.micro_batch, len(there))
        assert form.tensors == tuple(
            (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in there
        )
        batch = MicroBatch(ids=(0,), position=position, tensors=there)
        request = RunRequest(
            micro_batches=((0,),), start=position, stop=position, micro_batch=program.micro_batch
        )
        form.check_given(request, [batch])


def test_of_more_tensors_than_a_frame_has_by_default_only_the_number_is_kept():
    count = DEFAULT_CAPS.tensors + 1
    spec = '{"dtype":"float32","shape":[1],"stride":[1]}'
    inputs = ",".join(f'{{"name":"a{number}","spec":{spec}}}' for number in range(count))
    form = read_form(f'{{"micro_batch":1,"inputs":[{inputs}]}}'.encode(), 0)
    assert (form.count, len(form.tensors)) == (count, DEFAULT_CAPS.tensors)
    request = RunRequest(micro_batches=((0,),), start=0, stop=1, micro_batch=1)
    for many in (0, DEFAULT_CAPS.tensors):
        batch = MicroBatch(ids=(0,), position=0, tensors=(torch.zeros(1),) * many)
        with pytest.raises(ProtocolError, match=f"takes {count} tensors at position 0, got {many}"):
            form.check_given(request, [batch])
    all_of_them = MicroBatch(ids=(0,), position=0, tensors=(torch.zeros(1),) * count)
    form.check_given(request, [all_of_them])  # an operator may allow this size


def test_a_dataset_gives_one_tensor():
    form = PositionFootprint(micro_batch=4, count=2, tensors=(("float32", (4, 1)),) * 2)
    ref = DatasetRef(store="default", digest="0" * 64)
    request = RunRequest(micro_batches=((0,),), start=-1, stop=1, micro_batch=4, dataset=ref)
    with pytest.raises(ProtocolError, match="a dataset gives one tensor, and the program takes 2"):
        form.check_given(request, [])


@pytest.mark.full
def test_a_graph_is_read_once_for_each_position_and_not_remembered_for_ever():
    held = []

    @contextmanager
    def hold(nbytes, tenant):
        held.append((nbytes, tenant.name))
        yield

    forms, program = ProgramFootprints(hold), make_program(0)
    graph = sealed(program.graph_bytes)
    for position in (0, 1, 0, 1):
        assert forms.of("anyone/one", graph, position, ANYONE).micro_batch == MICRO_BATCH
    assert held == [(0, "anyone")] * 2
    for number in range(MAX_FORMS):
        forms.of(f"anyone/{number}", graph, 0, ANYONE)
    forms.of("anyone/one", graph, 0, ANYONE)
    assert len(held) == 2 + MAX_FORMS + 1
    assert len(forms._known) == MAX_FORMS


def test_every_cut_of_some_networks_is_remembered_with_what_crosses_there(monkeypatch):
    """A device divides each of its networks at a few places; many devices have networks of their own."""
    held = []

    @contextmanager
    def hold(nbytes, tenant):
        held.append(tenant.name)
        yield

    forms, graph = ProgramFootprints(hold), sealed(make_program(0).graph_bytes)
    for _ in range(2):
        for number in range(100):
            for position in (0, 1):
                forms.of(f"anyone/{number}", graph, position, ANYONE)
    assert len(held) == 200
    monkeypatch.setattr(footprint, "MAX_FORM_TENSORS", 150)  # each form needs one tensor
    forms.of("anyone/more", graph, 0, ANYONE)
    assert len(forms._known) == forms._num_tensors == 150
    monkeypatch.setattr(footprint, "MAX_FORM_TENSORS", 0)
    forms.of("anyone/last", graph, 0, ANYONE)
    assert list(forms._known) == [("anyone/last", 0)] and forms._num_tensors == 1


def test_a_large_graph_is_read_only_where_there_is_memory_for_it():
    graph = sealed(b'{"micro_batch":1,"inputs":[]}' + b" " * WEIGHED_BYTES)

    def hold(nbytes, tenant):
        assert nbytes == GRAPH_FACTOR * (graph.nbytes - WEIGHED_BYTES) > 0
        raise Overloaded("none")

    with pytest.raises(Overloaded):
        ProgramFootprints(hold).of("anyone/one", graph, 0, ANYONE)


# ------------------------------------------------------------------------------- samples of a dataset


def dataset_of(root, files, *stages):
    return index(write(root, {f"a/{name}": data for name, data in files.items()}), stages=stages)


def words(count=4, samples=100):
    return {f"{n}.wav": wav(tone(samples, seed=n)) for n in range(count)}


def asked(dataset, ids, stop, *, micro_batch=4, weighed=None):
    """Return what a request needs beyond the fixed part of every request."""
    ref = DatasetRef(store="default", digest=dataset.digest)
    request = RunRequest(
        micro_batches=ids, start=dataset.chain.start, stop=stop, micro_batch=micro_batch, dataset=ref
    )
    found = request_bytes(request, dataset=dataset, weighed=weighed or {})
    stored = max(int(dataset.sizes(each).sum()) for each in ids)
    return {size: each - ANSWER_BYTES - COPIES * stored * size // micro_batch for size, each in found.items()}


def test_a_few_short_sounds_that_are_to_be_long_are_counted_as_long(tmp_path):
    samples = 1_000_000
    dataset = dataset_of(tmp_path, words(), DecodeWav(16000), FixLength(samples))
    (found,) = asked(dataset, ((0, 1), (2,)), 0).values()
    assert found > 2 * 4 * 4 * samples  # a row for each sample that fits, twice
    (found,) = asked(dataset, ((0,),), -1).values()  # where there is no such padding
    assert found < 4 * samples


def test_each_number_is_that_of_the_micro_batch_where_it_is_largest(tmp_path):
    files = {f"{n}.wav": wav(tone(100 * (n + 1))) for n in range(5)}
    dataset = dataset_of(tmp_path, files, DecodeWav(16000))
    ref = DatasetRef(store="default", digest=dataset.digest)
    request = RunRequest(micro_batches=((0, 1), (4,), (2, 3)), start=-1, stop=-1, micro_batch=2, dataset=ref)
    given = input_of(request, dataset)
    sizes = dataset.sizes(range(5))
    assert given.stored_bytes == given.out_bytes == sizes[2] + sizes[3]
    assert given.working_bytes == 0
    given = input_of(changed(request, stop=0), dataset)
    assert given.out_bytes == 2 * 4 * sizes[4]
    assert given.working_bytes > 4 * sizes[4]


@pytest.mark.parametrize("last, factor", [(None, 17), (ToFloat(), 65), (Normalize(), 65)])
def test_images_of_unknown_size_are_counted_by_rule(tmp_path, last, factor):
    stages = (Decode(), Resize(8)) if last is None else (Decode(), Resize(8), last)
    files = {f"{n}.png": encoded(pixels(20, 20, seed=n), "PNG") for n in range(2)}
    dataset = dataset_of(tmp_path, files, *stages)
    (found,) = asked(dataset, ((0, 1),), 0).values()
    assert found == factor * dataset.sizes([0, 1]).sum()
    (found,) = asked(dataset, ((0, 1),), 1 - len(stages)).values()
    assert found == 17 * dataset.sizes([0, 1]).sum()  # as pixels


def test_images_of_one_size_are_counted_as_they_will_be(tmp_path):
    files = {f"{n}.png": encoded(pixels(20, 20, seed=n), "PNG") for n in range(2)}
    dataset = dataset_of(tmp_path, files, Decode(), CenterCrop(600), Normalize())
    (found,) = asked(dataset, ((0, 1),), 0).values()
    out = 4 * 3 * 600 * 600 * 4
    assert 2 * out < found < 4 * out


def test_what_goes_into_a_model_is_counted_beside_what_comes_in(tmp_path):
    samples = 1_000_000
    dataset = dataset_of(tmp_path, words(), DecodeWav(16000), FixLength(samples))
    into = 4 * 4 * samples
    weighed = {
        size: Weighed(peak_bytes=into * size // 4 + 1000, out_bytes=10, constant_bytes=0, rows=True)
        for size in (4, 8)
    }
    found = asked(dataset, ((0, 1, 2, 3),), 1, weighed=weighed)
    for size, nbytes in found.items():
        assert nbytes > 2 * into * size // 4
        assert nbytes < 2 * into * size // 4 + 10 * 4 * samples
    large = {4: Weighed(peak_bytes=100 * into, out_bytes=10, constant_bytes=0, rows=True)}
    assert asked(dataset, ((0, 1),), 1, weighed=large)[4] == 100 * into + 20


def test_a_request_that_brings_its_tensors_has_no_input():
    request = RunRequest(micro_batches=((0,),), start=0, stop=1, micro_batch=4)
    weighed = {4: Weighed(peak_bytes=1000, out_bytes=10, constant_bytes=0, rows=True)}
    assert request_bytes(request, dataset=None, weighed=weighed) == {4: ANSWER_BYTES + 1020}


def test_a_request_from_kept_rows_takes_one_answer_and_what_makes_the_next():
    joined = KeptRowsFootprint(fetched_bytes=10, row_bytes=8, out_bytes=16)
    scattered = KeptRowsFootprint(fetched_bytes=100, row_bytes=9, out_bytes=9)
    assert (joined.peak_bytes, scattered.peak_bytes) == (8 + 2 * 16, 9 + 100)
    assert kept_rows_bytes([joined, scattered]) == ANSWER_BYTES + 16 + 109
