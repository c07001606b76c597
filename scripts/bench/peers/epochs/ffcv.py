"""FFCV: its DatasetWriter and its Loader, with crops and flips as in its ImageNet example."""

from __future__ import annotations

from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image

from scripts.bench.peers.epochs.running import Task, run

_MEAN, _STD = np.array([0.485, 0.456, 0.406]) * 255, np.array([0.229, 0.224, 0.225]) * 255
_LONGER: float = 4 / 3  # the side that FFCV limits is the longer one


class _Photographs:
    def __init__(self, task: Task) -> None:
        self.files, self.labels = task.files()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            return image.convert("RGB"), self.labels[index]


def make(task: Task) -> Any:
    path = task.folder / "photographs.beton"
    if not path.exists():
        task.folder.mkdir(parents=True)
        image = RGBImageField(write_mode=task.way, max_resolution=round(task.side * _LONGER), jpeg_quality=90)
        photographs = _Photographs(task)
        writer = DatasetWriter(str(path), {"image": image, "label": IntField()}, num_workers=task.workers)
        # Its chunks of 100 would leave a worker idle at the end of few photographs.
        writer.from_indexed_dataset(photographs, chunksize=min(100, max(1, len(photographs) // 32)))
    return Loader(
        str(path),
        batch_size=task.batch,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((task.size, task.size)),
                RandomHorizontalFlip(),
                NormalizeImage(_MEAN, _STD, np.float32),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )


if __name__ == "__main__":
    run(make)
