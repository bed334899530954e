"""What a program takes of a request, as its graph says."""

from contextlib import contextmanager

import pytest
import torch

from tests.server.conftest import MICRO_BATCH, make_program
from upriver.errors import Overloaded, ProtocolError
from upriver.program import capture
from upriver.protocol import DEFAULT_CAPS, DatasetRef, RunRequest
from upriver.server.memory import SealedFile
from upriver.server.needs import GRAPH_FACTOR, MAX_FORMS, WEIGHED_BYTES, Form, Forms, read_form
from upriver.server.tenants import ANYONE
from upriver.types import MicroBatch


class Several(torch.nn.Module):
    """Two inputs, and two tensors that cross after its first stage."""

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
    form.check_given(request, [all_of_them])  # as an operator may allow


def test_a_dataset_gives_one_tensor():
    form = Form(micro_batch=4, count=2, tensors=(("float32", (4, 1)),) * 2)
    ref = DatasetRef(store="default", digest="0" * 64)
    request = RunRequest(micro_batches=((0,),), start=-1, stop=1, micro_batch=4, dataset=ref)
    with pytest.raises(ProtocolError, match="a dataset gives one tensor, and the program takes 2"):
        form.check_given(request, [])


def test_a_graph_is_read_once_for_each_position_and_not_remembered_for_ever():
    held = []

    @contextmanager
    def hold(nbytes, tenant):
        held.append((nbytes, tenant.name))
        yield

    forms, program = Forms(hold), make_program(0)
    graph = sealed(program.graph_bytes)
    for position in (0, 1, 0, 1):
        assert forms.of("anyone/one", graph, position, ANYONE).micro_batch == MICRO_BATCH
    assert held == [(0, "anyone")] * 2
    for number in range(MAX_FORMS):
        forms.of(f"anyone/{number}", graph, 0, ANYONE)
    forms.of("anyone/one", graph, 0, ANYONE)
    assert len(held) == 2 + MAX_FORMS + 1
    assert len(forms._known) == MAX_FORMS


def test_a_large_graph_is_read_only_where_there_is_memory_for_it():
    graph = sealed(b'{"micro_batch":1,"inputs":[]}' + b" " * WEIGHED_BYTES)

    def hold(nbytes, tenant):
        assert nbytes == GRAPH_FACTOR * (graph.nbytes - WEIGHED_BYTES) > 0
        raise Overloaded("none")

    with pytest.raises(Overloaded):
        Forms(hold).of("anyone/one", graph, 0, ANYONE)
