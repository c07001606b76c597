"""FFCV: .beton files of raw pixels and of JPEG; os_cache, as its tuning guide says of data that fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, repeated, run


class _Samples:
    def __init__(self, data: Path) -> None:
        self.images, self.labels = load(data)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.array(self.images[index]), int(self.labels[index])


def write(data: Path, folder: Path) -> None:
    fields = {
        "raw": RGBImageField(write_mode="raw"),
        "jpeg": RGBImageField(write_mode="jpg", max_resolution=SIZE, jpeg_quality=95),
        "jpeg90": RGBImageField(write_mode="jpg", max_resolution=SIZE, jpeg_quality=90),
    }
    for kind, image in fields.items():
        writer = DatasetWriter(str(folder / f"{kind}.beton"), {"image": image, "label": IntField()}, num_workers=2)
        writer.from_indexed_dataset(_Samples(data))


def batches(data: Path, folder: Path, kind: str, threads: int, order: str) -> Batches:
    samples = len(load(data)[1])
    loader = Loader(
        str(folder / f"{kind}.beton"),
        batch_size=BATCH,
        num_workers=threads,
        order=OrderOption[order],
        os_cache=True,
        drop_last=True,
        # The quasi-random order takes each sample once.
        indices=repeated(samples) if order == "RANDOM" else None,
        pipelines={
            "image": [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    while True:
        yield from loader


if __name__ == "__main__":
    run(batches, write)
