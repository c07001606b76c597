"""WebDataset: raw arrays in tar shards, resampled without end, batched inside the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, run


def write(data: Path, folder: Path) -> None:
    with wds.ShardWriter(str(folder / "%05d.tar"), maxcount=512, verbose=0) as writer:
        for at, (image, label) in enumerate(zip(*load(data), strict=True)):
            writer.write({"__key__": f"{at:08d}", "raw": image.tobytes(), "cls": int(label)})


def _collate(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
    images = np.stack([np.frombuffer(image, np.uint8).reshape(SIZE, SIZE, 3) for image, _ in samples])
    return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])


def batches(_data: Path, folder: Path, workers: int) -> Batches:
    dataset = (
        wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), resampled=True, shardshuffle=False)
        .shuffle(1000)
        .to_tuple("raw", "cls")
        .batched(BATCH, partial=False, collation_fn=_collate)
    )
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers))


if __name__ == "__main__":
    run(batches, write)
