"""What tpucache grew out of: one process, whole decode, Lanczos, one augmentation, one torch.save a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from scripts.bench.peers.building import Work, read_list, run
from scripts.bench.peers.protocol import Setting
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment


def start(setting: Setting) -> Work:
    side = setting["size"]
    flip = resolve("flip", side, side)

    def work(listed: Path) -> None:
        for number, file in enumerate(read_list(listed)):
            with Image.open(file) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
            sample = augment(np.asarray(fitted), flip, 0, number, 1)
            torch.save(torch.from_numpy(sample), Path(setting["folder"]) / f"{number:08d}.pt")

    return work


if __name__ == "__main__":
    run(start)
