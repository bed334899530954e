"""Define all errors that a user can meet, each with a stable code that also travels over the wire.

An error names its subject, the allowed and the actual value, and a remedy if one is known.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class UpriverError(Exception):
    """Root of all errors raised on purpose.

    Attributes:
        code: Stable machine-readable name, the same in Python, in JSON and on the wire.
    """

    code = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by content: constructors of subclasses have other parameters than `args`."""
        return _with_args, (type(self), self.args), self.__dict__


class ConfigError(UpriverError, ValueError):
    """An argument, option or configuration value is not allowed."""

    code = "bad_config"


class StoreError(UpriverError):
    """The object store could not be read or written."""

    code = "store"


class ObjectNotFound(StoreError):
    """A named object is not in the store."""

    code = "not_found"


class AccessDenied(StoreError):
    """A store refuses these credentials.

    S3 reports a missing object this way as well, to clients that may not list the bucket. On the wire it is a
    plain store error.
    """


class ObjectChanged(StoreError):
    """An object is no longer the one that was indexed or looked up: its ETag differs."""

    code = "object_changed"


class Damaged(StoreError):
    """An object repeatedly has another checksum than was written."""

    code = "damaged"


class StorageFull(StoreError):
    """A tenant has reached its storage limit, or a store's disk is full."""

    code = "storage_full"


class DatasetError(UpriverError):
    """A dataset cannot be indexed or used as asked."""

    code = "bad_dataset"


class BadSample(DatasetError):
    """One stored sample cannot be decoded into a tensor.

    Attributes:
        sample: Row of the sample in the dataset's index.
        object_name: Object that holds the sample.
        reason: Problem of the sample.
    """

    code = "bad_sample"

    def __init__(self, *, sample: int, object_name: str, reason: str) -> None:
        super().__init__(f"sample {sample} in object {object_name!r}: {reason}")
        self.sample = sample
        self.object_name = object_name
        self.reason = reason


class CodeFailed(DatasetError):
    """A user's code raised in a worker, or returned a value that cannot be sent.

    Attributes:
        trace: Traceback in the worker; empty if there is none.
    """

    code = "code_failed"

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class ModelError(UpriverError):
    """A model cannot be used as asked (nothing frozen, everything frozen, unknown module)."""

    code = "bad_model"


class CaptureError(ModelError):
    """A model could not be captured or cut; the message says why. The model can run unsplit.

    Attributes:
        module: Module that is the reason, if another cut avoids it.
    """

    code = "not_captured"

    def __init__(self, message: str, *, module: str | None = None) -> None:
        super().__init__(message)
        self.module = module


class FrozenChanged(ModelError):
    """A frozen parameter or buffer changed after the job's start, or a weight after its capture."""

    code = "frozen_changed"


class ProgramError(UpriverError):
    """A program file is damaged, too large, of another schema, or holds something not allowed."""

    code = "bad_program"


class ProgramNotFound(ProgramError):
    """No program of that digest is known here."""

    code = "program_not_found"


class ProtocolError(UpriverError):
    """A frame or message does not follow the protocol, or follows another version."""

    code = "protocol"


class TooLarge(ProtocolError):
    """A request has more bytes than this server accepts."""

    code = "too_large"


class NotAuthorized(UpriverError):
    """The request carries no valid token."""

    code = "not_authorized"


class Forbidden(UpriverError):
    """The client is known but may not access the requested resource."""

    code = "forbidden"


class Overloaded(UpriverError):
    """The server has no room for the request now.

    Attributes:
        retry_after_s: Seconds after which to retry.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Busy(Overloaded):
    """The server already runs one such task and runs one at a time."""

    code = "busy"


class QuotaExceeded(Overloaded):
    """A tenant has reached its limit of running or waiting requests. Other tenants are not affected."""

    code = "quota"


class DoesNotFit(UpriverError):
    """A request needs more memory than the server has for requests, even when idle."""

    code = "does_not_fit"


class DeadlineExceeded(UpriverError):
    """A request exceeded its deadline."""

    code = "deadline"


class Cancelled(UpriverError):
    """The caller has cancelled the operation."""

    code = "cancelled"


class WorkerCrashed(UpriverError):
    """A compute worker died while it worked on a request."""

    code = "worker_crashed"


class ServerUnavailable(UpriverError):
    """A server did not respond, stopped responding, or closed the connection early."""

    code = "unavailable"


class NotExact(UpriverError):
    """Two tiers do not give the same bits, so ``exact="bitwise"`` cannot be promised."""

    code = "not_exact"


class NoFeasibleCut(UpriverError):
    """No cut fits. The message says which memory is short and by how much."""

    code = "no_feasible_cut"


def _with_args(kind: type[UpriverError], args: tuple[Any, ...]) -> UpriverError:
    """Make an error without its constructor."""
    return kind.__new__(kind, *args)


def bare(error: _Error) -> _Error:
    """Remove traceback, cause and context from an error that is about to reach its receiver.

    Its frames refer to the waiting callers, with all the memory of theirs, and these often refer to the
    error. They would stay until a garbage collection, which may take hours. The same holds for the errors
    from which it was made, to which a library may refer.
    """
    chain: list[BaseException] = [error]
    while chain:
        each = chain.pop()
        chain += [made_from for made_from in (each.__cause__, each.__context__) if made_from is not None]
        each.__cause__ = each.__context__ = each.__traceback__ = None
    return error
