"""WebDataset: tar shards; arrays resampled without end, or records by curl, of which it keeps none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from scripts.bench.peers import streaming
from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, reader

_BUFFER = 1000  # samples, out of which it shuffles


def write(data: Path, folder: Path) -> None:
    with wds.ShardWriter(str(folder / "%05d.tar"), maxcount=512, verbose=0) as writer:
        for at, (image, label) in enumerate(zip(*load(data), strict=True)):
            writer.write({"__key__": f"{at:08d}", "img": image.tobytes(), "cls": int(label)})


def _collate(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
    images = np.stack([np.frombuffer(image, np.uint8).reshape(SIZE, SIZE, 3) for image, _ in samples])
    return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])


def batches(_data: Path, folder: Path, workers: int) -> Batches:
    dataset = (
        wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), resampled=True, shardshuffle=False)
        .shuffle(_BUFFER)
        .to_tuple("img", "cls")
        .batched(BATCH, partial=False, collation_fn=_collate)
    )
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers))


def write_records(data: Path, folder: Path) -> None:
    with wds.ShardWriter(str(folder / "%05d.tar"), maxsize=streaming.MEGABYTES << 20, verbose=0) as writer:
        for at, (record, label) in enumerate(streaming.records(data)):
            writer.write({"__key__": f"{at:08d}", "img": record, "cls": label})
    (folder / "shards").write_text(str(len(list(folder.glob("*.tar")))))


def open_url(url: str, _folder: Path, workers: int, shards: int) -> Callable[[], streaming.Epoch]:
    urls = [f"pipe:curl -s -L --fail {url}/{number:05d}.tar" for number in range(shards)]
    dataset = (
        wds.WebDataset(urls, shardshuffle=100, empty_check=False)
        .shuffle(_BUFFER)
        .to_tuple("img", "cls")
        .batched(streaming.BATCH, collation_fn=len)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: iter(loader)


if __name__ == "__main__":
    serve(read=reader(batches, write), stream=streaming.streamer(open_url, write_records))
