"""Check what the names of stretches and rows depend on, and on what not."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.features.keeping import STRETCH
from upriver.errors import ConfigError
from upriver.features import row_key
from upriver.features.stretch import stretch_of
from upriver.pipeline import (
    Decode,
    InputChain,
    Normalize,
    RandomHorizontalFlip,
    Resize,
    SampleRef,
    imagenet_train,
)

PLAIN = InputChain((Decode(), Resize((8, 8)), Normalize()))
DRAWING = InputChain((Decode(), Resize((8, 8)), RandomHorizontalFlip(), Normalize()))
FACTS: dict[str, Any] = {"program": "a" * 64, "micro_batch": 16, "fingerprint": {"torch": "2"}}
REF = SampleRef(object="photos/1.jpg", etag='"1"', start=0, stop=10)


@pytest.mark.parametrize(
    "change",
    [
        {"program": "b" * 64},
        {"program": None},
        {"cut": 4},
        {"chain": ()},
        {"chain": ({"stage": "decode", "max_pixels": 101, "orient": True},)},
        {"view": (0, 0)},
        {"micro_batch": 17},
        {"fingerprint": {"torch": "2.13", "threads": "3"}},
    ],
    ids=repr,
)
def test_digest_each_field_changes_it(change: dict[str, Any]) -> None:
    assert replace(STRETCH, **change).digest != STRETCH.digest


def test_digest_of_input_stages_is_the_same_whatever_stages_follow() -> None:
    facts = {**FACTS, "view": None}
    short = stretch_of(InputChain((*PLAIN.stages[:2], Normalize())), cut=-1, **facts)
    long = stretch_of(InputChain((*PLAIN.stages[:2], RandomHorizontalFlip(), Normalize())), cut=-2, **facts)
    assert short.digest == long.digest


def test_digest_seed_and_number_of_a_view_count_apart() -> None:
    views = [(0, 0), (0, 1), (1, 0), (1, 1), (11, 0), (1, 10)]
    assert len({replace(STRETCH, view=view).digest for view in views}) == len(views)


def test_digest_order_of_facts_and_kind_of_mapping_do_not_count() -> None:
    turned = replace(
        STRETCH,
        chain=tuple(MappingProxyType(dict(reversed(stage.items()))) for stage in STRETCH.chain),
        fingerprint=MappingProxyType(dict(reversed(STRETCH.fingerprint.items()))),
    )
    assert turned.digest == STRETCH.digest
    assert json.loads(json.dumps(STRETCH.to_json())) == STRETCH.to_json()


def test_digest_is_that_of_version_1() -> None:
    """Digests name folders of other processes and versions."""
    assert STRETCH.digest == "d17022025f452421849e1390858b75424d7fae97b814c207ca1042907d1a412f"


def test_stretch_of_cut_before_the_model_depends_on_neither_program_nor_micro_batch() -> None:
    found = stretch_of(PLAIN, cut=-1, view=(1, 2), **FACTS)
    assert found.program is None and found.micro_batch == 1 and found.view is None
    assert found.chain == tuple(PLAIN.to_json()[:2])
    assert found == stretch_of(PLAIN, cut=-1, view=None, **(FACTS | {"program": "b" * 64, "micro_batch": 3}))
    assert stretch_of(PLAIN, cut=0, view=None, **FACTS).chain == tuple(PLAIN.to_json())
    assert stretch_of(PLAIN, cut=PLAIN.start, view=None, **FACTS).chain == ()


def test_stretch_of_cut_in_the_model_depends_on_all() -> None:
    found = stretch_of(DRAWING, cut=2, view=(1, 2), **FACTS)
    assert (found.program, found.micro_batch, found.view) == ("a" * 64, 16, (1, 2))
    assert found.chain == tuple(DRAWING.to_json())


@pytest.mark.parametrize(("cut", "draws"), [(-4, False), (-3, False), (-2, False), (-1, True), (0, True)])
def test_stretch_of_random_chain_has_a_view_behind_the_first_draw(cut: int, draws: bool) -> None:
    assert stretch_of(DRAWING, cut=cut, view=(1, 2), **FACTS).view == ((1, 2) if draws else None)
    if draws:
        with pytest.raises(ConfigError, match=f"cut {cut} needs a view, since random_horizontal_flip draws"):
            stretch_of(DRAWING, cut=cut, view=None, **FACTS)
    else:
        assert stretch_of(DRAWING, cut=cut, view=None, **FACTS).view is None


def test_stretch_of_stages_behind_the_cut_do_not_count() -> None:
    others = InputChain((*DRAWING.stages[:2], Normalize((0.1, 0.2, 0.3))))
    assert stretch_of(PLAIN, cut=-1, view=None, **FACTS) == stretch_of(others, cut=-1, view=None, **FACTS)


def test_stretch_of_bad_cut_or_no_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="a cut of this chain is at least -3, got -4"):
        stretch_of(PLAIN, cut=-4, view=None, **FACTS)
    with pytest.raises(ConfigError, match="a stretch up to cut 1 needs the digest of its program, got None"):
        stretch_of(PLAIN, cut=1, view=None, **(FACTS | {"program": None}))


def test_first_draw_of_the_usual_training_chain() -> None:
    assert InputChain(imagenet_train()).first_draw == -3


texts = st.text(max_size=5)
numbers = st.integers(0, 2**62)
refs = st.builds(SampleRef, object=texts, etag=texts, start=numbers, stop=numbers)


@given(one=refs, other=refs, samples=st.tuples(*[st.none() | numbers] * 2))
def test_row_key_is_equal_for_equal_samples_alone(
    one: SampleRef, other: SampleRef, samples: tuple[int | None, int | None]
) -> None:
    keys = row_key(one, samples[0]), row_key(other, samples[1])
    assert len(keys[0]) == 16
    assert (keys[0] == keys[1]) == ((one, samples[0]) == (other, samples[1]))
    assert keys[0] == row_key(
        SampleRef(object=one.object, etag=one.etag, start=one.start, stop=one.stop), samples[0]
    )


def test_row_key_border_between_name_and_etag_counts() -> None:
    joined = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    refs = [SampleRef(object=name, etag=etag, start=0, stop=1) for name, etag in joined]
    assert len({row_key(ref, None) for ref in refs}) == 4


def test_row_key_is_that_of_version_1() -> None:
    assert row_key(REF, None).hex() == "a0e6caef860080148575b86849bb795e"
    assert row_key(REF, 7).hex() == "db0de6e121e0d8edb48fb4ec47013334"
