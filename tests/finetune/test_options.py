"""Check that an invalid value for any argument of ``finetune`` raises at once and names the argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.finetune.training import OPTIONS, grouped, photos
from tests.program.nets import frozen_small
from upriver.errors import ConfigError
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset

NO_NUMBER: tuple[Any, ...] = ("x", [1], {}, 3.5, True, 1j, (1,), np.array([8, 16]), torch.tensor([8, 16]))
NO_FLAG: tuple[Any, ...] = (None, 1, "no", [True], {})
NO_WORD: tuple[Any, ...] = (3, True, "magic", ["bitwise"], {}, np.array(["a", "b"]))

WRONG: dict[str, tuple[Any, ...]] = {
    "model": (None, 3, torch.nn.Linear),
    "dataset": (None, [1, 2], "photos"),
    "batch_size": (None, *NO_NUMBER),
    "micro_batch": (None, *NO_NUMBER),
    "policy": NO_WORD,
    "cut": (
        *NO_NUMBER,
        {"a": 1},
        {True: 1.0},
        {None: 1.0},
        {(1, 2): 1.0},
        {3: "all"},
        {3: True},
        {3: None},
        {3: [1]},
        {3: Decimal("1")},
        {3: 10**400},
        {3: 0.5},
    ),
    "exact": (None, *NO_WORD),
    "keep": NO_WORD,
    "views": (0, *NO_NUMBER),
    "prefix": tuple(value for value in NO_WORD if value is not None),
    "autocast": (3, True, "float32", [torch.bfloat16], {}),
    "granularity": (None, *NO_WORD),
    "compile_tail": (
        None,
        "yes",
        [1],
        {3: 1},
        {"options": 3},
        {"fullgraph": "x"},
        {"dynamic": "x"},
        {"backend": 3},
    ),
    "in_background": tuple(value for value in NO_FLAG if value is not None),
    "adapt_batch": (None, *NO_NUMBER),
    "rank": NO_NUMBER,
    "num_ranks": NO_NUMBER,
    "replay": (3, "x", {"epoch": 1}, [3], [{}]),
    "enabled": NO_FLAG,
    "gain": (None, "x", [0.1], {}, True, 1j, Decimal("0.1"), 10**400, np.array([0.1, 0.2])),
    "patience": (None, *NO_NUMBER),
    "seed": (None, *NO_NUMBER),
    "epochs": (0, *NO_NUMBER),
    "shuffle": NO_FLAG,
    "drop_last": NO_FLAG,
    "on_bad_sample": (None, *NO_WORD),
    "num_workers": NO_NUMBER,
    "connections": (None, *NO_NUMBER),
    "per_request": (None, *NO_NUMBER),
    "window_bytes": (None, 10**400, *NO_NUMBER),
    "on_progress": (3, "x", [print], {}),
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("few"), 8)


def test_all_arguments_are_tried() -> None:
    named = set(inspect.signature(upriver.Near.finetune).parameters)
    fields_of_options = {field.name for kind in OPTIONS.values() for field in fields(kind)}
    assert {"self", *WRONG} | set(OPTIONS) == named | fields_of_options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(
            name,
            value,
            id=f"{name}={value!r:.30}",
            marks=() if number < 2 else pytest.mark.full,
        )
        for name in WRONG
        for number, value in enumerate(WRONG[name])
    ],
)
def test_a_value_of_another_type_is_named(few: Dataset, name: str, value: object) -> None:
    others = {"rank": {"num_ranks": 2}, "num_ranks": {"rank": 0}}.get(name, {})
    given = {"model": frozen_small(), "dataset": few, "batch_size": 8, **others, name: value}
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        upriver.connect("http://127.0.0.1:9").finetune(**grouped(**given))


@pytest.mark.parametrize("keyword", OPTIONS)
@pytest.mark.parametrize("value", [True, "x", {}, dict])
def test_an_option_of_another_class_is_named(few: Dataset, keyword: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{keyword} must be a {OPTIONS[keyword].__name__}"):
        upriver.connect().finetune(frozen_small(), few, batch_size=8, **{keyword: value})


@pytest.mark.parametrize(
    ("old", "value", "option", "field"),
    [
        ("shuffle", False, "sampling", "shuffle"),
        ("drop_last", True, "sampling", "drop_last"),
        ("on_bad_sample", "skip", "sampling", "on_bad_sample"),
        ("num_workers", 3, "prefetch", "num_workers"),
        ("connections", 2, "prefetch", "connections"),
        ("per_request", 2, "prefetch", "per_request"),
        ("adapt_batch", 8, "prefetch", "adapt_batch"),
        ("window_bytes", 1 << 20, "prefetch", "window_bytes"),
        ("granularity", "op", "splitting", "granularity"),
        ("compile_tail", {"backend": "eager"}, "splitting", "compile_tail"),
        ("replay", [], "splitting", "replay"),
        ("replan", False, "replanning", "enabled"),
        ("replan_gain", 0.5, "replanning", "gain"),
        ("replan_patience", 9, "replanning", "patience"),
    ],
)
def test_an_old_keyword_does_the_same_and_warns(
    few: Dataset, old: str, value: object, option: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(_near: upriver.Near, _model: Any, _data: Any, options: JobOptions, _tell: Any) -> None:
        made.append(options)
        raise KeyboardInterrupt  # a job is made from nothing else

    def prepared(**given: Any) -> JobOptions:
        with pytest.raises(KeyboardInterrupt):
            upriver.connect().finetune(
                frozen_small(), few, batch_size=8, micro_batch=4, policy="nosplit", exact="numeric", **given
            )
        return made.pop()

    made: list[JobOptions] = []
    monkeypatch.setattr(upriver.Near, "_prepare", prepare)
    kind = OPTIONS[option]
    new = prepared(**{option: kind(**{field: value})})
    said = f"Near.finetune({old}=…) is Near.finetune({option}={kind.__name__}({field}=…)) now; 0.3"
    with pytest.warns(DeprecationWarning, match=re.escape(said)):
        deprecated = prepared(**{old: value})
    assert deprecated == replace(new, replay=deprecated.replay)


def test_old_keywords_of_ranks_do_the_same_and_warn(few: Dataset) -> None:
    with pytest.warns(DeprecationWarning) as caught:
        job = upriver.connect().finetune(
            frozen_small(),
            few,
            batch_size=4,
            policy="nosplit",
            rank=1,  # type: ignore[call-arg]
            num_ranks=2,
        )
    with job:
        assert (job._options.rank, job._options.num_ranks, len(job)) == (1, 2, 1)
    assert ["rank" in str(each.message) for each in caught] == [True, True]


@pytest.mark.parametrize("cut", [[3], 3.5, True, "3", {"a": 1}])
def test_what_a_cut_may_be_is_said(few: Dataset, cut: Any) -> None:
    allowed = "cut must be a whole number, a mapping of whole numbers to shares of the samples, or None, got"
    with pytest.raises(ConfigError, match=allowed):
        upriver.connect().finetune(frozen_small(), few, batch_size=8, cut=cut)


@pytest.mark.parametrize("policy", ["upriver", "freeze", "nosplit"])
def test_a_policy_and_a_cut_exclude_each_other(few: Dataset, policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy='{policy}' and cut=3 were both given"):
        upriver.connect().finetune(frozen_small(), few, batch_size=8, policy=policy, cut=3)


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 20) | st.just(10**30),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_the_largest_step_is_a_batch_or_all_that_an_epoch_has(
    num_samples: int, batch_size: int, num_ranks: int, drop_last: bool
) -> None:
    shard = upriver.Sampling(drop_last=drop_last, rank=0, num_ranks=num_ranks)
    try:
        options = JobOptions.checked(
            rows=range(num_samples), batch_size=batch_size, micro_batch=8, sampling=shard
        )
    except ConfigError:
        assert drop_last and batch_size * num_ranks > num_samples
        return
    order = options.order(0)
    steps = [stop - start for start, stop in map(order.step, range(order.num_steps))]
    assert not steps or max(steps) == options.step_samples


def test_a_rank_of_very_many_has_its_part(few: Dataset) -> None:
    shard = upriver.Sampling(shuffle=False, rank=13, num_ranks=10**12)
    with upriver.connect().finetune(
        frozen_small(), few, batch_size=4, policy="nosplit", sampling=shard
    ) as job:
        assert [targets.tolist() for _, targets in job] == [[int(few.targets[13 % 8])]]
