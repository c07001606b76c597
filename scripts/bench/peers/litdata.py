"""LitData: chunks of 64 MB, its default, through StreamingDataLoader; from a URL over its S3 client.

`batch_decode=0` decodes items one by one: of arrays that is ten times as fast as the default, which decodes a window
of 256 for each shuffled item.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import litdata
import numpy as np
from litdata.streaming import downloader

from scripts.bench.peers import streaming
from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, PASSES, Batches, load, reader

# Its faster client refuses servers without TLS, such as the benchmark's.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def _optimize(sample: Callable[[int], dict[str, Any]], samples: int, folder: Path, workers: int) -> None:
    chunk = f"{streaming.MEGABYTES}MB"
    inputs = list(range(samples))
    litdata.optimize(fn=sample, inputs=inputs, output_dir=str(folder), chunk_bytes=chunk, num_workers=workers)


def _image(data: Path, index: int) -> dict[str, Any]:
    images, labels = load(data)
    return {"image": np.array(images[index]), "label": int(labels[index])}


def write(data: Path, folder: Path) -> None:
    _optimize(functools.partial(_image, data), len(load(data)[1]), folder, 2)


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


@functools.cache
def _records(data: Path) -> list[tuple[bytes, int]]:
    return list(streaming.records(data))


def _record(data: Path, at: int) -> dict[str, Any]:
    record, label = _records(data)[at]
    return {"image": record, "label": label}


def write_records(data: Path, folder: Path) -> None:
    _optimize(functools.partial(_record, data), len(_records(data)), folder, 1)


def open_url(url: str, folder: Path, workers: int) -> Callable[[], streaming.Epoch]:
    parts = urlsplit(url)
    options = {"endpoint_url": f"{parts.scheme}://{parts.netloc}", "region_name": "us-east-1"}
    options |= {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    dataset = litdata.StreamingDataset(
        f"s3:/{parts.path}", cache_dir=str(folder), shuffle=True, storage_options=options
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=streaming.BATCH, num_workers=workers, collate_fn=len, persistent_workers=True
    )
    return lambda: iter(loader)


if __name__ == "__main__":
    serve(read=reader(batches, write), stream=streaming.streamer(open_url, write_records))
