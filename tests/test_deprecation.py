"""Check that keywords that options replaced are accepted with a warning, and that nothing else is."""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from upriver._deprecation import deprecated_keywords


@dataclass(frozen=True, kw_only=True)
class Brewing:
    minutes: int = 3
    strong: bool = False

    def __post_init__(self) -> None:
        if self.minutes < 1:
            raise ValueError(f"minutes must be at least 1, got {self.minutes}")


@dataclass(frozen=True, kw_only=True)
class Cup:
    size: int = 1


class Kettle:
    @deprecated_keywords(
        brewing=(Brewing, {"minutes": "minutes", "brew_strong": "strong"}), cup=(Cup, {"cup_size": "size"})
    )
    def __init__(
        self, leaf: str, *, brewing: Brewing | None = None, cup: Cup | None = None, milk: bool = False
    ) -> None:
        """Make tea."""
        self.made = leaf, brewing or Brewing(), cup or Cup(), milk


@deprecated_keywords(cup=(Cup, {"cup_size": "size"}))
def pour(cup: Cup | None = None, **more: Any) -> tuple[Cup, dict[str, Any]]:
    return cup or Cup(), more


def test_new_form_is_silent() -> None:
    made = Kettle("green", brewing=Brewing(minutes=2), cup=None, milk=True).made
    assert made == ("green", Brewing(minutes=2), Cup(), True)


def test_each_old_keyword_becomes_a_field_and_warns_once_at_the_callers_line() -> None:
    with pytest.warns(DeprecationWarning) as caught:
        made = Kettle("green", minutes=5, brew_strong=True, cup_size=2, milk=True).made  # type: ignore[call-arg]
    assert made == ("green", Brewing(minutes=5, strong=True), Cup(size=2), True)
    assert [str(each.message) for each in caught] == [
        f"Kettle({old}=…) is Kettle({new}=…)) now; 0.3 will not have the old keyword"
        for old, new in (
            ("minutes", "brewing=Brewing(minutes"),
            ("brew_strong", "brewing=Brewing(strong"),
            ("cup_size", "cup=Cup(size"),
        )
    ]
    assert {each.filename for each in caught} == {__file__}


def test_old_keyword_of_one_option_goes_with_another_option() -> None:
    with pytest.warns(DeprecationWarning, match="cup_size"):
        made = Kettle("black", brewing=Brewing(minutes=4), cup_size=3).made  # type: ignore[call-arg]
    assert made == ("black", Brewing(minutes=4), Cup(size=3), False)


def test_option_together_with_its_old_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got both brewing and brew_strong: give strong in brewing"):
        Kettle("black", brewing=Brewing(), brew_strong=True)  # type: ignore[call-arg]


def test_option_checks_what_an_old_keyword_says() -> None:
    with (
        pytest.warns(DeprecationWarning, match="minutes"),
        pytest.raises(ValueError, match="minutes must be at least 1, got 0"),
    ):
        Kettle("black", minutes=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keyword", "suggestion"),
    [("brewin", ". Did you mean 'brewing'?"), ("minute", ". Did you mean 'minutes'?"), ("water", "")],
)
def test_unknown_keyword_is_refused_with_a_close_match(keyword: str, suggestion: str) -> None:
    said = f"Kettle() got an unexpected keyword argument '{keyword}'{suggestion}"
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        Kettle("black", **{keyword: 1})


def test_function_of_any_keywords_gets_all_but_the_old_ones() -> None:
    with pytest.warns(DeprecationWarning, match="cup_size"):
        assert pour(cup_size=2, water=1) == (Cup(size=2), {"water": 1})


def test_signature_has_only_the_new_keywords() -> None:
    assert list(inspect.signature(Kettle).parameters) == ["leaf", "brewing", "cup", "milk"]
    with warnings.catch_warnings(), pytest.raises(TypeError, match="missing 1 required"):
        Kettle()  # type: ignore[call-arg]
