"""MosaicML Streaming: records in MDS shards, over S3, shuffled, through a DataLoader with two workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch.utils.data import DataLoader

from scripts.bench.peers.read import mds
from scripts.bench.peers.streaming import BATCH, Epoch, records, run

from streaming.base.util import clean_stale_shared_memory  # isort: skip  # `read.mds` makes it importable


def write(data: Path, folder: Path, megabytes: int) -> None:
    with mds.MDSWriter(
        out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit=megabytes << 20
    ) as writer:
        for record, label in records(data):
            writer.write({"image": record, "label": label})


def _collate(samples: list[dict[str, Any]]) -> int:
    return len(samples)


def open_url(url: str, folder: Path, workers: int) -> Callable[[], Epoch]:
    clean_stale_shared_memory()  # a process that was killed leaves what the next one takes for its own
    parts = urlsplit(url)
    os.environ |= {"S3_ENDPOINT_URL": f"{parts.scheme}://{parts.netloc}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    dataset = mds.StreamingDataset(remote=f"s3:/{parts.path}", local=str(folder), shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, BATCH, num_workers=workers, collate_fn=_collate, persistent_workers=True)
    return lambda: iter(loader)


if __name__ == "__main__":
    run(open_url, write)
