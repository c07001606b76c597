"""FFCV: .beton files of raw pixels and of JPEG; os_cache, as its tuning guide says of data that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image, ImageOps

from scripts.bench.peers.building import Work, builder, files
from scripts.bench.peers.epochs import Task, taker
from scripts.bench.peers.protocol import Setting, serve
from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, reader, repeated

_MEAN, _STD = np.array([0.485, 0.456, 0.406]) * 255, np.array([0.229, 0.224, 0.225]) * 255
_LONGER: float = 4 / 3  # the side that FFCV limits is the longer one


class _Samples:
    """Pairs of what `read` returns for a number, and a label."""

    def __init__(self, read: Callable[[int], Any], labels: list[int]) -> None:
        self._read, self._labels = read, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._read(index), self._labels[index]


def _write(path: Path, samples: _Samples, workers: int, **options: Any) -> None:
    fields = {"image": RGBImageField(**options), "label": IntField()}
    # Its chunks of 100 would leave a worker idle at the end of as few images as these are.
    chunk = min(100, max(1, len(samples) // 32))
    DatasetWriter(str(path), fields, num_workers=workers).from_indexed_dataset(samples, chunksize=chunk)


def _open(path: Path, batch: int, threads: int, decode: list[Any], **options: Any) -> Any:
    pipelines = {"image": [*decode, ToTensor(), ToTorchImage()], "label": [IntDecoder(), ToTensor()]}
    return Loader(str(path), batch_size=batch, num_workers=threads, os_cache=True, pipelines=pipelines, **options)


def write(data: Path, folder: Path) -> None:
    images, labels = load(data)
    samples = _Samples(lambda index: np.array(images[index]), labels.tolist())
    _write(folder / "raw.beton", samples, 2, write_mode="raw")
    _write(folder / "jpeg.beton", samples, 2, write_mode="jpg", max_resolution=SIZE, jpeg_quality=90)


def batches(data: Path, folder: Path, kind: str, threads: int) -> Batches:
    options = {"order": OrderOption.RANDOM, "drop_last": True, "indices": repeated(len(load(data)[1]))}
    loader = _open(folder / f"{kind}.beton", BATCH, threads, [SimpleRGBImageDecoder()], **options)
    while True:
        yield from loader


def build(setting: Setting) -> Work:
    """Write raw pixels of images that the dataset has brought to their size."""
    side = setting["size"]

    def work(photographs: Path) -> None:
        paths = files(photographs)

        def fitted(index: int) -> Any:
            with Image.open(paths[index]) as image:
                return np.array(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS))

        samples = _Samples(fitted, [0] * len(paths))
        _write(Path(setting["folder"]) / "raw.beton", samples, setting["jobs"], write_mode="raw")

    return work


def crops(task: Task) -> Any:
    """Return crops and flips as in its ImageNet example."""
    path = Path(task.folder) / "photographs.beton"
    if not path.exists():
        path.parent.mkdir(parents=True)
        files, labels = task.files()
        samples = _Samples(lambda index: Image.open(files[index]).convert("RGB"), labels)
        _write(path, samples, task.workers, write_mode="raw", max_resolution=round(task.side * _LONGER))
    crop = RandomResizedCropRGBImageDecoder((task.size, task.size))
    decode = [crop, RandomHorizontalFlip(), NormalizeImage(_MEAN, _STD, np.float32)]
    return _open(path, task.batch, task.workers, decode, order=OrderOption.RANDOM, drop_last=False)


if __name__ == "__main__":
    serve(read=reader(batches, write), warmup=builder(build), epochs=taker(crops))
