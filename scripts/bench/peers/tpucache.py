"""tpucache: CachedLoader, build_cache, ImageFolder and train, by their default options where nothing else is said."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench.peers import epochs, training
from scripts.bench.peers.building import Work, builder
from scripts.bench.peers.protocol import Commands, Role, Setting, serve


def read(setting: Setting) -> Commands:
    """Read the caches that the photos command built."""
    from scripts.bench.peers.reading import BATCH, Batches, reader, repeated
    from tpucache import CachedDataset, CachedLoader
    from tpucache.ondevice import decoder

    def batches(
        data: Path, _folder: Path, kind: str, threads: int, memory: bool = False, finish: Any = "host"
    ) -> Batches:
        cache = data / f"cache-{kind}"
        dataset = CachedDataset(cache, indices=repeated(len(CachedDataset(cache))), in_memory=memory)
        loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=threads, finish=finish)
        return itertools.chain.from_iterable(itertools.repeat(loader))

    def finished(images: Any, data: Path, kind: str) -> Any:
        return decoder(CachedDataset(data / f"cache-{kind}"))(images) if images.ndim == 2 else images

    return reader(batches, finish=finished)(setting)


def build(setting: Setting) -> Work:
    """Take the whole of build_cache, the start of its workers included; the imports of this process are not."""
    from tpucache import Recipe, build_cache

    recipe = Recipe(size=setting["size"], variants=setting["variants"], augment="flip")

    def work(photographs: Path) -> None:
        build_cache(photographs, Path(setting["folder"]) / "cache", recipe, jobs=setting["jobs"])

    return work


def crops(task: epochs.Task) -> Any:
    """Use ImageFolder and CachedLoader in one program, or the command `warmup` and then a program."""
    is_apart, folder = task.way == "warmup", Path(task.folder)
    if is_apart and not folder.exists():
        words = ["warmup", task.photographs, task.folder, "--size", str(task.side)]
        subprocess.run([sys.executable, "-m", "tpucache", *words], check=True, stdout=subprocess.DEVNULL)
    # Imported here: a program that reads starts after the command has ended.
    from tpucache import CachedDataset, CachedLoader, ImageFolder
    from tpucache.ondevice import AugmentSettings

    dataset: Any = CachedDataset(folder) if is_apart else ImageFolder(task.photographs, size=task.side, cache=folder)
    augment = AugmentSettings(crop=True, flip=True)
    return CachedLoader(dataset, task.batch, shuffle=True, augment=augment, size=task.size)


def stream(setting: Setting) -> Commands:
    """Read a cache at a URL, its bytes in the codec's packed form, shuffled in blocks."""
    # On no clock: everybody else imports what is needed at the start, too.
    import llvmlite.binding  # noqa: F401

    from scripts.bench.peers.streaming import BATCH, Epoch, streamer
    from tpucache import CachedDataset, CachedLoader

    def open_url(url: str, folder: Path, threads: int) -> Callable[[], Epoch]:
        dataset = CachedDataset(url, cache_dir=folder if "://" in url else None)
        is_packed = dataset.manifest.recipe["codec"] != "raw"
        finish: Any = "device" if is_packed else "host"
        loader = CachedLoader(dataset, BATCH, shuffle="block", threads=threads, finish=finish)
        return lambda: sizes(loader)

    def sizes(loader: CachedLoader) -> Iterator[int]:
        return (len(labels) for _, labels in loader)

    return streamer(open_url)(setting)


def race(setting: Setting) -> Commands:
    """Train by the defaults on a cache of four variants, which is prepared."""
    from tpucache import CachedDataset, Recipe, build_cache
    from tpucache.training import RunOptions, TrainSettings, train

    def prepare(task: training.Task) -> None:
        work = Path(task.work)
        shutil.rmtree(work, ignore_errors=True)
        build_cache(task.train, work / "train", Recipe(size=task.size, variants=4))
        build_cache(task.valid, work / "valid", Recipe(size=task.size), classes=work / "train")

    def learn(task: training.Task, count: int) -> dict[str, Any]:
        settings = TrainSettings(epochs=count, seed=task.seed)
        dataset, valid = (CachedDataset(Path(task.work) / name) for name in ("train", "valid"))
        dataset = CachedDataset(dataset.directory, "epoch")
        result = train(task.model, dataset, valid, settings, options=RunOptions(replay=False))
        return {"accuracy": result.history[-1]["valid_accuracy"], "images": count * len(dataset)}

    return training.learner(learn, prepare)(setting)


if __name__ == "__main__":
    roles: dict[str, Role] = {"read": read, "stream": stream, "race": race}
    serve(warmup=builder(build), epochs=epochs.taker(crops), **roles)
