"""What a cache would take and bring: codecs compared on a few samples, and a cache compared with its source."""

from __future__ import annotations

import argparse
import io
import logging
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from tpucache import kaggle
from tpucache.cli.parser import Report
from tpucache.errors import DependencyError, RecipeError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.memory import BUDGET
from tpucache.machine import count_cores
from tpucache.native import Array
from tpucache.process import PROG
from tpucache.progress import note
from tpucache.recipe import Recipe
from tpucache.report.bench import count_rate, measure_reading, simulate_device
from tpucache.report.inspect import describe_labels
from tpucache.store.codecs import CODECS, IMAGE_CODECS
from tpucache.store.fields import IMAGE
from tpucache.store.history import refuse_version
from tpucache.text import duration_text, size_text
from tpucache.warmup.build import build_cache
from tpucache.warmup.build_options import BuildOptions
from tpucache.warmup.run.upload import local_folder
from tpucache.warmup.sources import select_source, to_source
from tpucache.warmup.sources.source import DerivedSource, Listing, Sample, Source, source_name
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
#: What Pillow has for each `fit` of a recipe: functions of an image, a size and a filter.
_FITS: Final[Mapping[str, Callable[..., Image.Image]]] = {
    "crop": ImageOps.fit,
    "pad": ImageOps.pad,
    "stretch": Image.Image.resize,
}


def run_dry(options: argparse.Namespace, source: Source, recipe: Recipe, chosen: BuildOptions) -> Report:
    """Return what a warmup would do, and which codec to use."""
    refuse_version(options.cache)
    place = options.cache
    listed = Listed(source, source.list())
    found = dry_run(
        listed, place if isinstance(place, Path) else options.local or local_folder(place), recipe, **vars(chosen)
    )
    report, lines = found.to_dict(), [*_lines(found)]
    if found.sizes and found.estimate.records and not chosen.retry and find_spec("torch") is not None:
        is_chosen = "codec" in options.explicit
        rows, left_out = compare_codecs(
            listed, found, recipe, chosen, [recipe.codec] if is_chosen else IMAGE_CODECS.own
        )
        best = recommended(rows)
        words = [word for word in options.arguments if word not in ("--dry-run", "--json")]
        words += [] if is_chosen or best is None else ["--codec", best.codec]
        command = None if best is None else f"{PROG} {shlex.join(words)}"
        report["codecs"] = [{**row._asdict(), "recommended": row is best} for row in rows]
        report |= {"left_out_codecs": left_out, "command": command}
        lines += [*_table(rows, best), *(f"left out  {codec}: {reason}" for codec, reason in left_out.items())]
        if not all(row.fits for row in rows):
            lines.append("!         larger than the free disk, or than the 20 GB of --target kaggle")
        lines.append(f"command   {command or 'none: no cache fits; give a smaller --size, or --limit'}")
    return report, lines


def _lines(found: DryRun) -> Iterator[str]:
    expected = found.estimate
    yield f"samples   {found.samples:,}: {_counts(found.files)}"
    yield f"labels    {describe_labels(found.labels, found.classes, found.class_counts)}"
    if found.left_out:
        yield f"left out  {sum(found.left_out.values()):,}: {_counts(found.left_out)}"
    yield f"tried     {len(found.tried):,} samples, {len(found.failed):,} cannot be used"
    if found.listed:
        yield f"refused   {len(found.listed):,} samples before anything is built, without --on-error skip"
    reasons = {tried.path: tried.reason for tried in (*found.failed, *found.listed)}
    yield from [f"  {path!r}: {reason}" for path, reason in reasons.items()][:5]
    if found.sizes:
        (least, low), (width, height), (most, high) = found.size_range().values()
        yield (
            f"images    {least:,} to {most:,} wide, {low:,} to {high:,} high, median {width}x{height}; "
            f"{_counts(found.kinds)}"
        )
    yield (
        f"estimate  {expected.records:,} records, {size_text(expected.bytes)} and {size_text(expected.spooled)} of "
        f"working space ({size_text(expected.free)} are free), {duration_text(found.seconds)}"
    )


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted.items())


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


def _table(rows: Sequence[CodecFigures], best: CodecFigures | None) -> Iterator[str]:
    yield _table_line("", "codec", "GB", "min", "sent", "images/s", "from", "PSNR")
    for row in rows:
        yield _table_line(
            "*" if row is best else "" if row.fits else "!",
            row.codec,
            f"{row.bytes / 1e9:,.3f}",
            f"{row.seconds / 60:,.1f}",
            f"{row.batch_bytes_per_image / 1000:,.0f}",
            f"{row.images_per_second:,.0f}",
            "RAM" if row.reading == "keep" else "files",
            "exact" if row.psnr is None else f"{row.psnr:.1f}",
        )


def _table_line(mark: str, codec: str, *cells: str) -> str:
    return f"{mark:1}{codec:8}" + "".join(f"{cell:>10}" for cell in cells)


@dataclass(frozen=True, repr=False)
class Listed(DerivedSource):
    """A source that is listed only once."""

    source: Source
    listing: Listing

    def list(self) -> Listing:
        return self.listing


def compare_codecs(
    source: Source, found: DryRun, recipe: Recipe, options: BuildOptions, codecs: Sequence[str], seconds: float = 0.2
) -> tuple[list[CodecFigures], dict[str, str]]:
    """Return the figures of each codec, and why others cannot be used; `found` is a dry run of all samples."""
    each = found.estimate.process_seconds / found.samples
    most = int(_BUILDING_SECONDS / (len(codecs) + 1) / max(each, 1e-6))
    few = Listed(source, select_source(source, limit=max(1, min(most, _SAMPLES, len(found.tried)))).list())
    rows, left_out = [], {}
    logging.disable(logging.WARNING)  # the dry run has warned
    try:
        with tempfile.TemporaryDirectory(prefix="tpucache-dry-run-") as folder:
            plain = replace(recipe, codec=_PLAIN, quality=None, chroma=None)
            pixels = _images(_build(few, Path(folder, "pixels"), plain, options))
            for codec in codecs:
                try:
                    chosen = replace(recipe, codec=codec)
                    rows.append(_figures(few, found, chosen, options, Path(folder, codec), pixels, seconds))
                except (DependencyError, RecipeError) as error:
                    left_out[codec] = str(error)
    finally:
        logging.disable(logging.NOTSET)
    return rows, left_out


def _figures(
    few: Listed,
    found: DryRun,
    recipe: Recipe,
    options: BuildOptions,
    folder: Path,
    pixels: Mapping[str, Array],
    seconds: float,
) -> CodecFigures:
    expected = dry_run(few, folder, recipe, **vars(options))
    scale = found.samples / expected.samples
    size = round(expected.estimate.bytes * scale)
    dataset = _build(few, folder, recipe, options)
    record_bytes = sum(field.nbytes for field in dataset.packed().record_fields)
    is_kept = found.samples * max(1, recipe.variants) * record_bytes <= BUDGET.room
    repeated = np.tile(np.arange(len(dataset)), -(-_EPOCH // len(dataset)))
    with CachedDataset(folder, in_memory="auto" if is_kept else False) as read:
        rate = measure_reading(read.select(repeated), seconds)
    return CodecFigures(
        codec=recipe.codec,
        bytes=size,
        seconds=expected.seconds * scale,
        bytes_per_image=dataset.mean_record_bytes,
        batch_bytes_per_image=record_bytes,
        images_per_second=rate,
        reading="keep" if is_kept else "stream",
        psnr=_psnr(_images(dataset), pixels),
        fits=size <= (kaggle.WORKING_BYTES if options.target == "kaggle" else found.estimate.free),
    )


def recommended(rows: Sequence[CodecFigures]) -> CodecFigures | None:
    """Return plain pixels if they fit into memory, else the smallest cache that is read at least half as fast."""
    fitting = [row for row in rows if row.fits]
    for row in fitting:
        if CODECS[row.codec].is_plain and row.reading == "keep":
            return row
    fastest = max((row.images_per_second for row in fitting), default=0.0)
    fast = (row for row in fitting if row.images_per_second >= fastest / 2)
    return min(fast, key=lambda row: row.bytes, default=None)


def _build(few: Source, folder: Path, recipe: Recipe, options: BuildOptions) -> CachedDataset:
    """Build a cache of the clean images."""
    chosen = replace(options, on_error="skip", jobs=1, time_limit=None)
    build_cache(few, folder, replace(recipe, variants=0), **vars(chosen))
    return CachedDataset(folder, in_memory=False)


def _images(dataset: CachedDataset) -> dict[str, Array]:
    with dataset:
        images = [image for batch in dataset.field_batches(IMAGE) for image in batch]
        return dict(zip(dataset.table.paths, images, strict=True))


def _psnr(images: Mapping[str, Array], pixels: Mapping[str, Array]) -> float | None:
    shared = images.keys() & pixels
    errors = [float(np.square(images[path].astype(np.float64) - pixels[path]).mean()) for path in shared]
    if not any(errors):
        return None
    return float(np.mean(10 * np.log10(255**2 / np.maximum(errors, _LEAST_ERROR))))


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
    samples: Any = _same_samples(source, dataset)  # a list is a dataset, too
    recipe = Recipe.from_dict(dataset.manifest.recipe)
    note(f"bench: reading {source_name(source)} by a DataLoader, for about {seconds:.0f} s")
    order = RandomSampler(samples, replacement=True, num_samples=1 << 40)  # without an end
    read: Any = partial(_read_batch, source, recipe)
    batches = iter(DataLoader(samples, _BATCH, sampler=order, num_workers=workers, collate_fn=read))
    return {
        "source": source_name(source),
        "images": len(samples),
        "workers": workers,
        "images_per_second": count_rate(batches, _BATCH, seconds),
        "idle": None if device_rate is None else simulate_device(batches, _BATCH / device_rate, seconds / 2),
    }


def _same_samples(source: Source, dataset: CachedDataset) -> list[Sample]:
    if dataset.manifest.fields[0].name != IMAGE:
        raise UsageError(f"--against reads images, and {dataset.place} has none: leave --against out")
    paths, samples = dataset.table.paths, {sample.path: sample for sample in source.list().samples}
    found = [samples[path] for path in paths[:: -(-len(paths) // _MOST_IMAGES)] if path in samples]
    if not found:
        raise UsageError(
            f"{dataset.place} was not built from {source_name(source)}, which has no {paths[0]!r}: give --against the "
            "source that was given to warmup"
        )
    return found


def _read_batch(source: Source, recipe: Recipe, samples: Sequence[Sample]) -> Any:
    from torch.utils.data import default_collate

    return default_collate([_read_image(source, recipe, sample) for sample in samples])


def _read_image(source: Source, recipe: Recipe, sample: Sample) -> Array:
    """Return an image (channels, height, width) of 0 to 1, in the recipe's size."""
    data = source.load(sample).fields.get(IMAGE)
    if not isinstance(data, bytes):
        raise UsageError(f"{sample.path} is not an image file, as --against needs: leave --against out")
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("L" if recipe.mode == "grey" else "RGB")
    fitted = _FITS[recipe.fit](picture, (recipe.width, recipe.height), Image.Resampling.BILINEAR)
    pixels = np.asarray(fitted, np.float32).reshape(recipe.height, recipe.width, -1)
    return pixels.transpose(2, 0, 1) / 255
