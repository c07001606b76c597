"""plan_cache: small caches of a few samples, built and read back, to choose a codec, a size and a number of variants.

Each of them is built by `build_cache`, by one process. What the whole cache would take is in proportion to that.
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
from tpucache.warmup.sources.source import Item, Items, Listing, Sample, Source, loads_in_threads, source_name

Names = ParamSpec("Names")

#: The codec that leaves pixels as they are.
_PLAIN: Final = next(name for name in CODECS.own if CODECS[name].is_plain)
#: Frequencies that are stored apart where several sizes are wanted: those of a quarter and of half the size.
_BANDS: Final = (2, 4, BLOCK)
#: A device that waits for at most this share of its time is fed.
_FED: Final = 0.02
#: Samples of a small cache, as many as there is time and room for; and those whose pixels are compared.
_SAMPLES: Final = 256
_COMPARED: Final = 16
#: A small cache has at most this size, also without compression.
_CACHE_BYTES: Final = 512 << 20
#: The share of the time in which caches are built; in the rest of it they are read.
_BUILDING: Final = 0.6
_ROUNDS: Final = 3
_BATCH: Final = 256
#: Samples of an epoch of reading, in which those of a small cache are repeated: each epoch takes a moment to begin.
_EPOCH: Final = 2048
_LEAST_SECONDS: Final = 0.1
_MOST_SECONDS: Final = 1.0
_MOST_PSNR: Final = 99.0  # dB of images that differ in next to nothing

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class PlanRow:
    """One cache, and one size to read it in.

    `size` is what is stored, (height, width), `resolution` what is read where that is smaller: then `bands` are the
    frequencies that are stored apart. `bytes` and `seconds` are estimates, of the whole cache and of its build here.
    `bytes_per_image` are those that are read of one, and `batch_bytes_per_image` those that a device is given.
    `images_per_second` is measured, with images that a device finishes left packed, and `reading` is how: "keep" where
    all images that an epoch may read fit into memory, else "stream". `idle` is the share of its time that a device of
    the given rate waits at this rate. `psnr` is in dB, of the images that are read against pixels that no codec has
    touched, None where they are the same. `fits` is whether the cache keeps within the target, with `reason` where it
    does not.
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
        """What is equal for rows of one cache."""
        return self.codec, self.size, self.bands, self.variants


@dataclass(frozen=True)
class CachePlan:
    """What `plan_cache` found: a row for each cache and size that it is read in, and the recipe that it recommends.

    `recommended` is None where no cache keeps within the target. Small caches were built of `tried` samples out of
    `samples`. `failed` has the path and the reason of those that cannot be used, `left_out` the reason why a codec
    cannot be, by its name. Whole caches would be built by `workers` processes, and `threads` threads read. All of it
    took `seconds`.
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
        """Return whether a row is of the cache that is recommended."""
        recipe = self.recommended
        return recipe is not None and row.cache == (recipe.codec, recipe.size, recipe.bands, recipe.variants)

    def to_dict(self) -> dict[str, Any]:
        """Return this as JSON values."""
        whole = {name: value for name, value in vars(self).items() if name not in ("rows", "recommended", "failed")}
        return {
            **whole,
            "left_out": dict(self.left_out),
            "failed": [{"path": path, "reason": reason} for path, reason in self.failed],
            "rows": [{**asdict(row), "recommended": self.is_recommended(row)} for row in self.rows],
        }


class PlansCache(Protocol[Names]):
    """`plan_cache`, whose options are given by name."""

    def __call__(
        self,
        source: str | Path | Source | Items,
        recipe: Recipe | None = None,
        *args: Names.args,
        **options: Names.kwargs,
    ) -> CachePlan:
        """Call it."""


def _options_by_name(kind: Callable[Names, PlanOptions]) -> Callable[[Callable[..., CachePlan]], PlansCache[Names]]:
    return lambda function: by_name(function, kind)


@_options_by_name(PlanOptions)
def plan_cache(source: str | Path | Source | Items, recipe: Recipe | None = None, *, options: PlanOptions) -> CachePlan:
    """Compare caches of each codec, size and number of variants: small ones are built of a few samples, and read.

    They have up to 256 samples, spread over the source, and are built in a temporary folder by one process. The bytes
    and the seconds of the whole cache are in proportion, the seconds divided by the number of workers. `recipe` says
    all else of the caches. Options are given by name:

    - `sizes`, `codecs`, `variants`: what is compared. Where there are several sizes, caches of the largest one with
      bands of frequencies are compared, too, read in each of the sizes.
    - `target`: "kaggle" says which caches keep within the limits of Kaggle.
    - `device_rate`: images a second of an accelerator, to say for which share of its time it would wait.
    - `seconds`: about how long all of it takes; with little time, there are fewer samples.
    - `jobs`, `labels`, `classes`, `missing_label`, `pad`, `truncate`: as for `build_cache`.
    - `threads`: how many threads read.
    - `on_progress`: is called with a line of text now and then.

    Recommended is, of the caches that fit: one for which the device waits little, of as many of the sizes as possible,
    the largest size, the most variants; then raw pixels where all of them fit into memory, or else the fewest bytes.

    Raises UsageError for a value that an option does not allow, and what `build_cache` raises before it starts to
    build.
    """
    began = time.monotonic()
    check_device_rate(options.device_rate)
    recipe = recipe or Recipe()
    wanted, left_out = _to_wanted(recipe, options)
    with _temporary_folder() as folder, _warning_once():
        trial = _Trial(to_source(source), wanted, folder, options)
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
    """Make a folder for small caches, and remove it. Raises BuildError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="tpucache-plan-"))
    except OSError as error:
        raise BuildError(f"no temporary folder can be made: {error}. Name a writable one by TMPDIR") from error
    try:
        yield folder
    except OSError as error:
        raise BuildError(f"the temporary folder {folder} cannot be used: {error}. Name another by TMPDIR") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _warning_once() -> Iterator[None]:
    """Drop warnings that were shown already: each small build says the same about its source."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before, text = len(said), record.getMessage()
        said.add(text)
        return len(said) > before

    _log.addFilter(is_new)
    try:
        yield
    finally:
        _log.removeFilter(is_new)


class _Wanted(NamedTuple):
    """A recipe to try, the largest number of variants asked for, and the sizes to read it in (None: as stored)."""

    recipe: Recipe
    read: tuple[tuple[int, int] | None, ...]

    @property
    def text(self) -> str:
        """The recipe in words."""
        return f"{self.recipe.codec} {self.recipe.height}x{self.recipe.width}{' in bands' if self.recipe.bands else ''}"


def _to_wanted(recipe: Recipe, options: PlanOptions) -> tuple[list[_Wanted], dict[str, str]]:
    """Return the recipes of all sizes and codecs, and why codecs cannot be used, by their names.

    Where there are several sizes, the largest one in bands is among them. Raises RecipeError.
    """
    for count in options.variants:
        replace(recipe, variants=count)  # refuses what is no number of variants
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
    """Return a recipe with another codec, with its quality and colours as far as they mean the same for that."""
    before, now = CODECS[recipe.codec], CODECS[codec]
    return replace(
        recipe,
        codec=codec,
        bands=None,
        quality=recipe.quality if before.quality_range == now.quality_range else None,
        chroma=recipe.chroma if now.chromas else None,
    )


@dataclass(frozen=True)
class _Listed:
    """A source whose list of samples is known."""

    source: Source
    listing: Listing

    @property
    def loads_in_threads(self) -> bool:
        return loads_in_threads(self.source)

    def __repr__(self) -> str:
        return source_name(self.source)

    def list(self) -> Listing:
        return self.listing

    def load(self, sample: Sample) -> Item:
        return self.source.load(sample)

    def few(self, count: int) -> _Listed:
        """Return a source of some of the samples, spread over it; a larger count has the same ones and others."""
        return _Listed(self.source, select_source(self, limit=count).list())


class _Built(NamedTuple):
    """A small cache, and the seconds that one process took to build it."""

    directory: Path
    manifest: Manifest
    seconds: float


class _Pace(NamedTuple):
    """Seconds that a build takes in any case, for a sample with the fewest variants, and for each further variant."""

    once: float
    sample: float
    variant: float


class _Trial:
    """Builds small caches of a source's samples in a folder, and measures them."""

    def __init__(self, source: Source, wanted: Sequence[_Wanted], folder: Path, options: PlanOptions) -> None:
        """List the source, build caches of raw pixels, and decide by them how many samples there is time for.

        Raises SourceError, and what `build_cache` raises.
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
        seconds = self._build(self._compared, raw[largest]).seconds / _COMPARED  # libraries are imported by now
        size = first[largest].manifest.total_bytes // first[largest].manifest.samples
        building = 2 * len(wanted) * seconds  # with variants and without them, for each sample
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
        """Build a cache with the most variants, and yield its rows. Raises what `build_cache` raises."""
        built = self._build(self._few, wanted.recipe)
        self.failed |= {skip.path: skip.reason for skip in built.manifest.skipped}
        pace = self._pace(wanted.recipe, built.seconds)
        for resolution in wanted.read:
            yield from self._rows(wanted.recipe, built, resolution, pace)
        shutil.rmtree(built.directory, ignore_errors=True)

    def _build(self, few: _Listed, recipe: Recipe) -> _Built:
        """Build a small cache by one process, in one block unless it has all samples."""
        if len(few.listing.samples) < self.samples:
            recipe = replace(recipe, max_blocks=1)
        directory, began = Path(tempfile.mkdtemp(dir=self._folder)), time.perf_counter()
        manifest = build_cache(few, directory, recipe, on_error="skip", jobs=1, **self._meaning)
        seconds = time.perf_counter() - began
        if manifest.fields[0].name != IMAGE:
            raise SourceError(f"{few!r} has no images, whose codecs and sizes could be compared")
        return _Built(directory, manifest, seconds)

    def _pace(self, recipe: Recipe, seconds: float) -> _Pace:
        """Return what a build by a recipe takes, where all its variants of a few samples took so many seconds.

        In bands it takes as long as without: the same records are made, and cut.
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
        """Read the clean images of a small cache in a size; yield a row for each number of variants."""
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
        """Return how many images a second are read from memory or from files, in rounds of up to a second."""
        seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, self._reading_seconds / ways / (_ROUNDS + 1)))
        with CachedDataset(directory, resolution=resolution, in_memory="auto" if is_kept else False) as dataset:
            repeated = dataset.select(np.tile(np.arange(len(dataset)), -(-_EPOCH // len(dataset))))
            return measure_reading(
                repeated, batch_size=_BATCH, threads=self._options.threads, rounds=_ROUNDS, seconds=seconds
            )


def _bytes(manifest: Manifest, variants: int) -> float:
    """Return how large a cache would be that has fewer of its augmented variants."""
    records = (1 + variants) / len(manifest.variants)
    shards = sum(entry.bytes for entry in manifest.shards if entry.variant <= variants)
    tables = sum(entry.bytes for entry in manifest.tables)
    return shards + tables - (1 - records) * manifest.index.bytes


def _pixels(built: _Built) -> dict[str, Array]:
    """Return the clean images of a small cache by their paths."""
    with CachedDataset(built.directory, in_memory=False) as dataset:
        images = [image for batch in dataset.field_batches(IMAGE) for image in batch]
        return dict(zip(dataset.table.paths, images, strict=True))


def _psnr(dataset: CachedDataset, pixels: Mapping[str, Array]) -> float | None:
    """Return the mean PSNR in dB of images against the pixels with the same paths; None where all are the same.

    Images of another size are compared with Lanczos of the stored one.
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
    """Return why a cache is not within Kaggle's limits; "" where it is."""
    try:
        kaggle_blocks(recipe)
    except BuildError as error:
        return str(error)
    limit = kaggle.WORKING_BYTES
    return f"{needed / 1e9:,.1f} GB, and /kaggle/working keeps {limit / 1e9:.0f}" if needed > limit else ""


def _recommended(recipe: Recipe, rows: Sequence[PlanRow]) -> Recipe | None:
    best = _best(rows)
    if best is None:
        return None
    return replace(_with_codec(recipe, best.codec), size=best.size, bands=best.bands, variants=best.variants)


def _best(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return a row of the cache that is recommended; None where none fits."""
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
