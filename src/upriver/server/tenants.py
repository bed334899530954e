"""Who may use a server, what each may read, and how much of the server is theirs.

Only the operator's configuration makes tenants. A tenant is known by a token, of which the server has nothing
but the SHA-256, or by the name in a client certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import ConfigError, Forbidden
from upriver.pipeline import Dataset
from upriver.protocol import valid_digest, valid_store_name
from upriver.store import Store
from upriver.store.names import check_prefix
from upriver.text import printable
from upriver.types import require_finite

_Rows = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Between the two a tenant has one turn in a million while the other has work: less is none, and a slip."""

_outside: weakref.WeakKeyDictionary[Dataset, dict[tuple[str, ...], _Rows | None]] = (
    weakref.WeakKeyDictionary()
)
"""Of each open dataset, by allowed prefixes: which samples lie outside, None where none does. It follows from
the two alone, and goes with the dataset."""


def check_tenant_name(name: str) -> str:
    """Check a tenant's name, and return it.

    Raises:
        ConfigError: If no tenant can be called so.
    """
    if not valid_store_name(name):
        raise ConfigError(
            "a tenant's name has 1 to 64 letters, digits, '.', '_', '-', the first a letter or digit, got "
            f"{printable(repr(name), 80)}"
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """One user of a server: a team, a project, a person.

    Attributes:
        name: In metrics, logs and the audit log; form of a store's name.
        token_hashes: SHA-256 of its tokens, in hex; several, so that one can be replaced in peace.
        certificates: Names in client certificates that stand for it.
        stores: By store, the folders or objects it may read ("" for all of the store); None: every store.
        weight: Its share of the workers relative to others', in [`LEAST_WEIGHT`, `MOST_WEIGHT`].
        max_requests: Run requests admitted and waiting at once; None: as many as the server takes.
        max_waiting_bytes: Bytes its waiting requests may ask for together; None: as the server takes.
        memory_share: Most of the memory budget that its admitted requests may hold, in (0, 1].
        program_bytes: Programs kept for it between requests; None: as many as the server keeps.
        stored_bytes: Programs and weights that it may have in a store; None: as the server allows.
    """

    name: str
    token_hashes: tuple[str, ...] = field(default=(), repr=False)
    certificates: tuple[str, ...] = ()
    stores: Mapping[str, tuple[str, ...]] | None = field(default=None, hash=False)
    weight: float = 1.0
    max_requests: int | None = None
    max_waiting_bytes: int | None = None
    memory_share: float = 1.0
    program_bytes: int | None = None
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        check_tenant_name(self.name)
        self._check_ways_in()
        self._check_stores()
        require_finite(f"tenant {self.name!r}: weight", self.weight, positive=True)
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"tenant {self.name!r}: weight lies in {LEAST_WEIGHT:g}..{MOST_WEIGHT:g}, got {self.weight:g}"
            )
        require_finite(f"tenant {self.name!r}: memory_share", self.memory_share, positive=True)
        if self.memory_share > 1:
            raise ConfigError(
                f"tenant {self.name!r}: memory_share is at most 1, all of the budget, got {self.memory_share}"
            )
        for name in ("max_requests", "max_waiting_bytes", "program_bytes", "stored_bytes"):
            if getattr(self, name) is not None:
                require_count(f"tenant {self.name!r}: {name}", getattr(self, name))

    def may_read(self, store: str) -> bool:
        """Whether it may read anything in a store of that name."""
        return self.stores is None or store in self.stores

    def check_store(self, store: str) -> None:
        """Insist on `may_read`.

        Raises:
            Forbidden: If it may not.
        """
        if not self.may_read(store):
            raise Forbidden(f"store {store!r} is not open to tenant {self.name!r}")

    def check_objects(self, store: str, dataset: Dataset, ids: Sequence[int]) -> None:
        """Every one of these samples must lie where the tenant may read.

        Which samples do is worked out once for a dataset; a call then costs one look-up a sample, or none.

        Args:
            store: The name of the dataset's store.
            dataset: An open one.
            ids: Rows of its index.

        Raises:
            Forbidden: If one does not, or none of the dataset's does, whatever is asked for. It names no
                object: others' are nobody's business.
        """
        self.check_store(store)
        if self.stores is None:
            return
        outside = _samples_outside(dataset, tuple(map(check_prefix, self.stores[store])))
        if outside is None:
            return
        rows = np.asarray(ids, dtype=np.int64).reshape(-1)
        rows = rows[(rows >= 0) & (rows < len(outside))]  # others are no samples, and somebody else's error
        if outside[rows].any() or outside.all():
            raise Forbidden(
                f"dataset {dataset.digest} has samples outside what tenant {self.name!r} may read in store "
                f"{store!r}"
            )

    def _check_ways_in(self) -> None:
        for digest in self.token_hashes:
            if not valid_digest(digest):  # not repeated: it may be a token, put there by mistake
                raise ConfigError(
                    f"tenant {self.name!r}: a token hash is 64 lower-case hex digits, the token's SHA-256 as "
                    "'upriver token' prints it"
                )
        for name in self.certificates:
            if not name.strip() or not name.isprintable():
                raise ConfigError(f"tenant {self.name!r}: a certificate's name is plain text, got {name!r}")

    def _check_stores(self) -> None:
        for store, prefixes in (self.stores or {}).items():
            if not valid_store_name(store):
                raise ConfigError(f"tenant {self.name!r}: no store can be called {store!r}")
            if not prefixes:
                raise ConfigError(
                    f'tenant {self.name!r}: say what of store {store!r} it may read, "" for all of it'
                )
            for prefix in prefixes:
                try:
                    check_prefix(prefix)
                except ConfigError as error:
                    raise ConfigError(f"tenant {self.name!r}, store {store!r}: {error}") from None


ANYONE = Tenant(name="anyone")
"""Everybody, where the operator tells nobody apart."""


class Tenants:
    """All tenants of a server.

    Args:
        tenants: Each with its own name, tokens and certificates.

    Raises:
        ConfigError: If two share a name, a token or a certificate.
    """

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        self._tenants = tuple(tenants)
        _each_its_own((tenant.name, tenant) for tenant in self._tenants)
        self._by_hash = _each_its_own(
            ((digest, tenant) for tenant in self._tenants for digest in tenant.token_hashes),
            "tenants {} and {} have a token hash in common; a token says who asks",
        )
        self._by_certificate = _each_its_own(
            ((name, tenant) for tenant in self._tenants for name in tenant.certificates),
            "tenants {} and {} have a certificate in common; a certificate says who asks",
        )

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def by_token(self, token: str) -> Tenant | None:
        """Whose token this is.

        The look-up compares hashes, and how far those agree tells nothing of a token; the one that is found
        is compared in constant time all the same.
        """
        digest = hash_token(token)
        tenant = self._by_hash.get(digest)
        if tenant is None:
            return None
        matches = [hmac.compare_digest(digest, known) for known in tenant.token_hashes]
        return tenant if any(matches) else None

    def by_certificate(self, name: str) -> Tenant | None:
        """Whom a certificate of that name stands for."""
        return self._by_certificate.get(name)


def missing_folders(tenants: Iterable[Tenant], stores: Mapping[str, Store]) -> list[str]:
    """What tenants may read and is not there, in words; a slip, as a rule, but it may come later.

    Only in ``file://`` stores: others would have to be asked for each.
    """
    roots = {name: urlsplit(store.uri) for name, store in stores.items()}
    return [
        f"tenant {tenant.name!r} may read {folder!r} in store {name!r}, where there is nothing of that name"
        for tenant in tenants
        for name, folders in (tenant.stores or {}).items()
        for folder in folders
        if roots[name].scheme == "file"
        and not os.path.exists(os.path.join(unquote(roots[name].path), folder))
    ]


def hash_token(token: str) -> str:
    """What a server keeps of a token: its SHA-256 in hex. Enough for tokens that are random, as ours are."""
    return hashlib.sha256(token.encode()).hexdigest()


def require_count(name: str, value: object) -> None:
    """Check a number of things once, at the border.

    Raises:
        ConfigError: If it is no whole number, or none at all.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def _each_its_own(
    pairs: Iterable[tuple[str, Tenant]], clash: str = "two tenants are called {}"
) -> dict[str, Tenant]:
    found: dict[str, Tenant] = {}
    for key, tenant in pairs:
        other = found.setdefault(key, tenant)
        if other is not tenant:
            raise ConfigError(clash.format(repr(other.name), repr(tenant.name)))
    return found


def outside_nbytes(dataset: Dataset) -> int:
    """Memory of what is kept beside a dataset's index for tenants that may not read all of it."""
    return sum(rows.nbytes for rows in _outside.get(dataset, {}).values() if rows is not None)


def _samples_outside(dataset: Dataset, prefixes: tuple[str, ...]) -> _Rows | None:
    known = _outside.setdefault(dataset, {})
    if prefixes not in known:
        known[prefixes] = None if "" in prefixes else _find_outside(dataset, prefixes)
    return known[prefixes]


def _find_outside(dataset: Dataset, prefixes: tuple[str, ...]) -> _Rows | None:
    """Each object's name is looked at once, however many samples it holds."""
    objects = dataset.objects
    outside = ~inside(objects.dictionary, prefixes)[objects.indices.to_numpy(zero_copy_only=False)]
    return outside if outside.any() else None


def inside(names: pa.Array, prefixes: tuple[str, ...]) -> _Rows:
    """Which of these objects are one of the prefixes, or lie in it as in a folder."""
    found = np.zeros(len(names), dtype=np.bool_)
    for prefix in prefixes:
        found |= pc.equal(names, prefix).to_numpy(zero_copy_only=False)
        found |= pc.starts_with(names, pattern=f"{prefix}/").to_numpy(zero_copy_only=False)
    return found
