"""What warmups are compared with: the way that tpucache grew out of, and loops that decode and resize alone."""

from __future__ import annotations

import functools
from pathlib import Path

from PIL import Image, ImageOps

from scripts.bench.peers.building import Work, bare_loop, builder, files
from scripts.bench.peers.protocol import Setting, serve
from tpucache import Recipe
from tpucache.warmup.records.presize import presize


def seed(setting: Setting) -> Work:
    """One process, whole decode, Lanczos, a flip by chance, one torch.save a sample."""
    import numpy as np
    import torch

    side, rng = setting["size"], np.random.default_rng(0)

    def work(photographs: Path) -> None:
        for number, file in enumerate(files(photographs)):
            with Image.open(file) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
            pixels = np.asarray(ImageOps.mirror(fitted) if rng.random() < 0.5 else fitted).copy()
            torch.save(torch.from_numpy(pixels), Path(setting["folder"]) / f"{number:08d}.pt")

    return work


def pillow(setting: Setting) -> Work:
    """Pillow's own scaled decode and Lanczos, the loop that comes to mind first; nothing is written."""
    return bare_loop(functools.partial(_by_pillow, setting["size"]), setting["jobs"])


def _by_pillow(size: int, file: str) -> int:
    with Image.open(file) as image:
        image.draft("RGB", (2 * size, 2 * size))
        return len(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS).tobytes())


def alone(setting: Setting) -> Work:
    """tpucache's own decode and resize with nothing around it: nothing is written, nothing is checked."""
    return bare_loop(functools.partial(_by_tpucache, Recipe(size=setting["size"])), setting["jobs"])


def _by_tpucache(recipe: Recipe, file: str) -> int:
    return presize(Path(file).read_bytes(), recipe, file).nbytes


if __name__ == "__main__":
    serve(seed=builder(seed), pillow=builder(pillow), presize=builder(alone))
