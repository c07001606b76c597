"""plan_cache: builds small caches of a few samples and reads them, to choose a codec, a size and a number of variants.

`build_cache` builds each small cache in one process. The size and build time of the whole cache are estimated in
proportion to the number of samples.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, ParamSpec, Protocol

import numpy as np

from tpucache import kaggle
from tpucache.errors import BuildError, DependencyError, RecipeError, SourceError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.memory import BUDGET
from tpucache.ondevice.decode import PixelDecoder, Resize
from tpucache.options import by_name
from tpucache.recipe import Recipe
from tpucache.report.bench import check_device_rate, measure_reading
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.dct.coefficients import BLOCK
from tpucache.store.fields import IMAGE, Field
from tpucache.store.manifest import Manifest
from tpucache.types import Array
from tpucache.warmup.build import build_cache
from tpucache.warmup.build_options import PlanOptions, SourceOptions, Target
from tpucache.warmup.estimate import kaggle_blocks
from tpucache.warmup.run.executors import Executor
from tpucache.warmup.sources import select_source, to_source
from tpucache.warmup.sources.source import DerivedSource, Item, Items, Listing, Sample, Source, source_name

Names = ParamSpec("Names")

#: The codec that stores plain pixels.
_PLAIN: Final = next(name for name in CODECS.own if CODECS[name].is_plain)
#: Bands of frequencies for reading several sizes: a quarter, half and the whole of the stored size.
_BANDS: Final = (2, 4, BLOCK)
#: A device that waits for at most this share of its time counts as busy.
_FED: Final = 0.02
#: The most samples in a small cache, and the number of samples whose pixels are compared.
_SAMPLES: Final = 256
_COMPARED: Final = 16
#: The largest size of a small cache, without compression.
_CACHE_BYTES: Final = 512 << 20
#: The share of the time for building; the rest is for reading.
_BUILDING: Final = 0.6
_ROUNDS: Final = 3
_BATCH: Final = 256
#: Samples in an epoch of reading, which repeats those of a small cache because each epoch takes time to begin.
_EPOCH: Final = 2048
_LEAST_SECONDS: Final = 0.1
_MOST_SECONDS: Final = 1.0
_MOST_PSNR: Final = 99.0  # dB, for images that hardly differ

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class PlanRow:
    """The figures of one cache, read in one size.

    `codec`, `size` (height, width) and `variants` are the cache's. `resolution` is the (height, width) in which it is
    read, None for the stored size. `bands` are its bands of frequencies, None without. `bytes` is the estimated size of
    the whole cache, and `seconds` the estimated time to build it on this machine. `bytes_per_image` is the number of
    bytes that are read from the cache for an image, and `batch_bytes_per_image` the number that is sent to a device.
    `images_per_second` is the measured rate of reading; packed images are not decoded. `reading` is "keep" if all
    images of an epoch fit into memory, else "stream". `idle` is the share of time for which a device with the given
    rate would wait; None without a rate. `psnr`, in dB, compares the images with uncompressed pixels; None if they are
    equal. `fits` says whether the cache is within the target's limits; if not, `reason` says why.
    """

    codec: str
    size: tuple[int, int]
    resolution: tuple[int, int] | None
    bands: tuple[int, ...] | None
    variants: int
    bytes: int
    seconds: float
    bytes_per_image: int
    batch_bytes_per_image: int
    images_per_second: float
    reading: Literal["keep", "stream"]
    idle: float | None
    psnr: float | None
    fits: bool
    reason: str

    @property
    def cache(self) -> tuple[Any, ...]:
        """The codec, size, bands and number of variants of the row's cache: equal in all rows of one cache."""
        return self.codec, self.size, self.bands, self.variants


@dataclass(frozen=True)
class CachePlan:
    """The result of `plan_cache`: a row for each cache and each size to read it in, and the recommended recipe.

    `recommended` is None if no cache is within the limits of `target`. Small caches were built from `tried` of the
    `samples` samples. `failed` has the path and the reason for each tried sample that cannot be used. `left_out` has
    the reason for each codec that cannot be used, by its name. `target` and `device_rate` are the options that were
    given. The estimates are for `workers` processes that build and `threads` threads that read. Planning took
    `seconds`.
    """

    rows: Sequence[PlanRow]
    recommended: Recipe | None
    samples: int
    tried: int
    failed: Sequence[tuple[str, str]]
    left_out: Mapping[str, str]
    target: Target
    device_rate: float | None
    workers: int
    threads: int
    seconds: float

    def is_recommended(self, row: PlanRow) -> bool:
        """Return whether a row belongs to the recommended cache."""
        recipe = self.recommended
        return recipe is not None and row.cache == (recipe.codec, recipe.size, recipe.bands, recipe.variants)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        whole = {name: value for name, value in vars(self).items() if name not in ("rows", "recommended", "failed")}
        return {
            **whole,
            "left_out": dict(self.left_out),
            "failed": [{"path": path, "reason": reason} for path, reason in self.failed],
            "rows": [{**asdict(row), "recommended": self.is_recommended(row)} for row in self.rows],
        }


class PlansCache(Protocol[Names]):
    """The type of `plan_cache`, whose options are keywords."""

    def __call__(
        self,
        source: str | Path | Source | Items,
        recipe: Recipe | None = None,
        *args: Names.args,
        **options: Names.kwargs,
    ) -> CachePlan:
        """Compare caches; see `plan_cache`."""


def _options_by_name(kind: Callable[Names, PlanOptions]) -> Callable[[Callable[..., CachePlan]], PlansCache[Names]]:
    return lambda function: by_name(function, kind)


@_options_by_name(PlanOptions)
def plan_cache(source: str | Path | Source | Items, recipe: Recipe | None = None, *, options: PlanOptions) -> CachePlan:
    """Compare caches of each codec, size and number of variants: build small caches of a few samples, and read them.

    A small cache has up to 256 samples, spread over the source. One process builds it in a temporary folder. The size
    and the time of building are estimated for the whole cache in proportion to the number of samples, and the time is
    divided by the number of workers. `recipe` has the caches' other settings. Options are keywords:

    - `sizes`, `codecs`, `variants`: what to compare. With several sizes, caches of the largest size with bands of
      frequencies are compared, too, read in each of the sizes.
    - `target`: with "kaggle", the plan says which caches are within Kaggle's limits.
    - `device_rate`: images a second of an accelerator, to compute the share of time for which it would wait.
    - `seconds`: about how long the plan may take; with little time it uses fewer samples.
    - `jobs`, `labels`, `classes`, `missing_label`, `pad`, `truncate`: as in `build_cache`.
    - `threads`: the number of threads that read.
    - `on_progress`: is called with lines of text.

    The recommended cache is within the target's limits, and leaves the device idle for at most 2% of the time, or for
    the shortest time if no cache does. Among such caches it has the most sizes in which it can be read, then the
    largest size, then the most variants, then raw pixels if they fit into memory, and then the fewest bytes.

    Raises UsageError for a value that an option does not allow, and the errors of `build_cache`.
    """
    began = time.monotonic()
    check_device_rate(options.device_rate)
    recipe = recipe or Recipe()
    wanted, left_out = _to_wanted(recipe, options)
    with _temporary_folder() as folder, _warning_once():
        trial = _TrialBuilds(to_source(source), wanted, folder, options)
        rows: list[PlanRow] = []
        refusals: list[DependencyError | RecipeError] = []
        for number, each in enumerate(wanted, 1):
            options.on_progress(f"{number} of {len(wanted)}: {each.text}")
            try:
                rows += trial.rows(each)
            except (DependencyError, RecipeError) as error:
                left_out[each.recipe.codec] = str(error)
                refusals.append(error)
        if not rows:
            raise refusals[0]
    rows.sort(key=lambda row: (row.size, row.variants, row.bytes))
    return CachePlan(
        rows=rows,
        recommended=_recommended(recipe, rows),
        samples=trial.samples,
        tried=trial.tried,
        failed=[*trial.failed.items()],
        left_out=left_out,
        target=options.target,
        device_rate=options.device_rate,
        workers=trial.workers,
        threads=options.threads,
        seconds=time.monotonic() - began,
    )


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="tpucache-plan-"))
    except OSError as error:
        raise BuildError(
            f"no temporary folder can be made: {error}. Set the variable TMPDIR to a writable folder"
        ) from error
    try:
        yield folder
    except OSError as error:
        raise BuildError(
            f"the temporary folder {folder} cannot be used: {error}. Set the variable TMPDIR to another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _warning_once() -> Iterator[None]:
    """Return a context that logs each warning once: all small builds have the same warnings about the source."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(seen)
        seen.add(record.getMessage())
        return len(seen) > before

    _log.addFilter(is_new)
    try:
        yield
    finally:
        _log.removeFilter(is_new)


class _Wanted(NamedTuple):
    """A recipe to try, with the largest number of variants, and the sizes in which its cache is read.

    `read` has each size as (height, width), or None for the stored size.
    """

    recipe: Recipe
    read: tuple[tuple[int, int] | None, ...]

    @property
    def text(self) -> str:
        return f"{self.recipe.codec} {self.recipe.height}x{self.recipe.width}{' in bands' if self.recipe.bands else ''}"


def _to_wanted(recipe: Recipe, options: PlanOptions) -> tuple[list[_Wanted], dict[str, str]]:
    """Return the recipes to try, and for each codec that cannot be used the reason, by the codec's name.

    There is a recipe for each size and codec. With several sizes, codecs that store frequencies also get a recipe with
    `bands`, in the largest size. Raises RecipeError if no codec can be used, or for an impossible number of variants.
    """
    for count in options.variants:
        replace(recipe, variants=count)  # raises RecipeError for an impossible number
    shapes = {_shape(replace(recipe, size=size)) for size in options.sizes}
    whole = sorted(shapes, key=math.prod, reverse=True)
    found: list[_Wanted] = []
    left_out: dict[str, str] = {}
    for codec in dict.fromkeys(options.codecs):
        try:
            of_codec = _with_codec(replace(recipe, variants=max(options.variants)), codec)
        except RecipeError as error:
            left_out[codec] = str(error)
            continue
        found += [_Wanted(replace(of_codec, size=size), (None,)) for size in whole]
        if len(whole) > 1 and CODECS[codec].has_frequencies:
            found.append(_Wanted(replace(of_codec, size=whole[0], bands=_BANDS), (None, *whole[1:])))
    if not found:
        raise RecipeError("; ".join(left_out.values()))
    return found, left_out


def _shape(recipe: Recipe) -> tuple[int, int]:
    return recipe.height, recipe.width


def _with_codec(recipe: Recipe, codec: str) -> Recipe:
    """Return a recipe with another codec, and without bands.

    `quality` is kept if both codecs have the same range of qualities, and `chroma` if the new codec has that setting.
    """
    before, now = CODECS[recipe.codec], CODECS[codec]
    return replace(
        recipe,
        codec=codec,
        bands=None,
        quality=recipe.quality if before.quality_range == now.quality_range else None,
        chroma=recipe.chroma if now.chromas else None,
    )


@dataclass(frozen=True, repr=False)
class _Listed(DerivedSource):
    """A source that has been listed: `listing` has all its samples, or some of them."""

    source: Source
    listing: Listing

    def list(self) -> Listing:
        return self.listing

    def load(self, sample: Sample) -> Item:
        return self.source.load(sample)

    def few(self, count: int) -> _Listed:
        """Return a source with at most `count` of these samples, spread evenly; a larger `count` only adds samples."""
        return _Listed(self.source, select_source(self, limit=count).list())


class _Built(NamedTuple):
    directory: Path
    manifest: Manifest
    seconds: float


class _Pace(NamedTuple):
    """The seconds that a build takes.

    `once` is for the whole build, `sample` for each sample with the fewest variants that are compared, and `variant`
    for each further variant of a sample.
    """

    once: float
    sample: float
    variant: float


class _TrialBuilds:
    def __init__(self, source: Source, wanted: Sequence[_Wanted], folder: Path, options: PlanOptions) -> None:
        """List the source, build caches of raw pixels, and choose the number of samples that there is time for.

        Raises SourceError, and the errors of `build_cache`.
        """
        self._folder, self._options = folder, options
        self._meaning = {each.name: getattr(options, each.name) for each in fields(SourceOptions)}
        self.workers = Executor(jobs=options.jobs).workers
        self.failed: dict[str, str] = {}
        self._paces: dict[tuple[Any, ...], _Pace] = {}
        began = time.monotonic()
        whole = _Listed(source, source.list())
        self._listing_seconds, self.samples = time.monotonic() - began, len(whole.listing.samples)
        if not self.samples:
            raise SourceError(f"{source_name(source)} has no samples")
        self._compared = whole.few(_COMPARED)
        raw = {_shape(each.recipe): _with_codec(each.recipe, _PLAIN) for each in wanted}
        first = {shape: self._build(self._compared, recipe) for shape, recipe in raw.items()}
        self._pixels = {shape: _pixels(built) for shape, built in first.items()}
        largest = max(raw, key=math.prod)
        # Built again, because the first build also imported libraries.
        seconds = self._build(self._compared, raw[largest]).seconds / _COMPARED
        size = first[largest].manifest.total_bytes // first[largest].manifest.samples
        building = 2 * len(wanted) * seconds  # for each sample, with and without variants
        most = min(_SAMPLES, int(_BUILDING * options.seconds / building), _CACHE_BYTES // size)
        self._few = whole.few(max(_COMPARED, most))
        self.tried = len(self._few.listing.samples)
        readings = sum(len(each.read) for each in wanted)
        self._reading_seconds = (1 - _BUILDING) * options.seconds / readings
        reading = readings * max(self._reading_seconds, _LEAST_SECONDS * (_ROUNDS + 1))
        options.on_progress(
            f"building caches of {self.tried:,} samples by {len(wanted)} recipes, and reading them in {readings} ways: "
            f"about {building * self.tried + reading:,.0f} s"
        )

    def rows(self, wanted: _Wanted) -> Iterator[PlanRow]:
        """Build a small cache by a recipe to try; yield a row for each size to read and each number of variants.

        Raises the errors of `build_cache`.
        """
        built = self._build(self._few, wanted.recipe)
        self.failed |= {skip.path: skip.reason for skip in built.manifest.skipped}
        pace = self._pace(wanted.recipe, built.seconds)
        for resolution in wanted.read:
            yield from self._rows(wanted.recipe, built, resolution, pace)
        shutil.rmtree(built.directory, ignore_errors=True)

    def _build(self, few: _Listed, recipe: Recipe) -> _Built:
        """Build a small cache in one process, with one shard for each variant unless `few` has all samples.

        Raises SourceError if the source has no images.
        """
        if len(few.listing.samples) < self.samples:
            recipe = replace(recipe, max_blocks=1)
        directory, began = Path(tempfile.mkdtemp(dir=self._folder)), time.perf_counter()
        manifest = build_cache(few, directory, recipe, on_error="skip", jobs=1, **self._meaning)
        seconds = time.perf_counter() - began
        if manifest.fields[0].name != IMAGE:
            raise SourceError(f"{few!r} has no images, so there are no codecs and sizes to compare")
        return _Built(directory, manifest, seconds)

    def _pace(self, recipe: Recipe, seconds: float) -> _Pace:
        """Return the pace of builds by a recipe.

        `seconds` is the time in which the small cache with all variants was built. A recipe with bands has the pace of
        the same recipe without bands, because both make the same records.
        """
        key = recipe.codec, recipe.size
        if recipe.bands is None:
            fewest = replace(recipe, variants=min(self._options.variants))
            more = recipe.variants - fewest.variants
            clean = self._build(self._few, fewest).seconds if more else seconds
            start, started = self._build(self._compared, fewest).seconds, len(self._compared.listing.samples)
            left = self.tried - started
            each = max(0.0, clean - start) / left if left else clean / self.tried
            variant = max(0.0, seconds - clean) / self.tried / more if more else 0.0
            self._paces[key] = _Pace(max(0.0, start - started * each), each, variant)
        return self._paces[key]

    def _rows(
        self, recipe: Recipe, built: _Built, resolution: tuple[int, int] | None, pace: _Pace
    ) -> Iterator[PlanRow]:
        """Read the clean images of the small cache `built` at `resolution`; yield a row for each number of variants.

        The time to build a whole cache is estimated from `pace`.
        """
        options = self._options
        with CachedDataset(built.directory, resolution=resolution, in_memory=False) as dataset:
            psnr = _psnr(dataset, self._pixels[_shape(recipe)])
            read_bytes = dataset.mean_record_bytes
            record_bytes = sum(field.nbytes for field in dataset.packed().record_fields)
        counts, room = dict.fromkeys(options.variants), BUDGET.room
        kept = {count: self.samples * max(1, count) * record_bytes <= room for count in counts}
        ways = {*kept.values()}
        rates = {is_kept: self._rate(built.directory, resolution, is_kept, len(ways)) for is_kept in ways}
        for count in counts:
            needed = round(_bytes(built.manifest, count) / self.tried * self.samples)
            seconds = pace.sample + (count - min(counts)) * pace.variant
            reason = _refusal(replace(recipe, variants=count), needed) if options.target == "kaggle" else ""
            rate = rates[kept[count]]
            yield PlanRow(
                codec=recipe.codec,
                size=_shape(recipe),
                resolution=resolution,
                bands=recipe.bands,
                variants=count,
                bytes=needed,
                seconds=self._listing_seconds + pace.once + self.samples * seconds / self.workers,
                bytes_per_image=read_bytes,
                batch_bytes_per_image=record_bytes,
                images_per_second=rate,
                reading="keep" if kept[count] else "stream",
                idle=None if options.device_rate is None else max(0.0, 1 - rate / options.device_rate),
                psnr=psnr,
                fits=not reason,
                reason=reason,
            )

    def _rate(self, directory: Path, resolution: tuple[int, int] | None, is_kept: bool, ways: int) -> float:
        """Measure how many images a second are read from memory (`is_kept`) or from files, in rounds of up to a second.

        `ways` is the number of such measurements that share the time for reading.
        """
        seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, self._reading_seconds / ways / (_ROUNDS + 1)))
        with CachedDataset(directory, resolution=resolution, in_memory="auto" if is_kept else False) as dataset:
            repeated = dataset.select(np.tile(np.arange(len(dataset)), -(-_EPOCH // len(dataset))))
            return measure_reading(
                repeated, batch_size=_BATCH, threads=self._options.threads, rounds=_ROUNDS, seconds=seconds
            )


def _bytes(manifest: Manifest, variants: int) -> float:
    """Return how many bytes a cache would have with only `variants` of its augmented variants."""
    records = (1 + variants) / len(manifest.variants)
    shards = sum(entry.bytes for entry in manifest.shards if entry.variant <= variants)
    tables = sum(entry.bytes for entry in manifest.tables)
    return shards + tables - (1 - records) * manifest.index.bytes


def _pixels(built: _Built) -> dict[str, Array]:
    with CachedDataset(built.directory, in_memory=False) as dataset:
        images = [image for batch in dataset.field_batches(IMAGE) for image in batch]
        return dict(zip(dataset.table.paths, images, strict=True))


def _psnr(dataset: CachedDataset, pixels: Mapping[str, Array]) -> float | None:
    """Return the mean PSNR in dB of a dataset's images against uncompressed images; None if all are equal.

    `pixels` has the uncompressed images by path. If the dataset's images have another size, the uncompressed ones are
    resized to it by Lanczos.
    """
    positions = {path: at for at, path in enumerate(dataset.table.paths)}
    some = dataset.select([positions[path] for path in pixels])
    found: list[float] = []
    shown = (image for batch in some.field_batches(IMAGE) for image in batch)
    for image, original in zip(shown, pixels.values(), strict=True):
        expected = original if image.shape == original.shape else _resized(original, image.shape, dataset)
        error = float(np.square(image.astype(np.float64) - expected).mean())
        found.append(10 * math.log10(255**2 / error) if error else math.inf)
    if all(each == math.inf for each in found):
        return None
    return statistics.mean(min(_MOST_PSNR, each) for each in found)


def _resized(image: Array, shape: tuple[int, ...], dataset: CachedDataset) -> Array:
    resize = Resize(shape[0], shape[1], dataset.manifest.recipe["fit"])
    decoder = PixelDecoder(Field(IMAGE, "raw", "|u1", image.shape), resize)
    resized: Array = decoder.decode_here(np.moveaxis(image, 2, 0)[None])[0]
    return resized


def _refusal(recipe: Recipe, needed: int) -> str:
    """Return why a cache of `needed` bytes is not within Kaggle's limits; "" if it is."""
    try:
        kaggle_blocks(recipe)
    except BuildError as error:
        return str(error)
    limit = kaggle.WORKING_BYTES
    return f"{needed / 1e9:,.1f} GB, and /kaggle/working keeps {limit / 1e9:.0f} GB" if needed > limit else ""


def _recommended(recipe: Recipe, rows: Sequence[PlanRow]) -> Recipe | None:
    best = _best(rows)
    if best is None:
        return None
    return replace(_with_codec(recipe, best.codec), size=best.size, bands=best.bands, variants=best.variants)


def _best(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return a row of the cache that is best by the criteria in the docstring of `plan_cache`.

    Returns None if no cache is within the target's limits.
    """
    caches: dict[tuple[Any, ...], list[PlanRow]] = {}
    for row in rows:
        if row.fits:
            caches.setdefault(row.cache, []).append(row)

    def merit(read: list[PlanRow]) -> tuple[float, ...]:
        first = read[0]
        idle = max(row.idle or 0.0 for row in read)
        return (
            0.0 if idle <= _FED else -idle,
            len(read),
            first.size[0] * first.size[1],
            first.variants,
            CODECS[first.codec].is_plain and first.reading == "keep",
            -first.bytes,
        )

    return max(caches.values(), key=merit)[0] if caches else None
