"""Provide a drop-in for PyTorch's loader: the same batches in the same order, with samples made anywhere."""

from upriver.dataloader.datasets.named import NamedDataset, dataset
from upriver.dataloader.loader import DataLoader
from upriver.dataloader.offload_stretch import Offloading
from upriver.dataloader.options import AutoOffload, RemoteWorkers

__all__ = ["AutoOffload", "DataLoader", "NamedDataset", "Offloading", "RemoteWorkers", "dataset"]
