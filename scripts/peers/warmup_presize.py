"""tpucache's own decode and resize with nothing around it: nothing is written, nothing is checked."""

from __future__ import annotations

import functools
from pathlib import Path

from warmup_worker import Setting, Work, bare_loop, serve

from tpucache.recipe import Recipe
from tpucache.warmup.presize import presize


def shrink(recipe: Recipe, file: str) -> int:
    return presize(Path(file).read_bytes(), recipe, file).nbytes


def start(setting: Setting) -> Work:
    return bare_loop(functools.partial(shrink, Recipe(size=setting["size"])), setting["jobs"])


if __name__ == "__main__":
    serve(start)
