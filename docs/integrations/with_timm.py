"""timm's loop pieces: its prefetcher normalises and erases on the device, its mixup mixes, its loss and optimizer."""

import sys

import timm
import torch
from timm.data import Mixup
from timm.data.loader import PrefetchLoader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

from tpucache import CachedDataset, CachedLoader


def main(cache: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = CachedDataset(cache, variant="epoch")
    statistics = train.manifest.statistics  # of the clean images, 0 to 255
    loader = PrefetchLoader(
        CachedLoader(train, 32, shuffle=True, drop_last=True),
        mean=[mean / 255 for mean in statistics.mean],
        std=[std / 255 for std in statistics.std],
        re_prob=0.25,
        device=device,
    )
    model = timm.create_model("test_resnet", num_classes=len(train.classes)).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    mixup = Mixup(mixup_alpha=0.2, num_classes=len(train.classes))
    loss_of = SoftTargetCrossEntropy()
    seen = 0
    for _ in range(2):
        for images, labels in loader:
            images, targets = mixup(images, labels)
            loss = loss_of(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(images)
    print(f"{seen} images seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
