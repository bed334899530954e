"""Read a server's answer: check each frame against the request, and account every byte to the link."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from types import TracebackType

from upriver.errors import ProtocolError, ServerUnavailable, UpriverError
from upriver.protocol import Caps, End, Message, RunRequest, named, read_frame
from upriver.rpc.link_meter import LinkMeter
from upriver.text import said
from upriver.types import MicroBatch, Timings


class FrameReader:
    """Read the frames of an answer, and accept only those that match the request.

    Attributes:
        num_bytes: Bytes that have arrived so far.
        arriving_s: Seconds from the first byte to the last.
    """

    def __init__(self, response: http.client.HTTPResponse, *, url: str, meter: LinkMeter, caps: Caps) -> None:
        self._source = BodyStream(response, url)
        self._url, self._meter, self._caps = url, meter, caps
        self.num_bytes, self.arriving_s, self._first_at = 0, 0.0, 0.0

    def micro_batch(self, ids: Sequence[int], request: RunRequest) -> tuple[MicroBatch, Timings]:
        """Return the next micro-batch, which must hold these samples.

        Raises:
            ServerUnavailable: If the answer breaks off.
            ProtocolError: If it does not match the request.
            UpriverError: The server's error.
        """
        batch = self._frame()
        if not isinstance(batch, MicroBatch):
            raise self._unexpected(batch, "a micro-batch")
        if batch.ids != tuple(ids) or batch.position != request.stop:
            raise ProtocolError(
                f"{self._url}: asked for samples {_brief(ids)} at position {request.stop}, "
                f"got {_brief(batch.ids)} at {batch.position}"
            )
        if not set(batch.skipped) <= (set(ids) if request.on_bad_sample == "skip" else set()):
            raise ProtocolError(f"{self._url}: skipped samples {_brief(batch.skipped)} unasked")
        timings = self._frame()
        if not isinstance(timings, Timings):
            raise self._unexpected(timings, "the timings of a micro-batch")
        return batch, timings

    def end(self) -> None:
        """Check that the answer ends here.

        Raises:
            UpriverError: As for `micro_batch`.
        """
        message = self._frame()
        if not isinstance(message, End):
            raise self._unexpected(message, "the end")

    def _frame(self) -> Message:
        try:
            with Crossing(self._meter) as crossing:
                message = read_frame(self._source, self._caps, on_bytes=lambda got: self._came(got, crossing))
        except ProtocolError as error:
            raise ProtocolError(f"{self._url}: {said(str(error))}") from None
        if isinstance(message, UpriverError):
            raise message
        return message

    def _came(self, num_bytes: int, crossing: Crossing) -> None:
        began = time.perf_counter()
        crossing(num_bytes)
        if not self.num_bytes:
            self._first_at = began
        self.num_bytes += num_bytes
        self.arriving_s = time.perf_counter() - self._first_at

    def _unexpected(self, message: Message, expected: str) -> ProtocolError:
        return ProtocolError(f"{self._url}: expected {expected}, got {named(message)}")


class BodyStream:
    """An answer's body as a blocking stream for `read_frame`; an early end is an error."""

    def __init__(self, response: http.client.HTTPResponse, url: str) -> None:
        self._response = response
        self._url = url

    def readinto(self, buffer: memoryview, /) -> int:
        """Read some bytes into the buffer; return their number."""
        got = self._response.readinto(buffer)
        if not got and len(buffer):
            raise ServerUnavailable(f"{self._url}: broke off in the middle of its answer")
        return got


class Crossing:
    """Account bytes that arrive; the link is busy from the first bytes on, not while the server computes."""

    def __init__(self, meter: LinkMeter) -> None:
        self._meter = meter
        self._transfer = meter.transfer()
        self._under_way = False

    def __enter__(self) -> Crossing:
        return self

    def __call__(self, num_bytes: int) -> None:
        """Account ``num_bytes`` that have arrived."""
        if not self._under_way:
            self._under_way = True
            self._transfer.__enter__()
        self._meter.account(num_bytes, "answers")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._under_way:
            self._transfer.__exit__(None, None, None)


def _brief(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (f", … ({len(ids)})" if len(ids) > 4 else "")
