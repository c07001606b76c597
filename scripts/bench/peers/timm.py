"""timm: loaders, optimizer, schedule and augmentation with the defaults of its training script.

The script itself is not in the package. Its defaults (github.com/huggingface/pytorch-image-models, train.py): batch
128, SGD with momentum 0.9, weight decay 2e-5, a rate of 0.1 for a batch of 256, scaled, cosine with 5 epochs of ramp,
random resized crops, flips, colour jitter 0.4.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.training import Task, accuracy, learner, network

BATCH, WORKERS, RAMP = 128, 2, 5


def learn(task: Task, epochs: int) -> dict[str, Any]:
    sets = [create_dataset("", folder, split="") for folder in (task.train, task.valid)]
    shared = {"batch_size": BATCH, "num_workers": WORKERS, "use_prefetcher": False, "device": torch.device("cpu")}
    size = (3, task.size, task.size)
    loader = create_loader(sets[0], size, is_training=True, color_jitter=0.4, hflip=0.5, **shared)
    valid = create_loader(sets[1], size, **shared)
    model = network(task)
    rate = 0.1 * BATCH / 256
    optimizer = create_optimizer_v2(model, opt="sgd", lr=rate, weight_decay=2e-5, momentum=0.9)
    ramp = min(RAMP, epochs // 2)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=ramp, warmup_lr_init=1e-5, warmup_prefix=False)
    images = 0
    for epoch in range(epochs):
        scheduler.step(epoch)
        for batch, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            images += len(batch)
    return {"accuracy": accuracy(model, valid), "images": images}


if __name__ == "__main__":
    serve(race=learner(learn))
