"""WebDataset: tar shards by curl, a shuffle buffer, through WebLoader with two workers; it keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import webdataset as wds

from scripts.bench.peers.streaming import BATCH, Epoch, records, run


def write(data: Path, folder: Path, megabytes: int) -> None:
    with wds.ShardWriter(str(folder / "%05d.tar"), maxsize=megabytes << 20, verbose=0) as writer:
        for at, (record, label) in enumerate(records(data)):
            writer.write({"__key__": f"{at:08d}", "img": record, "cls": label})
    (folder / "shards").write_text(str(len(list(folder.glob("*.tar")))))


def _collate(samples: list[tuple[bytes, bytes]]) -> int:
    return len(samples)


def open_url(url: str, _folder: Path, workers: int, shards: int) -> Callable[[], Epoch]:
    urls = [f"pipe:curl -s -L --fail {url}/{number:05d}.tar" for number in range(shards)]
    dataset = (
        wds.WebDataset(urls, shardshuffle=100, empty_check=False)
        .shuffle(1000)
        .to_tuple("img", "cls")
        .batched(BATCH, collation_fn=_collate)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: iter(loader)


if __name__ == "__main__":
    run(open_url, write)
