"""Share the data and the plain losses of the tests of whole jobs."""

from tests.finetune.conftest import data, near, plain

__all__ = ["data", "near", "plain"]
