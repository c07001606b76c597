"""plan_cache: which codec, size and number of variants a cache should have, measured on a few samples of its source."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tpucache import kaggle
from tpucache.errors import BuildError, RecipeError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.memory import BUDGET
from tpucache.ondevice.decode import PixelDecoder, Resize
from tpucache.recipe import Recipe
from tpucache.report.bench import ReadingRate, check_device_rate, measure_reading
from tpucache.store.codecs import CODECS, IMAGE_CODECS
from tpucache.store.codecs.dct.coefficients import BLOCK
from tpucache.store.fields import IMAGE, Field
from tpucache.types import Array
from tpucache.warmup.build_options import CODECS_COMPARED, BuildOptions, LabelKind, Target
from tpucache.warmup.candidates import Candidate, try_recipes
from tpucache.warmup.estimate import kaggle_blocks
from tpucache.warmup.sources import label_source, pad_source, to_source
from tpucache.warmup.sources.labelled import class_names
from tpucache.warmup.sources.source import Items, Source

Size = int | tuple[int, int]

#: Frequencies that are stored apart where several sizes are wanted: those of a quarter and of half the size.
_BANDS: Final = (2, 4, BLOCK)
#: A device that waits so little is fed.
_FED: Final = 0.02
_ROUNDS: Final = 3
#: What writing and reading a small cache takes at least, about.
_READING_SECONDS: Final = 1.0
_BATCH: Final = 256
_LEAST_SECONDS: Final = 0.1
_MOST_SECONDS: Final = 1.0
_MOST_PSNR: Final = 99.0  # dB of images that differ in next to nothing


@dataclass(frozen=True)
class PlanRow:
    """One cache, and one size to read it in.

    `size` is what is stored, (height, width), `resolution` what is read where that is smaller: then `bands` are the
    frequencies that are stored apart. `bytes` and `seconds` are estimates, of the whole cache and of its build here.
    `bytes_per_image` are those that are read of one, and `batch_bytes_per_image` those that a device is given.
    `images_per_second` is measured, with images that a device finishes left packed, and `reading` is how: "keep" where
    all images that an epoch may read fit into memory, else "stream". `idle` is the share of its time that a device of
    the given rate waits. `psnr` is in dB, of the images that are read against pixels that no codec has touched, None
    where they are the same. `fits` is whether the cache keeps within the target, with `reason` where it does not.
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

    `recommended` is None where no cache keeps within the target. Of `samples`, `tried` were tried; `failed` has the
    path and the reason of those that cannot be used, `left_out` the reason why a codec cannot be, by its name. It took
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


def plan_cache(
    source: str | Path | Source | Items,
    recipe: Recipe | None = None,
    *,
    sizes: Sequence[Size] = (224,),
    codecs: Sequence[str] = CODECS_COMPARED,
    variants: Sequence[int] = (0, 4),
    target: Target = None,
    device_rate: float | None = None,
    seconds: float = 30.0,
    jobs: int | None = None,
    threads: int = 2,
    labels: LabelKind = BuildOptions.labels,
    classes: str | Path | Sequence[str] | None = BuildOptions.classes,
    pad: int | None = BuildOptions.pad,
    truncate: bool = BuildOptions.truncate,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CachePlan:
    """Compare caches of each codec, size and number of variants, by a few samples of a source, in about `seconds`.

    The samples are decoded, resized, augmented and encoded by as many workers as `build_cache` would have, and small
    caches of them are written into a temporary folder and read by `threads` threads. `recipe` says all else of the
    caches. Where there are several `sizes`, caches of the largest one with bands of frequencies are compared, too, read
    in each of the sizes. `target` "kaggle" says which keep within Kaggle's limits, `device_rate`, in images a second,
    how long an accelerator waits. `on_progress` is given a line of text now and then.

    Recommended is, of the caches that fit: one that the device waits little for, of as many of the sizes as possible,
    the largest size, the most variants; then raw pixels where all of them fit into memory, or else the fewest bytes.

    Raises UsageError for values that no argument has, and what `build_cache` raises before it starts to build.
    """
    began = time.monotonic()
    check_device_rate(device_rate)
    _check_numbers(seconds, threads)
    BuildOptions(labels=labels, target=target)  # refuses values that no option has
    recipe = recipe or Recipe()
    wanted, left_out = _to_wanted(recipe, sizes, codecs, variants)
    source = label_source(pad_source(to_source(source), pad, truncate), labels, class_names(classes))
    with _temporary_folder() as folder:
        ways = sum(len(each.read) for each in wanted)
        expected = max(seconds, seconds / 3 + _READING_SECONDS * ways)
        on_progress(
            f"trying {len(wanted)} kinds of records on a few samples, then reading them in {ways} ways: about "
            f"{expected:,.0f} s"
        )
        recipes = [each.recipe for each in wanted]
        tried = try_recipes(source, recipes, folder, seconds=seconds / 3, jobs=jobs, labels=labels)
        readings = [
            _Reading(tried.found[number], size)
            for number, each in enumerate(wanted)
            if number in tried.found
            for size in each.read
        ]
        left = began + seconds - time.monotonic()
        rows: list[PlanRow] = []
        for number, reading in enumerate(readings):
            on_progress(f"reading {number + 1} of {len(readings)}: {reading.text}")
            rows += _rows(reading, variants, left / len(readings), threads, device_rate, target)
        rows.sort(key=lambda row: (row.size, row.variants, row.bytes))
    best = _best(rows)
    recommended = None
    if best is not None:
        of_codec = _with_codec(recipe, best.codec)
        recommended = replace(of_codec, size=best.size, bands=best.bands, variants=best.variants)
    return CachePlan(
        rows=rows,
        recommended=recommended,
        samples=tried.samples,
        tried=tried.tried,
        failed=tried.failed,
        left_out={**left_out, **{wanted[number].recipe.codec: reason for number, reason in tried.left_out.items()}},
        target=target,
        device_rate=device_rate,
        workers=next(iter(tried.found.values())).workers,
        threads=threads,
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


class _Wanted(NamedTuple):
    """A recipe to be tried, with the most variants that are wanted, and the sizes to read it in; None: as stored."""

    recipe: Recipe
    read: tuple[tuple[int, int] | None, ...]


def _to_wanted(
    recipe: Recipe, sizes: Sequence[Size], codecs: Sequence[str], variants: Sequence[int]
) -> tuple[list[_Wanted], dict[str, str]]:
    """Return the recipes of all sizes and codecs, and why codecs cannot be used, by their names.

    Where there are several sizes, the largest one in bands is among them. Raises UsageError, RecipeError.
    """
    for name, values in (("sizes", sizes), ("codecs", codecs), ("variants", variants)):
        if isinstance(values, str) or not len(values):
            raise UsageError(f"{name} are one or more, in a list, not {values!r}")
    for codec in codecs:
        if codec not in IMAGE_CODECS:
            raise UsageError(f"codecs are some of {', '.join(IMAGE_CODECS)}, not {codec!r}")
    for count in variants:
        replace(recipe, variants=count)  # refuses what is no number of variants
    most = max(variants)
    whole = sorted({replace(recipe, size=size).size for size in sizes}, key=_area, reverse=True)
    found: list[_Wanted] = []
    left_out: dict[str, str] = {}
    for codec in dict.fromkeys(codecs):
        try:
            of_codec = _with_codec(replace(recipe, variants=most), codec)
        except RecipeError as error:
            left_out[codec] = str(error)
            continue
        found += [_Wanted(replace(of_codec, size=size), (None,)) for size in whole]
        if len(whole) > 1 and CODECS[codec].has_frequencies:
            found.append(_Wanted(replace(of_codec, size=whole[0], bands=_BANDS), (None, *map(_to_pair, whole[1:]))))
    if not found:
        raise RecipeError("; ".join(left_out.values()))
    return found, left_out


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


def _to_pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _area(size: Size) -> int:
    return math.prod(_to_pair(size))


def _check_numbers(seconds: float, threads: int) -> None:
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds are a number above 0, not {seconds}")
    if threads < 1:
        raise UsageError(f"threads are at least 1, not {threads}")


@dataclass(frozen=True)
class _Reading:
    """A small cache, and the size to read it in; None for the stored one."""

    candidate: Candidate
    resolution: tuple[int, int] | None

    @property
    def text(self) -> str:
        """What is read, in words."""
        recipe = self.candidate.recipe
        shown = "" if self.resolution is None else f" as {self.resolution[0]}x{self.resolution[1]}"
        return f"{recipe.codec} {recipe.height}x{recipe.width}{shown}{' in bands' if recipe.bands else ''}"


def _rows(
    reading: _Reading,
    variants: Sequence[int],
    seconds: float,
    threads: int,
    device_rate: float | None,
    target: Target,
) -> list[PlanRow]:
    """Read a small cache for so many seconds; return the rows of the whole ones, by their numbers of variants."""
    candidate = reading.candidate
    with CachedDataset(candidate.cache, resolution=reading.resolution, in_memory=False) as dataset:
        psnr = _psnr(dataset, candidate.images)
        read_bytes, record_bytes = (
            dataset.mean_record_bytes,
            sum(each.nbytes for each in dataset.packed().record_fields),
        )
    recipe, room = candidate.recipe, BUDGET.room
    ways = {
        count: "keep" if candidate.samples * max(1, count) * record_bytes <= room else "stream" for count in variants
    }
    turns = _ROUNDS * (1 if device_rate is None else 2) + 1
    each_round = min(_MOST_SECONDS, max(_LEAST_SECONDS, seconds / turns / len({*ways.values()})))
    rates = {
        way: _measure(candidate.cache, reading.resolution, way == "keep", each_round, threads, device_rate)
        for way in {*ways.values()}
    }
    rows = []
    for count in dict.fromkeys(variants):
        needed, way = candidate.bytes(count), ways[count]
        reason = _refusal(replace(recipe, variants=count), needed) if target == "kaggle" else ""
        rows.append(
            PlanRow(
                codec=recipe.codec,
                size=(recipe.height, recipe.width),
                resolution=reading.resolution,
                bands=recipe.bands,
                variants=count,
                bytes=needed,
                seconds=candidate.seconds(count),
                bytes_per_image=read_bytes,
                batch_bytes_per_image=record_bytes,
                images_per_second=rates[way].images_per_second,
                reading="keep" if way == "keep" else "stream",
                idle=rates[way].idle,
                psnr=psnr,
                fits=not reason,
                reason=reason,
            )
        )
    return rows


def _measure(
    cache: Path,
    resolution: tuple[int, int] | None,
    keep: bool,
    seconds: float,
    threads: int,
    device_rate: float | None,
) -> ReadingRate:
    with CachedDataset(cache, resolution=resolution, in_memory="auto" if keep else False) as dataset:
        return measure_reading(
            dataset,
            batch_size=min(_BATCH, len(dataset)),
            threads=threads,
            rounds=_ROUNDS,
            seconds=seconds,
            device_rate=device_rate,
        )


def _psnr(dataset: CachedDataset, images: Sequence[Array]) -> float | None:
    """Return the mean PSNR in dB of a cache's first images against the pixels that they are of; None where all are the
    same. Those of another size are compared with Lanczos of the stored one."""
    found: list[float] = []
    shown = (image for batch in dataset.select(slice(len(images))).field_batches(IMAGE) for image in batch)
    for image, original in zip(shown, images, strict=True):
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
