"""accelerate: the loader slices for the ranks itself, so only model and optimizer are prepared."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from tpucache import CachedDataset, CachedLoader


def main(cache: str) -> None:
    accelerator = Accelerator()
    train = CachedDataset(cache, variant="epoch")
    loader = CachedLoader(
        train,
        32,
        shuffle=True,
        drop_last=True,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, len(train.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: it would be sliced twice
    accelerator.register_for_checkpointing(loader)  # save_state and load_state keep the place in the epoch
    seen = 0
    for _ in range(2):
        for images, labels in loader:
            images, labels = images.to(accelerator.device), labels.to(accelerator.device)
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += len(images)
    if accelerator.is_main_process:
        print(f"{seen} images seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
