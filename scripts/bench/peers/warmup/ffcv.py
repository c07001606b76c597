"""FFCV: its DatasetWriter with raw pixels, of images that the dataset has brought to their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
from PIL import Image, ImageOps

from scripts.bench.peers.building import Work, read_list, run
from scripts.bench.peers.protocol import Setting


class _Photographs:
    def __init__(self, files: list[str], side: int) -> None:
        self.files, self.side = files, side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (self.side, self.side), Image.Resampling.LANCZOS)
        return np.array(fitted), 0


def start(setting: Setting) -> Work:
    def work(listed: Path) -> None:
        photographs = _Photographs(read_list(listed), setting["size"])
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        writer = DatasetWriter(str(Path(setting["folder"]) / "raw.beton"), fields, num_workers=setting["jobs"])
        # Its chunks of 100 would leave a worker idle at the end of as few images as fit a turn.
        writer.from_indexed_dataset(photographs, chunksize=min(100, max(1, len(photographs) // 32)))

    return work


if __name__ == "__main__":
    run(start)
