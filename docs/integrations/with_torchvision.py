"""torchvision: one of its models, and its transforms of images that are on the device already, a batch at a time."""

import sys

import torch
from torch.nn import functional
from torchvision.models import mobilenet_v3_small
from torchvision.transforms import v2

from tpucache import CachedDataset, CachedLoader


def main(cache: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = CachedDataset(cache, variant="epoch")
    loader = CachedLoader(train, 32, shuffle=True, drop_last=True)
    statistics = train.manifest.statistics
    transforms = v2.Compose(
        [
            v2.RandomHorizontalFlip(),  # one flip for all images of the batch
            v2.ToDtype(torch.float32),
            v2.Normalize(list(statistics.mean), list(statistics.std)),
        ]
    )
    model = mobilenet_v3_small(num_classes=len(train.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    seen, total = 0, 0.0
    for epoch in range(2):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(transforms(images.to(device))), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen, total = seen + len(images), total + loss.item()
    print(f"{seen} images seen, mean loss {total / (2 * len(loader)):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
