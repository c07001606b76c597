"""The ways of feeding an accelerator that the idle benchmark compares, and the files that they read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from scripts.bench.photos import make_once, make_up_photographs
from scripts.commands import say
from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.loading.loader import Finish
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment
from tpucache.warmup.records.presize import presize

BATCH: Final = 256
RECIPE: Final = Recipe(size=224, variants=1, augment="standard")
PACKED: Final = ("yuv420", "dct-zstd", "dct-lz4")
THREADS: Final = 2
EPOCH: Final = 1 << 20  # samples of the cache's epoch, about ImageNet's: the photographs are repeated to reach it

Sample = tuple[torch.Tensor, int]
Batches = Iterator[Any]


@dataclass(frozen=True)
class Way:
    """A way of feeding: `stream(n)` yields n batches, `burst` of which come at about the same time."""

    name: str
    stream: Callable[[int], Batches]
    burst: int


class OnTheFly(Dataset[Sample]):
    """Original photographs, decoded, resized and augmented anew each time; without variants, not augmented."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], recipe: Recipe = RECIPE) -> None:
        self.files, self.labels, self.recipe = files, labels, recipe
        self.augmentation = resolve(recipe.augment, recipe.height, recipe.width) if recipe.variants else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image = presize(self.files[index].read_bytes(), self.recipe, str(self.files[index]))
        if self.augmentation is not None:
            variant = int(torch.randint(1 << 31, ()))
            image = augment(image, self.augmentation, self.recipe.seed, index, variant)
        return torch.from_numpy(image), self.labels[index]


class PresizedFiles(Dataset[Sample]):
    """Image files of the wanted size."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __getitem__(self, index: int) -> Sample:
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image)), self.labels[index]


class SavedTensors(Dataset[Sample]):
    """One file a sample, written by `torch.save`."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __getitem__(self, index: int) -> Sample:
        # Files of our own, so pickle may have its way: that is twice as fast as weights_only=True.
        return torch.load(self.files[index], weights_only=False), self.labels[index]


class Draws:
    """A batch sampler: `batches` batches of shuffled sample numbers, across as many epochs as that takes."""

    def __init__(self, samples: int) -> None:
        self.samples, self.batches = samples, 0

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self._numbers()
        for _ in range(self.batches):
            yield list(itertools.islice(numbers, BATCH))

    def _numbers(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(self.samples).tolist()


def loader_way(name: str, dataset: Dataset[Sample], samples: int, workers: int) -> Way:
    """Feed by torch's DataLoader; its workers live on between iterations, and rest as soon as one is over."""
    draws = Draws(samples)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=draws, num_workers=workers, persistent_workers=True)

    def stream(batches: int) -> Batches:
        draws.batches = batches
        yield from loader

    return Way(name, stream, workers)


def cache_way(name: str, cache: Path, samples: int, in_memory: bool, finish: Finish = "host") -> Way:
    """Feed by tpucache's own loader; `finish` "device": with packed images."""
    positions = np.resize(np.arange(samples), max(EPOCH, BATCH))
    dataset = CachedDataset(cache, variant=1, indices=positions, in_memory=in_memory)
    for first in range(0, samples, BATCH):
        dataset.__getitems__(range(first, min(first + BATCH, samples)))  # every record was read before the clock starts
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=THREADS, finish=finish)

    def stream(batches: int) -> Batches:
        return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), batches)

    return Way(name, stream, THREADS)


def open_ways(source: Path | None, work: Path, workers: int) -> list[Way]:
    """Make what is missing of the files that the ways read, bring all into the page cache, and return the ways."""
    source = source or make_up_photographs(work / "photographs")
    say(f"preparing {work}: made once, then used again")
    cache = work / "cache"
    packed = {codec: work / f"cache-{codec}" for codec in PACKED}
    for codec, folder in {"raw": cache, **packed}.items():
        if not (folder / "manifest.json").exists():
            build_cache(source, folder, replace(RECIPE, codec=codec))
    images = CachedDataset(cache, variant=1)
    mark = images.manifest.shards[0].records_sha256[:12]  # files made from another cache are not these
    jpegs = derived_files(work / f"jpeg-{mark}", ".jpg", images, save_jpeg)
    tensors = derived_files(work / f"tensors-{mark}", ".pt", images, save_tensor)
    photographs = [source / path for path in images.paths]
    if not all(file.is_file() for file in photographs):
        raise UsageError(f"{cache} was made of other photographs than {source} has: give another folder with --work")
    shards = [shard for folder in (cache, *packed.values()) for shard in folder.glob("*.lmdb")]
    for file in [*photographs, *jpegs, *tensors, *shards]:
        file.read_bytes()
    labels, samples = images.labels.tolist(), len(images)
    return [
        loader_way("on the fly", OnTheFly(photographs, labels), samples, workers),
        loader_way("presized files", PresizedFiles(jpegs, labels), samples, workers),
        loader_way("one torch.save a sample", SavedTensors(tensors, labels), samples, workers),
        cache_way("tpucache", cache, samples, in_memory=False),
        *(cache_way(f"tpucache {name}", packed[name], samples, in_memory=False, finish="device") for name in PACKED),
        cache_way("tpucache in memory", cache, samples, in_memory=True),
    ]


def derived_files(folder: Path, suffix: str, images: CachedDataset, save: Callable[[Any, Path], None]) -> list[Path]:
    """Return one file an image of the cache, saved by `save` unless the folder exists."""
    names = [f"{number:07d}{suffix}" for number in range(len(images))]

    def make(unfinished: Path) -> None:
        for number, name in enumerate(names):
            save(images[number][0], unfinished / name)

    make_once(folder, make)
    return [folder / name for name in names]


def save_jpeg(image: torch.Tensor, path: Path) -> None:
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, quality=95)


def save_tensor(image: torch.Tensor, path: Path) -> None:
    torch.save(image.clone(memory_format=torch.contiguous_format), path)
