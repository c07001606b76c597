"""torch's own DataLoader: workers of any kind, another augmented variant every epoch."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from tpucache import CachedDataset


def main(cache: str, workers: str = "fork") -> None:
    train = CachedDataset(cache, variant="epoch")
    loader = DataLoader(
        train,
        batch_size=32,
        shuffle=True,
        num_workers=min(2, len(os.sched_getaffinity(0))),  # torch warns of more workers than cores
        persistent_workers=True,
        multiprocessing_context=workers,  # fork, spawn or forkserver
    )
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, len(train.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for epoch in range(2):
        train.set_epoch(epoch)  # workers see it, too, also those that persist
        for images, labels in loader:  # uint8 (batch, 3, height, width); int64 (batch,)
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(images)
    print(f"{seen} images seen")


if __name__ == "__main__":  # spawned workers import this file
    main(*sys.argv[1:])
