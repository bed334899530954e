"""Check the loader's options: those of PyTorch's loader pass through, and earlier keywords still work."""

from __future__ import annotations

import inspect
import warnings
from collections import UserList
from typing import Any, get_type_hints

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import upriver
from upriver.dataloader import AutoOffload, DataLoader, RemoteWorkers, loader
from upriver.dataloader.options import TorchOptions, take_old_keywords
from upriver.errors import ConfigError
from upriver.policies import OFFLOAD_POLICIES

URL = "http://127.0.0.1:9"
TORCH = list(inspect.signature(TorchLoader).parameters.values())


def named() -> Any:
    return upriver.dataset("tests.dataloader.toy_datasets:Plain", count=8)


def test_every_argument_of_pytorchs_loader_is_one_of_ours() -> None:
    ours = inspect.signature(DataLoader).parameters
    places = [each.name for each in TORCH if each.kind is each.POSITIONAL_OR_KEYWORD]
    explicit = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert places[: len(explicit)] == explicit and len(ours) < 17
    assert {each.name for each in TORCH} == set(explicit) | set(get_type_hints(TorchOptions))


def test_arguments_by_place_and_by_name_are_the_same() -> None:
    generator = torch.Generator()
    values = [list(range(8)), 3, True, None, None, 1, list, False, True, 5.0, print, "fork", generator]
    names = [parameter.name for parameter in TORCH][: len(values)]
    by_place, by_name = DataLoader(*values), DataLoader(**dict(zip(names, values, strict=True)))
    plain = TorchLoader(*values)
    for each in (by_place, by_name):
        for name in ("batch_size", "num_workers", "drop_last", "timeout", "worker_init_fn", "generator"):
            assert getattr(each, name) == getattr(plain, name)
        assert each.collate_fn is list and each.multiprocessing_context is not None


@pytest.mark.parametrize(
    ("arguments", "keywords", "named"),
    [
        ((), {"num_worker": 2}, "num_worker"),
        ((1, None, None, None, 0, None, False, False, 0.0), {"timeout": 1.0}, "timeout"),
        ((1,), {"batch_size": 2}, "batch_size"),
    ],
)
def test_a_keyword_that_is_unknown_or_given_twice_is_named(
    arguments: tuple[Any, ...], keywords: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError, match=named):
        DataLoader([1, 2], *arguments, **keywords)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"token": "secret"}, {"workers": RemoteWorkers([URL], token="secret")}),
        ({"ca": "ca.pem"}, {"workers": RemoteWorkers([URL], ca="ca.pem")}),
        ({"certificate": "mine.pem"}, {"workers": RemoteWorkers([URL], certificate="mine.pem")}),
        ({"key": "mine.key"}, {"workers": RemoteWorkers([URL], key="mine.key")}),
        ({"policy": "fastflow"}, {"offload": AutoOffload(policy="fastflow")}),
        ({"model": "mine"}, {"offload": AutoOffload(model="mine")}),
    ],
)
def test_an_old_keyword_works_and_warns_of_the_new_form(
    old: dict[str, Any], new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    access: list[dict[str, Any]] = []
    monkeypatch.setattr(loader, "client_context", lambda **paths: access.append(paths))
    client = loader.ServerClient
    monkeypatch.setattr(
        loader, "ServerClient", lambda url, *, token, tls: access.append({"token": token}) or client(url)
    )
    with pytest.warns(DeprecationWarning, match=rf"DataLoader\({next(iter(old))}=…\) is") as caught:
        before = DataLoader(named(), **{"workers": [URL], **old})
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = DataLoader(named(), **{"workers": [URL], **new})
    assert before._policy is now._policy is OFFLOAD_POLICIES[old.get("policy", "upriver")]
    assert (before._recall is None) == (now._recall is None) == ("model" not in old)
    given = {key: old.get(key) for key in ("ca", "certificate", "key")}
    assert access == [given, {"token": old.get("token")}] * 2


def test_an_old_token_reaches_addresses_in_any_sequence() -> None:
    with pytest.warns(DeprecationWarning):
        workers, _, _ = take_old_keywords({"token": "secret"}, UserList([URL]), "auto")
    assert workers == RemoteWorkers([URL], token="secret")
    assert "secret" not in repr(workers)


@pytest.mark.parametrize("urls", [URL, 5, None, {URL}, (url for url in [URL])])
def test_addresses_that_are_no_list_are_refused(urls: Any) -> None:
    with pytest.raises(ConfigError, match="urls must be a list of addresses"):
        RemoteWorkers(urls)


def test_old_keywords_have_no_effect_where_they_had_none() -> None:
    with pytest.warns(DeprecationWarning):
        made = DataLoader(named(), workers=[URL], offload="always", policy="fastflow", token="secret")
    assert made.offloading is not None and made.decided
    with pytest.warns(DeprecationWarning):
        assert len(list(DataLoader([1, 2], token="secret"))) == 2


def test_an_option_and_its_old_keyword_are_one_too_many() -> None:
    with pytest.raises(TypeError, match="both workers and token"):
        DataLoader(named(), workers=RemoteWorkers([URL]), token="secret")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="both offload and policy"):
        DataLoader(named(), offload=AutoOffload(), policy="upriver")  # type: ignore[call-arg]


def test_options_are_checked_where_they_are_made() -> None:
    with pytest.raises(ConfigError, match="token"):
        RemoteWorkers([URL], token="a b")
    with pytest.raises(ConfigError, match="a server's address"):
        RemoteWorkers([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="policy must be one of fastflow, upriver, got 'hapi'"):
        AutoOffload(policy="hapi")
    with pytest.raises(ConfigError, match="policy must be one of fastflow, upriver"):
        AutoOffload(policy=["upriver"])  # type: ignore[arg-type]
