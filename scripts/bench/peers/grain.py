"""Grain over ArrayRecord: groups of one record, as Grain asks for, and uncompressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, reader

_LABEL_BYTES = 8


def write(data: Path, folder: Path) -> None:
    images, labels = load(data)
    writer = ArrayRecordWriter(str(folder / "samples.array_record"), "group_size:1,uncompressed")
    for image, label in zip(images, labels, strict=True):
        writer.write(label.astype("<i8").tobytes() + image.tobytes())
    writer.close()


def _parse(record: bytes) -> tuple[Any, Any]:
    image = np.frombuffer(record, np.uint8, offset=_LABEL_BYTES).reshape(SIZE, SIZE, 3)
    return image, np.frombuffer(record, "<i8", count=1)[0]


def batches(_data: Path, folder: Path, threads: int, batch: str) -> Batches:
    source = grain.sources.ArrayRecordDataSource(str(folder / "samples.array_record"))
    dataset = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(_parse)
    if batch == "in the threads":  # each makes whole batches
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        return iter(dataset.batch(BATCH, drop_remainder=True).to_iter_dataset(options))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * BATCH)
    return iter(dataset.to_iter_dataset(options).batch(BATCH, drop_remainder=True))


if __name__ == "__main__":
    serve(read=reader(batches, write))
