"""What a cache would take and bring: codecs compared on a few samples, and a cache compared with its source."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from tpucache import kaggle
from tpucache.errors import DependencyError, RecipeError, UsageError
from tpucache.geometry import framing_of
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.memory import BUDGET
from tpucache.machine import count_cores
from tpucache.native import Array
from tpucache.progress import note
from tpucache.recipe import Recipe
from tpucache.report.bench import count_rate, measure_reading, simulate_device
from tpucache.store.codecs import CODECS
from tpucache.store.fields import IMAGE
from tpucache.warmup.build import build_cache
from tpucache.warmup.build_options import BuildOptions, SourceOptions
from tpucache.warmup.sources import select_source, to_source
from tpucache.warmup.sources.source import DerivedSource, Item, Listing, Sample, Source, source_name
from tpucache.warmup.trial import DryRun, dry_run

_PLAIN: Final = "raw"
_SAMPLES: Final = 32
_BUILDING_SECONDS: Final = 8.0
#: Samples in an epoch of reading, which repeats those of a small cache because each epoch takes time to begin.
_EPOCH: Final = 2048
_LEAST_ERROR: Final = 1e-5  # 98 dB, for images that hardly differ
#: At most this many images are read from a source: they take some seconds, and a hundred batches are enough.
_MOST_IMAGES: Final = 2048
_BATCH: Final = 32


class CodecFigures(NamedTuple):
    """The whole cache in one codec; `psnr` is in dB, None for equal pixels; `reading` is "keep" or "stream"."""

    codec: str
    bytes: int
    seconds: float
    bytes_per_image: int
    batch_bytes_per_image: int
    images_per_second: float
    reading: str
    psnr: float | None
    fits: bool


@dataclass(frozen=True, repr=False)
class Listed(DerivedSource):
    """A source that is listed only once."""

    source: Source
    listing: Listing

    def list(self) -> Listing:
        return self.listing

    def load(self, sample: Sample) -> Item:
        return self.source.load(sample)


def compare_codecs(
    source: Listed, found: DryRun, recipe: Recipe, options: BuildOptions, codecs: Sequence[str], seconds: float = 0.2
) -> tuple[list[CodecFigures], dict[str, str]]:
    """Return the figures of each codec, and why others cannot be used; `found` is a dry run of all samples."""
    tried = max(1, len(found.tried))
    each = found.estimate.process_seconds / max(1, found.samples)
    most = int(_BUILDING_SECONDS / (len(codecs) + 1) / max(each, 1e-6))
    few = Listed(source.source, select_source(source, limit=max(1, min(most, _SAMPLES, tried))).list())
    rows, left_out = [], {}
    with tempfile.TemporaryDirectory(prefix="tpucache-dry-run-") as folder, contextlib.ExitStack() as stack:
        logging.disable(logging.WARNING)  # the dry run has warned
        stack.callback(logging.disable, logging.NOTSET)
        plain = replace(recipe, codec=_PLAIN, quality=None, chroma=None, variants=0)
        with _build(few, Path(folder, "pixels"), plain, options) as dataset:
            pixels = _images(dataset)
        for codec in codecs:
            try:
                chosen = replace(recipe, codec=codec)
                rows.append(_figures(few, found, chosen, options, Path(folder, codec), pixels, seconds))
            except (DependencyError, RecipeError) as error:
                left_out[codec] = str(error)
    return rows, left_out


def _figures(
    few: Listed,
    found: DryRun,
    recipe: Recipe,
    options: BuildOptions,
    folder: Path,
    pixels: dict[str, Array],
    seconds: float,
) -> CodecFigures:
    expected = dry_run(few, folder, recipe, **vars(options))
    scale = found.samples / expected.samples
    size = round(expected.estimate.bytes * scale)
    with _build(few, folder, replace(recipe, variants=0), options) as dataset:
        record_bytes = sum(field.nbytes for field in dataset.packed().record_fields)
        is_kept = found.samples * max(1, recipe.variants) * record_bytes <= BUDGET.room
        psnr, record = _psnr(dataset, pixels), dataset.mean_record_bytes
    with CachedDataset(folder, in_memory="auto" if is_kept else False) as dataset:
        repeated = dataset.select(np.tile(np.arange(len(dataset)), -(-_EPOCH // len(dataset))))
        rate = measure_reading(repeated, seconds=seconds)
    return CodecFigures(
        codec=recipe.codec,
        bytes=size,
        seconds=expected.seconds * scale,
        bytes_per_image=record,
        batch_bytes_per_image=record_bytes,
        images_per_second=rate,
        reading="keep" if is_kept else "stream",
        psnr=psnr,
        fits=size <= (kaggle.WORKING_BYTES if options.target == "kaggle" else found.estimate.free),
    )


def recommended(rows: Sequence[CodecFigures]) -> CodecFigures | None:
    """Return plain pixels if they fit into memory, else the smallest cache that is read at least half as fast."""
    fitting = [row for row in rows if row.fits]
    plain = [row for row in fitting if CODECS[row.codec].is_plain and row.reading == "keep"]
    if plain or not fitting:
        return plain[0] if plain else None
    fastest = max(row.images_per_second for row in fitting)
    return min((row for row in fitting if row.images_per_second >= fastest / 2), key=lambda row: row.bytes)


def _build(few: Source, folder: Path, recipe: Recipe, options: BuildOptions) -> CachedDataset:
    meaning = {each.name: getattr(options, each.name) for each in fields(SourceOptions)}
    build_cache(few, folder, recipe, on_error="skip", jobs=1, **meaning)
    return CachedDataset(folder, in_memory=False)


def _images(dataset: CachedDataset) -> dict[str, Array]:
    images = [image for batch in dataset.field_batches(IMAGE) for image in batch]
    return dict(zip(dataset.table.paths, images, strict=True))


def _psnr(dataset: CachedDataset, pixels: dict[str, Array]) -> float | None:
    shown = _images(dataset)
    errors = [float(np.square(shown[path].astype(np.float64) - pixels[path]).mean()) for path in shown.keys() & pixels]
    if not any(errors):
        return None
    return statistics.mean(10 * math.log10(255**2 / max(error, _LEAST_ERROR)) for error in errors)


def measure_against(
    origin: str | Path,
    dataset: CachedDataset,
    *,
    device_rate: float | None = None,
    workers: int | None = None,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """Read a cache's source with a DataLoader for some seconds, and return its rate."""
    from torch.utils.data import DataLoader, RandomSampler

    workers = count_cores().usable if workers is None else workers
    source = to_source(origin)
    data: Any = _SourceImages(source, _same_samples(source, dataset), Recipe.from_dict(dataset.manifest.recipe))
    note(f"bench: reading {source_name(source)} by a DataLoader, for about {seconds:.0f} s")
    order = RandomSampler(data, replacement=True, num_samples=1 << 40)  # without an end
    batches = iter(DataLoader(data, batch_size=_BATCH, sampler=order, num_workers=workers))
    return {
        "source": source_name(source),
        "images": len(data),
        "workers": workers,
        "images_per_second": count_rate(batches, _BATCH, seconds),
        "idle": None if device_rate is None else simulate_device(batches, _BATCH / device_rate, seconds / 2),
    }


def _same_samples(source: Source, dataset: CachedDataset) -> list[Sample]:
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
    """A torch dataset of float32 (channels, height, width), 0 to 1, in the recipe's size."""

    def __init__(self, source: Source, samples: Sequence[Sample], recipe: Recipe) -> None:
        self._source, self._samples, self._recipe = source, samples, recipe

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        import torch

        sample, recipe = self._samples[index], self._recipe
        data = self._source.load(sample).fields.get(IMAGE)
        if not isinstance(data, bytes):
            raise UsageError(f"{sample.path} is not an image file, as --against needs: leave --against out")
        with Image.open(io.BytesIO(data)) as opened:
            picture = opened.convert("L" if recipe.mode == "grey" else "RGB")
        frame = framing_of(picture.size, 1, (recipe.width, recipe.height), recipe.fit)
        pixels = frame.place(np.array(picture.resize(frame.size, Image.Resampling.BILINEAR, frame.box)))
        images = torch.from_numpy(pixels).reshape(recipe.height, recipe.width, -1).permute(2, 0, 1)
        return images.contiguous().to(torch.float32).div(255)
