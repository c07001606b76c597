"""MosaicML Streaming: MDS shards of arrays of a fixed shape, its leanest encoding, uncompressed and local."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from scripts.bench.peers.reading import BATCH, PASSES, SIZE, Batches, load, run


def _without_torchvision() -> None:
    """Stand in for torchvision where its build is not torch's: streaming imports names of it that nothing here uses."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        sys.modules[name] = module_from_spec(ModuleSpec(name, None))
    vars(sys.modules["torchvision.datasets"])["VisionDataset"] = type("VisionDataset", (), {})
    vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    _without_torchvision()

from streaming import MDSWriter, StreamingDataset  # noqa: E402  # torchvision has to be replaced before

__all__ = ["MDSWriter", "StreamingDataset"]


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
