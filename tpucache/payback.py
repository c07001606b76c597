"""What a cache saves: the speed of a DataLoader on its source, and the epochs after which building has paid off."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps

from tpucache.errors import TpucacheError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.machine import count_cores
from tpucache.recipe import Recipe
from tpucache.report.bench import count_rate, simulate_device
from tpucache.store.fields import IMAGE
from tpucache.warmup.records.augment import PRESETS
from tpucache.warmup.sources import to_source
from tpucache.warmup.sources.source import Sample, Source, source_name
from tpucache.warmup.trial import dry_run

#: At most this many images are read: they take some seconds, and a hundred batches are enough.
_MOST_IMAGES: Final = 2048
_BATCH: Final = 32


@dataclass(frozen=True)
class Payback:
    """The speed of a DataLoader on a cache's source, and the number of epochs after which the cache has paid off.

    A DataLoader with `workers` processes reads from `source` as many images of the cache as `images` says. It decodes
    each image with Pillow, resizes it as the cache's recipe says, and makes a tensor, without augmentation.
    `images_per_second` is its rate from the first batch on. `idle` is the share of time for which a simulated device
    waits for the DataLoader; None without such a device. `epoch_seconds` is the time of an epoch of all samples from
    the source, and `cache_epoch_seconds` the time of an epoch from the cache; with a device, neither is shorter than
    the device needs.

    `build_seconds` is the estimated time to build the cache on this machine. If it cannot be estimated, it is None, and
    the text `unknown` says why; otherwise `unknown` is "". `epochs` is the first number of epochs after which building
    and reading the cache has taken less time than reading the source; None if there is none, or if `build_seconds` is
    None.
    """

    source: str
    images: int
    workers: int
    images_per_second: float
    idle: float | None
    epoch_seconds: float
    cache_epoch_seconds: float
    build_seconds: float | None
    unknown: str
    epochs: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


def measure_payback(
    source: str | Path | Source,
    dataset: CachedDataset,
    images_per_second: float,
    *,
    device_rate: float | None = None,
    workers: int | None = None,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Payback:
    """Read a cache's source with a DataLoader for some seconds, and compare its rate with that of the cache.

    `images_per_second` is the rate at which the cache is read. `workers` is the number of the DataLoader's processes;
    None means one for each core. With `device_rate`, a simulated device takes this many images a second, as in
    `run_bench`. The DataLoader is measured for about `seconds`, and 1.5 times as long with a device. `on_progress` is
    called with lines of text. Raises UsageError if the cache has no images or was not built from the source, and the
    errors of the source.
    """
    workers = count_cores().usable if workers is None else workers
    recipe = Recipe.from_dict(dataset.manifest.recipe)
    source = to_source(source)
    samples = _same_samples(source, dataset)
    measured = seconds if device_rate is None else 1.5 * seconds
    on_progress(f"reading {source_name(source)} by a DataLoader, for about {measured:.0f} s")
    rate, idle = _measure_loader(_SourceImages(source, samples, recipe), workers, seconds, device_rate)
    on_progress("estimating how long building takes, for at most 10 s")
    build_seconds, unknown = _estimate_build(source, recipe)
    fastest = math.inf if device_rate is None else device_rate
    epoch, cached = (len(dataset) / min(each, fastest) for each in (rate, images_per_second))
    is_known = build_seconds is not None and cached < epoch
    return Payback(
        source=source_name(source),
        images=len(samples),
        workers=workers,
        images_per_second=rate,
        idle=idle,
        epoch_seconds=epoch,
        cache_epoch_seconds=cached,
        build_seconds=build_seconds,
        unknown=unknown,
        epochs=math.floor((build_seconds or 0.0) / (epoch - cached)) + 1 if is_known else None,
    )


def _same_samples(source: Source, dataset: CachedDataset) -> list[Sample]:
    """Return at most 2,048 samples that a source and a dataset have in common, spread over the dataset.

    Raises UsageError if there is no such sample, or if the dataset has no images.
    """
    if dataset.manifest.fields[0].name != IMAGE:
        raise UsageError(f"--against reads images, and {dataset.place} has none: leave --against out")
    samples = {sample.path: sample for sample in source.list().samples}
    paths = dataset.table.paths
    chosen = np.linspace(0, len(paths) - 1, min(len(paths), _MOST_IMAGES)).astype(int).tolist()
    found = [samples[paths[at]] for at in chosen if paths[at] in samples]
    if not found:
        raise UsageError(
            f"{dataset.place} was not built from {source_name(source)}, which has no {paths[0]!r}: give --against the "
            "source that was given to warmup"
        )
    return found


class _SourceImages:
    """The images of a source, in the recipe's size, as a torch dataset of float32 (channels, height, width), 0 to 1."""

    def __init__(self, source: Source, samples: Sequence[Sample], recipe: Recipe) -> None:
        self._source, self._samples, self._recipe = source, samples, recipe

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        import torch

        sample = self._samples[index]
        data = self._source.load(sample).fields.get(IMAGE)
        if not isinstance(data, bytes):
            raise UsageError(f"{sample.path} is not an image file, as --against needs: leave --against out")
        with Image.open(io.BytesIO(data)) as opened:
            picture = _fit(opened.convert("L" if self._recipe.mode == "grey" else "RGB"), self._recipe)
        pixels = torch.from_numpy(np.array(picture)).reshape(picture.height, picture.width, -1)
        return pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)


def _fit(picture: Image.Image, recipe: Recipe) -> Image.Image:
    """Return a picture in a recipe's size; with the fit `crop`, as torchvision's Resize and CenterCrop make it."""
    size = recipe.width, recipe.height
    if recipe.fit == "stretch":
        return picture.resize(size, Image.Resampling.BILINEAR)
    if recipe.fit == "pad":
        return ImageOps.pad(picture, size, Image.Resampling.BILINEAR)
    scale = max(recipe.width / picture.width, recipe.height / picture.height)
    width, height = (max(side, round(scale * of)) for side, of in zip(size, picture.size, strict=True))
    left, top = (width - recipe.width) // 2, (height - recipe.height) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + recipe.width, top + recipe.height))


class _Shuffled:
    """A sampler without an end: it yields 0 to `count` - 1 again and again, each time in a new random order."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(self._count).tolist()


def _measure_loader(
    images: _SourceImages, workers: int, seconds: float, device_rate: float | None
) -> tuple[float, float | None]:
    """Return a DataLoader's images a second, and the share of time for which a device waits for the DataLoader.

    Without `device_rate`, the images a second of the device, the share is None.
    """
    from torch.utils.data import DataLoader

    order: Any = _Shuffled(len(images))
    loader: Any = DataLoader(images, batch_size=_BATCH, sampler=order, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    rate = count_rate(batches, _BATCH, seconds)
    idle = None if device_rate is None else simulate_device(batches, _BATCH / device_rate, seconds / 2)
    return rate, idle


def _estimate_build(source: Source, recipe: Recipe) -> tuple[float | None, str]:
    """Return an estimate of the seconds to build the cache on all cores of this machine, and "".

    A few samples are built for the estimate. If that is not possible, return None and the reason. An augmentation from
    a file or from code is not called, because the cache that names it may come from somebody else than the user.
    """
    if recipe.variants and recipe.augment not in PRESETS:
        return None, f"the cache's augmentation, {recipe.augment}, is not called here"
    with tempfile.TemporaryDirectory(prefix="tpucache-bench-") as folder:
        try:
            found = dry_run(source, Path(folder, "cache"), recipe, jobs=count_cores().usable)
        except TpucacheError as error:
            return None, str(error)
    if len(found.failed) == len(found.tried):
        return None, "none of the tried samples can be used"
    return found.seconds, ""
