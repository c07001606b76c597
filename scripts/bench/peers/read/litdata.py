"""LitData: arrays in chunks of 64 MB, its default, through StreamingDataLoader.

`batch_decode=0` decodes items one by one: of arrays that is ten times as fast as the default, which decodes a window
of 256 for each shuffled item.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import litdata
import numpy as np

from scripts.bench.peers.reading import BATCH, PASSES, Batches, load, run


def _sample(data: Path, index: int) -> dict[str, Any]:
    images, labels = load(data)
    return {"image": np.array(images[index]), "label": int(labels[index])}


def write(data: Path, folder: Path) -> None:
    litdata.optimize(
        fn=functools.partial(_sample, data),
        inputs=list(range(len(load(data)[1]))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=2,
    )


def batches(_data: Path, folder: Path, workers: int) -> Batches:
    dataset = litdata.StreamingDataset(
        str(folder), shuffle=True, drop_last=True, subsample=float(PASSES), batch_decode=0
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    while True:
        for batch in loader:
            yield batch["image"], batch["label"]


if __name__ == "__main__":
    run(batches, write)
