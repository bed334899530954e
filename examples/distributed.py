"""Train one model in two processes: torchrun --nproc-per-node 2 examples/distributed.py FOLDER."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import upriver

distributed.init_process_group("gloo")
rank, folder = distributed.get_rank(), Path(sys.argv[1])
if rank == 0:  # noise, with stripes across or down
    for number in range(64):
        pixels = np.random.default_rng(number).integers(0, 128, (32, 32, 3), dtype=np.uint8)
        stripes = pixels[::4] if number % 2 else pixels[:, ::4]
        stripes += 127
        path = folder / "train" / ("across" if number % 2 else "down")
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path / f"{number}.png")
distributed.barrier()
dataset = upriver.index(folder.as_uri(), "train", stages=[upriver.Decode(), upriver.Normalize()])

torch.manual_seed(0)
frozen = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(4))
model = torch.nn.Sequential(frozen.requires_grad_(False), torch.nn.Flatten(), torch.nn.Linear(8 * 7 * 7, 2))
optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
criterion = torch.nn.CrossEntropyLoss()

with upriver.connect() as near:  # an embedded server each, or connect("http://...") to share one
    job = near.finetune(DistributedDataParallel(model), dataset, batch_size=8)  # a shard of the epoch each
    for _ in range(5):
        for inputs, targets in job:
            criterion(job(inputs), targets).backward()  # gradients are averaged over the processes
            optimizer.step()
            optimizer.zero_grad()
    accuracy = job.evaluate(dataset, lambda outputs, labels: (outputs.argmax(1) == labels).float().mean())
    samples = sum(job.report.samples.values()) - len(dataset)
    weights = model[2].weight.detach().sum()
    print(f"rank {rank}: {samples} samples, accuracy {accuracy:.2f}, weights {weights:.6f}")
distributed.destroy_process_group()
