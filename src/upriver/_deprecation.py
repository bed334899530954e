"""Accept keywords that options replaced, with a warning; 0.3 will have the options alone."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated_keywords(
    **options: tuple[Callable[..., Any], Mapping[str, str] | Collection[str]],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that took fields of an option as keywords of its own.

    The function itself knows only the option, whose default must be None. A call may still use the old
    keywords: each gives a `DeprecationWarning` at the caller's line, and together they make the option.

    Args:
        options: For each keyword that takes an option: the option's class, and old keywords with the fields
            they became, or old keywords alone if the fields have the same names.

    Raises:
        TypeError: From the decorated function, if a call gives an option and one of its old keywords, or a
            keyword that does not exist.
    """
    places = {
        old: (option, kind, field)
        for option, (kind, fields) in options.items()
        for old, field in (fields if isinstance(fields, Mapping) else {each: each for each in fields}).items()
    }

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

        @functools.wraps(function)
        def wrapper(*args: P.args, **keywords: P.kwargs) -> R:
            made: dict[str, dict[str, Any]] = {}
            for keyword in [each for each in keywords if each not in parameters]:
                if keyword not in places:
                    if takes_any:
                        continue
                    raise TypeError(_unknown(name, keyword, [*parameters, *places]))
                option, kind, field = places[keyword]
                if keywords.get(option) is not None:
                    raise TypeError(both_given(name, option, keyword, field))
                made.setdefault(option, {})[field] = keywords.pop(keyword)
                warn_replaced(name, keyword, f"{option}={kind.__name__}({field}=…)", stacklevel=2)
            for option, fields in made.items():
                keywords[option] = options[option][0](**fields)
            return function(*args, **keywords)

        return wrapper

    return decorate


def warn_replaced(name: str, keyword: str, new: str, *, stacklevel: int) -> None:
    """Warn that a function's keyword is written as ``new`` now; ``stacklevel`` counts from the caller."""
    warnings.warn(
        f"{name}({keyword}=…) is {name}({new}) now; 0.3 will not have the old keyword",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def both_given(name: str, option: str, keyword: str, field: str) -> str:
    """Return the error text for a call with an option and one of the keywords that it replaced."""
    return f"{name}() got both {option} and {keyword}: give {field} in {option}"


def _unknown(name: str, keyword: str, known: list[str]) -> str:
    close = get_close_matches(keyword, known, n=1)
    suggestion = f". Did you mean {close[0]!r}?" if close else ""
    return f"{name}() got an unexpected keyword argument {keyword!r}{suggestion}"
