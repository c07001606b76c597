"""MosaicML Streaming: MDS shards of arrays of a fixed shape, its leanest encoding, uncompressed and local."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from torch.utils.data import DataLoader
from worker import BATCH, PASSES, SIZE, Batches, load, run


def _without_torchvision() -> None:
    """Stand in for torchvision where its build is not torch's: streaming imports three names that are not used here."""
    datasets, functional = ModuleType("torchvision.datasets"), ModuleType("torchvision.transforms.functional")
    datasets.VisionDataset, functional.to_tensor = type("VisionDataset", (), {}), None
    modules = (ModuleType("torchvision"), ModuleType("torchvision.transforms"), datasets, functional)
    sys.modules.update({module.__name__: module for module in modules})


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    _without_torchvision()

from streaming import MDSWriter, StreamingDataset  # noqa: E402


def write(data: Path, folder: Path) -> None:
    columns = {"image": f"ndarray:uint8:{SIZE},{SIZE},3", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for image, label in zip(*load(data), strict=True):
            writer.write({"image": np.array(image), "label": int(label)})


def batches(data: Path, folder: Path, workers: int) -> Batches:
    samples = PASSES * len(load(data)[1])
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, epoch_size=samples)
    loader = DataLoader(dataset, BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield batch["image"], batch["label"]


if __name__ == "__main__":
    run(batches, write)
