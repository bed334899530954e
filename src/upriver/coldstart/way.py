"""What is found out of the way to a model's weights before they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

from upriver.coldstart import kept, links
from upriver.coldstart.grouping import is_whole
from upriver.coldstart.source import Source
from upriver.coldstart.stream import StreamLimits
from upriver.types import Link


def way_to(
    source: Source, near: str, policy: str, limits: StreamLimits, beside: Executor
) -> tuple[Link, Mapping[str, list[range]]]:
    """The link to some weights, and the groupings that are kept beside them.

    Neither is asked for where it would change nothing.

    Args:
        source: All weights that there are.
        near: An object in their store with a byte in it.
        policy: That will group them.
        limits: Of the stream that will bring them.
        beside: Runs one question while the other waits for its answer.

    Raises:
        StoreError: If the store cannot be read.
    """
    if not source.tensors or is_one_request(source, policy, limits):
        return links.last_known(source.store), {}
    known = beside.submit(kept.kept, source)
    link = links.link_to(source.store, near)
    return link, known.result()


def is_one_request(source: Source, policy: str, limits: StreamLimits) -> bool:
    """Whether weights are asked for in one go, however the link is."""
    return len(source.etags) == 1 and is_whole(policy, source.nbytes, limits.request_bytes)
