"""Fine-tune near the data with an ordinary loop and two more lines. The images are made up on the spot."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import upriver

folder = Path(tempfile.mkdtemp())
for number in range(80):  # noise, with stripes across or down
    pixels = np.random.default_rng(number).integers(0, 128, (32, 32, 3), dtype=np.uint8)
    stripes = pixels[::4] if number % 2 else pixels[:, ::4]
    stripes += 127
    path = folder / ("heldout" if number < 16 else "train") / ("across" if number % 2 else "down")
    path.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path / f"{number}.png")
stages = [upriver.Decode(), upriver.Normalize()]
dataset, heldout = (upriver.index(folder.as_uri(), part, stages=stages) for part in ("train", "heldout"))

torch.manual_seed(0)
frozen = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(4))
model = torch.nn.Sequential(frozen.requires_grad_(False), torch.nn.Flatten(), torch.nn.Linear(8 * 7 * 7, 2))
optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
criterion = torch.nn.CrossEntropyLoss()

with upriver.connect() as near:  # an embedded server; or upriver.connect("http://storage-node:7000")
    job = near.finetune(model, dataset, batch_size=16)  # frozen parameters set the freeze point
    job.wait_until_split()  # only as this run is so short: it would end before the plan is made
    for epoch in range(5):
        for inputs, targets in job:  # in order, prefetched, resumable
            loss = criterion(job(inputs), targets)  # runs only the rest of `model`
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    accuracy = job.evaluate(heldout, lambda outputs, labels: (outputs.argmax(1) == labels).float().mean())
    print(f"{job.plan}\naccuracy {accuracy:.2f}, samples from {dict(job.report.samples)}")
