"""LitData: records in chunks, over its S3 client, shuffled, through StreamingDataLoader with two workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import litdata
from litdata.streaming import downloader

from scripts.bench.peers.streaming import BATCH, Epoch, records, run

# Its faster client refuses servers without TLS, such as the benchmark's.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


@functools.cache
def _all(data: Path) -> list[tuple[bytes, int]]:
    return list(records(data))


def _sample(data: Path, at: int) -> dict[str, Any]:
    record, label = _all(data)[at]
    return {"image": record, "label": label}


def write(data: Path, folder: Path, megabytes: int) -> None:
    litdata.optimize(
        fn=functools.partial(_sample, data),
        inputs=list(range(len(_all(data)))),
        output_dir=str(folder),
        chunk_bytes=f"{megabytes}MB",
        num_workers=1,
    )


def _collate(samples: list[dict[str, Any]]) -> int:
    return len(samples)


def open_url(url: str, folder: Path, workers: int) -> Callable[[], Epoch]:
    parts = urlsplit(url)
    bucket = f"s3:/{parts.path}"
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    dataset = litdata.StreamingDataset(
        bucket,
        cache_dir=str(folder),
        shuffle=True,
        storage_options={"endpoint_url": f"{parts.scheme}://{parts.netloc}", **keys},
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=_collate, persistent_workers=True
    )
    return lambda: iter(loader)


if __name__ == "__main__":
    run(open_url, write)
