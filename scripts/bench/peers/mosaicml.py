"""MosaicML Streaming: MDS shards, uncompressed, through a DataLoader; arrays of a fixed shape, or records over S3."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from torch.utils.data import DataLoader

from scripts.bench.peers import streaming as records_of
from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, PASSES, SIZE, Batches, load, reader


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
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def _write(folder: Path, image: str, samples: Iterable[tuple[Any, int]], limit: int) -> None:
    with MDSWriter(out=str(folder), columns={"image": image, "label": "int"}, size_limit=limit) as writer:
        for sample, label in samples:
            writer.write({"image": sample, "label": int(label)})


def write(data: Path, folder: Path) -> None:
    samples = ((np.array(image), label) for image, label in zip(*load(data), strict=True))
    _write(folder, f"ndarray:uint8:{SIZE},{SIZE},3", samples, 1 << 26)


def batches(data: Path, folder: Path, workers: int) -> Batches:
    samples = PASSES * len(load(data)[1])
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, epoch_size=samples)
    loader = DataLoader(dataset, BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield batch["image"], batch["label"]


def write_records(data: Path, folder: Path) -> None:
    _write(folder, "bytes", records_of.records(data), records_of.MEGABYTES << 20)


def open_url(url: str, folder: Path, workers: int) -> Callable[[], records_of.Epoch]:
    clean_stale_shared_memory()  # a process that was killed leaves what the next one takes for its own
    parts, batch = urlsplit(url), records_of.BATCH
    os.environ |= {"S3_ENDPOINT_URL": f"{parts.scheme}://{parts.netloc}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    dataset = StreamingDataset(remote=f"s3:/{parts.path}", local=str(folder), shuffle=True, batch_size=batch)
    loader: Any = DataLoader(dataset, batch, num_workers=workers, collate_fn=len, persistent_workers=True)
    return lambda: iter(loader)


if __name__ == "__main__":
    serve(read=reader(batches, write), stream=records_of.streamer(open_url, write_records))
