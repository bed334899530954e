"""Share the data and the plain losses of the tests of whole jobs."""

from tests.finetune.conftest import data, near, one_thread, plain

__all__ = ["data", "near", "one_thread", "plain"]
