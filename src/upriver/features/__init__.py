"""Keep rows: the values that a stretch of the chain gives for a sample, in memory and on disk.

A kept row has the bits, shapes and strides that the stretch gave. A row that is lost or damaged is missing,
never wrong.
"""

from __future__ import annotations

from upriver.features.disk import DiskFeatures, FeatureFolder
from upriver.features.folder import StretchFolder
from upriver.features.memory import MemoryFeatures
from upriver.features.row_form import Row
from upriver.features.stretch import Stretch, row_key

__all__ = ["DiskFeatures", "FeatureFolder", "MemoryFeatures", "Row", "Stretch", "StretchFolder", "row_key"]
