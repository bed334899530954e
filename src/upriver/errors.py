"""Every error a user can meet, each with a stable code that also travels over the wire.

An error names the thing, says what was allowed and what was got, and where it helps, what to do.
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
        """Pickle by what the error holds: constructors of its kinds take other arguments than `args`."""
        return _with_args, (type(self), self.args), self.__dict__


class ConfigError(UpriverError, ValueError):
    """An argument, option or configuration value outside what is allowed."""

    code = "bad_config"


class StoreError(UpriverError):
    """The object store could not be read or written."""

    code = "store"


class ObjectNotFound(StoreError):
    """A named object is not in the store."""

    code = "not_found"


class AccessDenied(StoreError):
    """A store refuses these credentials.

    S3 says so of what is not there, too, to those who may not list the bucket. Over the wire it is a store
    error as any other.
    """


class ObjectChanged(StoreError):
    """An object is no longer the one that was indexed (its ETag differs)."""

    code = "object_changed"


class Damaged(StoreError):
    """What a store gives for an object has another checksum than was written, each time it is asked."""

    code = "damaged"


class StorageFull(StoreError):
    """A tenant has stored as much as it may, or a store's disk is full."""

    code = "storage_full"


class DatasetError(UpriverError):
    """A dataset cannot be indexed or used as asked."""

    code = "bad_dataset"


class BadSample(DatasetError):
    """One stored sample cannot be turned into a tensor.

    Attributes:
        sample: Its row in the dataset's index.
        object_name: The object that holds it.
        reason: What is wrong with it.
    """

    code = "bad_sample"

    def __init__(self, *, sample: int, object_name: str, reason: str) -> None:
        super().__init__(f"sample {sample} in object {object_name!r}: {reason}")
        self.sample = sample
        self.object_name = object_name
        self.reason = reason


class CodeFailed(DatasetError):
    """A user's own code raised where a worker ran it, or made what cannot be sent.

    Attributes:
        trace: The traceback there; empty where there is none.
    """

    code = "code_failed"

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class ModelError(UpriverError):
    """A model cannot be used as asked (nothing frozen, everything frozen, unknown module)."""

    code = "bad_model"


class CaptureError(ModelError):
    """A model could not be captured or cut; the reason says why, and it can run unsplit.

    Attributes:
        module: The one that is the reason, where another cut leaves it out.
    """

    code = "not_captured"

    def __init__(self, message: str, *, module: str | None = None) -> None:
        super().__init__(message)
        self.module = module


class FrozenChanged(ModelError):
    """A frozen parameter or buffer changed after the job had started, or a weight after its capture."""

    code = "frozen_changed"


class ProgramError(UpriverError):
    """A program file is damaged, too large, of another schema, or holds something not allowed."""

    code = "bad_program"


class ProgramNotFound(ProgramError):
    """No program of that digest is known here."""

    code = "program_not_found"


class ProtocolError(UpriverError):
    """A frame or message does not follow the protocol, or follows another version of it."""

    code = "protocol"


class TooLarge(ProtocolError):
    """A request has more bytes than this server takes."""

    code = "too_large"


class NotAuthorized(UpriverError):
    """The request carries no token, or one that does not open this door."""

    code = "not_authorized"


class Forbidden(UpriverError):
    """Whoever asks is known here, but what is asked for is not theirs."""

    code = "forbidden"


class Overloaded(UpriverError):
    """The server has no room for the request now.

    Attributes:
        retry_after_s: Seconds after which to ask again.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Busy(Overloaded):
    """The server does one such thing at a time, and is at it."""

    code = "busy"


class QuotaExceeded(Overloaded):
    """A tenant has as much in progress or waiting as it may; the server takes requests of others."""

    code = "quota"


class DoesNotFit(UpriverError):
    """A request takes more memory than the server has for requests, whoever else is there."""

    code = "does_not_fit"


class DeadlineExceeded(UpriverError):
    """A request took longer than it may."""

    code = "deadline"


class Cancelled(UpriverError):
    """Whoever asked for something no longer wants it."""

    code = "cancelled"


class WorkerCrashed(UpriverError):
    """A compute worker died while it worked on a request."""

    code = "worker_crashed"


class ServerUnavailable(UpriverError):
    """A server did not answer, stopped answering, or broke off in the middle."""

    code = "unavailable"


class NotExact(UpriverError):
    """Two tiers do not give the same bits, so ``exact="bitwise"`` cannot be promised."""

    code = "not_exact"


class NoFeasibleCut(UpriverError):
    """No cut fits: the message says which memory is short and by how much."""

    code = "no_feasible_cut"


def _with_args(kind: type[UpriverError], args: tuple[Any, ...]) -> UpriverError:
    """Make an error without its constructor."""
    return kind.__new__(kind, *args)


def bare(error: _Error) -> _Error:
    """The error alone, at the end of its way.

    Who waited for it is in its frames, with all the memory of theirs, and often has it: they would stay until
    Python collects garbage, which may be hours. So would those of the errors that it was made from, which a
    library may hold on to.
    """
    chain: list[BaseException] = [error]
    while chain:
        each = chain.pop()
        chain += [made_from for made_from in (each.__cause__, each.__context__) if made_from is not None]
        each.__cause__ = each.__context__ = each.__traceback__ = None
    return error
