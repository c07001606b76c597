"""slipstream: raw 4:2:0 planes, which it makes of JPEG files of quality 95 and turns into RGB on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from slipstream import SlipstreamDataset, SlipstreamLoader
from slipstream.decoders import DecodeCenterCrop

from scripts.bench.peers.reading import BATCH, PASSES, SIZE, Batches, load, run


def write(data: Path, folder: Path) -> None:
    for at, (image, label) in enumerate(zip(*load(data), strict=True)):
        path = folder / "source" / f"{label:04d}" / f"{at:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image)).save(path, quality=95, subsampling=2)


def batches(data: Path, folder: Path, kind: str, threads: int) -> Batches:
    dataset = SlipstreamDataset(local_dir=str(folder / "source"), cache_dir=str(folder / "cache"), decode_images=False)
    loader = SlipstreamLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        indices=np.tile(np.arange(len(load(data)[1])), PASSES),
        pipelines={"image": [DecodeCenterCrop(SIZE, num_threads=threads)]},
        exclude_fields=["path"],
        image_format=kind,
        verbose=False,
    )
    while True:
        for batch in loader:
            yield batch["image"], batch["label"]


if __name__ == "__main__":
    run(batches, write, lossy=True)
