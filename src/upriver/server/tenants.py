"""Define the users of a server, their access to stores, and their share of the server.

Only the operator's configuration creates tenants. A token identifies a tenant (the server has only its
SHA-256), or the name in a client certificate does.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from upriver.control.admission_queue import TenantShare
from upriver.errors import ConfigError, Forbidden
from upriver.protocol import valid_digest, valid_store_name
from upriver.store import Store
from upriver.store.names import check_prefix
from upriver.text import printable
from upriver.types import require_finite

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.pipeline import Dataset

_Rows = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Range of weights. Between its ends one tenant gets one turn in a million while the other has work. A
smaller share is next to none, and a mistake."""

_outside: weakref.WeakKeyDictionary[Dataset, dict[tuple[str, ...], _Rows | None]] = (
    weakref.WeakKeyDictionary()
)
"""Rows outside each open dataset's allowed prefixes, or None if all rows lie inside. The rows follow from
dataset and prefixes alone, and are dropped with the dataset."""


def check_tenant_name(name: str) -> str:
    """Return a tenant's name after a check; raise `ConfigError` if the name is invalid."""
    if not valid_store_name(name):
        raise ConfigError(
            "a tenant's name has 1 to 64 letters, digits, '.', '_', '-', the first a letter or digit, got "
            f"{printable(repr(name), 80)}"
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant(TenantShare):
    """One user of a server: a team, a project, a person.

    Attributes:
        token_hashes: SHA-256 of its tokens, in hex. Several allow a token to be replaced without
            interruption.
        certificates: Names in client certificates that identify it.
        stores: Folders or objects that it may read, by store ("" for all of the store); None: every store.
        program_bytes: Programs kept for it between requests; None: the server's limit.
        stored_bytes: Programs, weights and kept features that it may have in a store; None: the server's
            limit.
    """

    token_hashes: tuple[str, ...] = field(default=(), repr=False)
    certificates: tuple[str, ...] = ()
    stores: Mapping[str, tuple[str, ...]] | None = field(default=None, hash=False)
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
        """Return whether the tenant may read anything in a store."""
        return self.stores is None or store in self.stores

    def check_store(self, store: str) -> None:
        """Raise `Forbidden` unless the tenant may read in a store."""
        if not self.may_read(store):
            raise Forbidden(f"store {store!r} is not open to tenant {self.name!r}")

    def check_objects(self, store: str, dataset: Dataset, ids: Sequence[int]) -> None:
        """Check that the tenant may read the objects of all these samples.

        The readable rows of a dataset are computed once. A call then costs one look-up per sample, or none.

        Args:
            ids: Rows of its index.

        Raises:
            Forbidden: If the tenant may not read one of the samples, or may read none of the dataset. The
                message names no object, as others' objects are private.
        """
        self.check_store(store)
        if self.stores is None:
            return
        outside = _samples_outside(dataset, tuple(map(check_prefix, self.stores[store])))
        if outside is None:
            return
        rows = np.asarray(ids, dtype=np.int64).reshape(-1)
        rows = rows[(rows >= 0) & (rows < len(outside))]  # other rows are no samples, and raise elsewhere
        if outside[rows].any() or outside.all():
            raise Forbidden(
                f"dataset {dataset.digest} has samples outside what tenant {self.name!r} may read in store "
                f"{store!r}"
            )

    def _check_ways_in(self) -> None:
        for digest in self.token_hashes:
            if not valid_digest(digest):  # not repeated: it may be a token, entered by mistake
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
                    f'tenant {self.name!r}: name the prefixes of store {store!r} that it may read, "" for all'
                )
            for prefix in prefixes:
                try:
                    check_prefix(prefix)
                except ConfigError as error:
                    raise ConfigError(f"tenant {self.name!r}, store {store!r}: {error}") from None


ANYONE = Tenant(name="anyone")
"""The tenant of every client on a server without tenants."""


class Tenants:
    """All tenants of a server.

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
        """Return the tenant of a token, or None.

        The look-up compares hashes, and the length of their common prefix reveals nothing about a token. The
        hash that is found is compared in constant time all the same.
        """
        digest = hash_token(token)
        tenant = self._by_hash.get(digest)
        if tenant is None:
            return None
        matches = [hmac.compare_digest(digest, known) for known in tenant.token_hashes]
        return tenant if any(matches) else None

    def by_certificate(self, name: str) -> Tenant | None:
        """Return the tenant of a certificate's name, or None."""
        return self._by_certificate.get(name)


def missing_folders(tenants: Iterable[Tenant], stores: Mapping[str, Store]) -> list[str]:
    """Describe folders that tenants may read and that do not exist.

    That is usually a mistake, but the folders may be created later. Only ``file://`` stores are checked:
    others would need a request per folder.
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
    """Return a token's SHA-256 in hex, which the server keeps.

    A plain hash is enough for random tokens, as upriver's are.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def require_count(name: str, value: object) -> None:
    """Check once, at the border, that a count is a whole number >= 1; else raise `ConfigError`."""
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
    """Return the bytes kept with a dataset's index for tenants that may read only a part of it."""
    return sum(rows.nbytes for rows in _outside.get(dataset, {}).values() if rows is not None)


def _samples_outside(dataset: Dataset, prefixes: tuple[str, ...]) -> _Rows | None:
    known = _outside.setdefault(dataset, {})
    if prefixes not in known:
        known[prefixes] = None if "" in prefixes else _find_outside(dataset, prefixes)
    return known[prefixes]


def _find_outside(dataset: Dataset, prefixes: tuple[str, ...]) -> _Rows | None:
    """Compute the rows outside. Each object's name is checked once, however many samples the object holds."""
    objects = dataset.objects
    outside = ~inside(objects.dictionary, prefixes)[objects.indices.to_numpy(zero_copy_only=False)]
    return outside if outside.any() else None


def inside(names: pa.Array, prefixes: tuple[str, ...]) -> _Rows:
    """Return a mask of the objects that equal a prefix, or lie in it as in a folder."""
    import pyarrow.compute as pc

    found = np.zeros(len(names), dtype=np.bool_)
    for prefix in prefixes:
        found |= pc.equal(names, prefix).to_numpy(zero_copy_only=False)
        found |= pc.starts_with(names, pattern=f"{prefix}/").to_numpy(zero_copy_only=False)
    return found
