"""tpucache: the whole of build_cache, the start of its workers included; the imports of this process are not."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.peers.building import Work, run
from scripts.bench.peers.listed_source import ListedSource
from scripts.bench.peers.protocol import Setting
from tpucache import Recipe, build_cache


def start(setting: Setting) -> Work:
    recipe = Recipe(size=setting["size"], variants=setting["variants"], augment="flip")

    def work(listed: Path) -> None:
        build_cache(ListedSource(listed), Path(setting["folder"]) / "cache", recipe, jobs=setting["jobs"])

    return work


if __name__ == "__main__":
    run(start)
