"""tpucache's own decode and resize with nothing around it: nothing is written, nothing is checked."""

from __future__ import annotations

import functools
from pathlib import Path

from scripts.bench.peers.building import Work, bare_loop, run
from scripts.bench.peers.protocol import Setting
from tpucache import Recipe
from tpucache.warmup.records.presize import presize


def shrink(recipe: Recipe, file: str) -> int:
    return presize(Path(file).read_bytes(), recipe, file).nbytes


def start(setting: Setting) -> Work:
    return bare_loop(functools.partial(shrink, Recipe(size=setting["size"])), setting["jobs"])


if __name__ == "__main__":
    run(start)
