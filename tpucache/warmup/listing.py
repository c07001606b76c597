"""Numbers the samples of a source as in a cache, and checks that source and recipe still fit the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import RecipeError, SampleError, SourceError
from tpucache.recipe import Recipe, differences
from tpucache.store.ahead import Lateness
from tpucache.store.cache import Cache
from tpucache.store.copying import earlier_tables
from tpucache.store.fields import LABEL, MASK
from tpucache.store.manifest import Manifest, differ_in_values, label_options, mask_name_difference
from tpucache.store.samples import IMAGE_COLUMNS, SampleTable
from tpucache.warmup.code_digest import code_changes
from tpucache.warmup.records.masks import decode_mask, has_grey_palette
from tpucache.warmup.sources import label_source, pad_source, select_source
from tpucache.warmup.sources.columns import to_number
from tpucache.warmup.sources.labelled import UnreadLabelError
from tpucache.warmup.sources.source import Column, Item, Listing, LoadAhead, Sample, Source, name_some, taken

#: The column of the samples table with each sample's size in its source.
SIZE_COLUMN: Final = "source_bytes"
#: The columns of the samples table that every cache may have; all others came from its source.
OWN_COLUMNS: Final = ("number", "path", LABEL, SIZE_COLUMN, *IMAGE_COLUMNS)
_ABSENT: Final = "-"

_log: Final = logging.getLogger("tpucache")

_TRIED: Final = 8
_MOST_DIGITS: Final = 20
#: After this many seconds no further sample is compared: a run on a finished cache should end at once.
_COMPARE_SECONDS: Final = 0.5
_ADVICE: Final = (
    "Give the same options and the same source (labels, folds and columns are part of a cache, and `tpucache relabel` "
    "changes them), or another folder to build anew"
)

#: `check_masks` reads this many masks, evenly spread.
_MASKS: Final = 32
_WHITE: Final = 255
_MOST_CLASSES: Final = 150  # in one mask: ADE20K has 150 classes in all
#: Values are levels of grey, not classes, if they are at least _GREY_STEP apart and the highest is at least _BRIGHT.
_GREY_STEP: Final = 16
_BRIGHT: Final = 200
_JPEG: Final = b"\xff\xd8\xff"
_JPEG_ADVICE: Final = (
    "the first mask is a JPEG, which changes class numbers: save masks without loss, as PNG, or give "
    "--mask-values scale if masks are black and white"
)

_GREY_PALETTE: Final = (
    "the mask of {path} is a palette image of greys, and the greys differ from their positions in the palette: give "
    "--mask-values scale if masks are black and white (white becomes class 1), --mask-colours with the grey of each "
    "class, or --mask-values keep if the positions are the classes"
)


def sizes_of(samples: Sequence[Sample]) -> npt.NDArray[np.uint64]:
    """Return the sizes of samples in their source, in bytes: uint64 (n,)."""
    return np.array([sample.bytes for sample in samples], np.uint64)


def resized(samples: Sequence[Sample], sizes: Any) -> list[Sample]:
    """Return the samples whose size differs from the one in `sizes`; 0 means that a size is not known."""
    return [each for each, size in zip(samples, np.asarray(sizes).tolist(), strict=True) if 0 < size != each.bytes > 0]


def check_sizes(changed: Sequence[Sample]) -> None:
    """Raise SourceError if there is a sample whose size has changed since its records were made."""
    if changed:
        raise SourceError(
            f"{len(changed):,} samples have another size than when their records were made: "
            f"{name_some([sample.path for sample in changed])}. Bring them back as they were, or give another folder "
            "to build anew"
        )


def number_samples(listing: Listing, cache: Cache, *, retry: bool = False) -> Listing:
    """Return a listing in which each sample of the cache, kept or skipped, has its old number; new samples follow."""
    check_boxes(cache.manifest, listing, cache.directory)
    table = cache.samples
    numbers = dict(zip(table.paths, table.numbers.tolist(), strict=True))
    skipped = {skip.path: skip.number for skip in cache.manifest.skipped}
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    deleted = {each.path: each.number for each in cache.manifest.deleted if each.path}
    missing = [path for path in (*numbers, *skipped) if path not in places]
    if missing:
        raise SourceError(
            f"the source lacks {len(missing):,} of the samples that {cache.directory} was made of: "
            f"{name_some(missing)}. Bring them back, or give another folder to build anew"
        )
    old = {**numbers, **skipped, **deleted}
    is_same = old.keys() >= places.keys() and not (retry and skipped)
    if earlier_tables(cache.manifest) and is_same:
        listing = _relabelled(listing, cache, places)
    _check_sizes_and_labels(listing, cache, places)
    paths = {number: path for path, number in old.items()}
    order = [paths.get(number, "") for number in range(len(old) + len(cache.manifest.deleted) - len(deleted))]
    order += [sample.path for sample in listing.samples if sample.path not in old]
    numbered = taken(listing, [places.get(path, 0) for path in order])
    samples = [  # a deleted sample that the source lacks becomes an empty sample, which is never read
        sample if path in places else Sample(number, path)
        for number, (path, sample) in enumerate(zip(order, numbered.samples, strict=True))
    ]
    return dataclasses.replace(numbered, samples=samples)


def _relabelled(listing: Listing, cache: Cache, places: Mapping[str, int]) -> Listing:
    _log.warning("%s was relabelled: its own labels and columns are used, not those of the source", cache.directory)
    table = cache.samples
    samples = [dataclasses.replace(sample, label=None) for sample in listing.samples]
    rows = np.zeros(len(samples), np.int64)  # row 0 stands for skipped samples, which are not built
    rows[[places[path] for path in table.paths]] = np.arange(len(table.paths))
    if table.labels is not None:
        labels = [tuple(label) if isinstance(label, list) else label for label in table.labels.tolist()]
        samples = [
            dataclasses.replace(sample, label=labels[row]) for sample, row in zip(samples, rows.tolist(), strict=True)
        ]
    columns: dict[str, Column] = {
        name: column[rows] if isinstance(column, np.ndarray) else [column[row] for row in rows.tolist()]
        for name, column in table.items()
        if name not in OWN_COLUMNS
    }
    return dataclasses.replace(
        listing,
        samples=samples,
        classes=cache.manifest.classes,
        columns=columns,
        value_names=cache.manifest.value_names,
    )


def order_of(numbered: Listing, listing: Listing) -> str:
    """Return the position in `listing` of each sample of `numbered`, as text: slices such as `5:155 0:5`."""
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    return to_slices([places.get(sample.path) for sample in numbered.samples])


def to_slices(places: Sequence[int | None]) -> str:
    """Return positions in a source as text: slices such as `5:155 0:5`, and `-` for a sample that the source lacks."""
    slices: list[list[int]] = []
    for at in places:
        if slices and slices[-1] and slices[-1][1] == at:
            slices[-1][1] += 1
        else:
            slices.append([] if at is None else [at, at + 1])
    return " ".join(f"{each[0]}:{each[1]}" if each else _ABSENT for each in slices)


def places_in_source(manifest: Manifest, samples: int) -> dict[int, int]:
    """Return the position of each sample in the source, by the sample's number, as the manifest states it."""
    places, number = dict[int, int](), 0
    for part in str(manifest.source.get("order", "")).split():
        if part == _ABSENT:
            number += 1
            continue
        start, _, stop = part.partition(":")
        if not (start.isdecimal() and stop.isdecimal()) or number + int(stop) - int(start) > samples:
            return {}
        for at in range(int(start), int(stop)):
            places[number] = at
            number += 1
    return places if number == samples else {}


def sample_difference(before: SampleTable, samples: Sequence[Sample]) -> str:
    """Describe how the paths and sizes of samples differ from those in `before`, with which a build began."""
    sizes: Any = before[SIZE_COLUMN]
    old = dict(zip(before.paths, np.asarray(sizes).tolist(), strict=True))
    new = {sample.path: sample.bytes for sample in samples}
    differences = [
        f"{len(paths):,} {what}: {name_some(paths)}"
        for what, paths in (
            ("gone", [path for path in old if path not in new]),
            ("new", [path for path in new if path not in old]),
            ("of another size", [path for path, size in new.items() if old.get(path, size) != size]),
        )
        if paths
    ]
    return "; ".join(differences) or "the order, labels or columns of samples differ"


def _check_sizes_and_labels(listing: Listing, cache: Cache, places: Mapping[str, int]) -> None:
    table = cache.samples
    samples = [listing.samples[places[path]] for path in table.paths]
    check_sizes(resized(samples, table.get(SIZE_COLUMN, [0] * len(samples))))
    if table.labels is None or all(sample.label is None for sample in samples):
        return
    before = [_comparable(label, cache.manifest.classes) for label in table.labels.tolist()]
    now = [_comparable(sample.label, listing.classes) for sample in samples]
    changed = [sample.path for sample, old, new in zip(samples, before, now, strict=True) if old != new]
    if changed:
        raise SourceError(
            f"{len(changed):,} samples have another label than when {cache.directory} was made of them: "
            f"{name_some(changed)}. Bring the labels back, change those of the cache with `tpucache relabel`, or "
            "give another folder to build anew"
        )


def _comparable(label: Any, classes: Sequence[str]) -> str:
    """Return a text that is the same for equal labels, with the names of their classes."""
    if label is None:
        return ""
    if isinstance(label, int):
        return classes[label] if label < len(classes) else str(label)  # classes without names are named by number
    values = [float(np.float32(value)) for value in label]
    if len(classes) == len(values):
        return str(sorted(pair for pair in zip(classes, values, strict=True) if pair[1]))
    return str(values)


def as_asked(source: Source, manifest: Manifest) -> Source:
    """Return `source`, read with the options with which a cache was built: limit, patterns, padding, labels,
    classes.
    """
    asked, read = _saved(manifest.source.get("asked")), _saved(manifest.source.get("labels"))
    part = select_source(
        source,
        limit=asked.get("limit"),
        include=asked.get("include", ()),
        exclude=asked.get("exclude", ()),
    )
    part = pad_source(part, asked.get("pad"), asked.get("truncate", False))
    if earlier_tables(manifest):  # the cache was relabelled
        return part
    classes = manifest.classes if "classes" in asked else ()
    missing = asked.get("missing_label", ())
    return label_source(part, read.get("asked", "auto"), classes, missing, read)


def check_asked(cache: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SourceError if options such as --limit have other values `now` than `before`, when the build began."""
    changed = [
        f"--{name} {before.get(name, 'not given')}, now {now.get(name, 'not given')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise SourceError(f"{cache} was started with {'; '.join(changed)}: give the same options to continue")


def check_names(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError if names differ from those of a finished cache: of given classes, of values or of masks."""
    if manifest.classes and "classes" in _saved(manifest.source.get("asked")) and listing.classes != manifest.classes:
        raise SourceError(
            f"{cache} was made with --classes, and the source now has other classes, or the same in another order: "
            f"give --classes {cache}"
        )
    if difference := mask_name_difference(manifest.mask_names, listing.mask_names):
        raise SourceError(f"the masks of {cache} have other classes than the table now: {difference}, or build anew")
    if differ_in_values(manifest.value_names, listing.value_names):
        raise SourceError(
            f"the labels of {cache} are the columns {', '.join(manifest.value_names)}, not "
            f"{', '.join(listing.value_names)}: give {label_options(manifest.value_names)}, or another folder"
        )


def check_boxes(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError if only one of the two, the cache and the listing, was made with --boxes."""
    before, now = _saved(manifest.source.get("asked")).get("boxes"), listing.asked.get("boxes")
    if before is not None and now is None:
        raise SourceError(f"{cache} was made with --boxes {before}: give --boxes again, or another folder")
    if before is None and now is not None:
        raise SourceError(f"{cache} was made without --boxes: leave --boxes out, or give another folder")


def _saved(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, dict) else {}


def check_listing(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when labels, classes, folds or other columns differ from those of a finished cache."""
    table, folder = cache.samples, cache.directory
    numbers = table.numbers.tolist()
    position, item, unread = _first_item(source, listing, numbers)
    _check_labels(listing, cache, position, item)
    if unread is not None and table.labels is not None:
        raise SourceError(f"{folder} was made with labels, and not all of them can be read now: {unread}. {_ADVICE}")
    for name, column in listing.columns.items():
        if name not in table:
            raise SourceError(f"{folder} has no column {name!r}, and the source has it now. {_ADVICE}")
        old, new = table[name], [column[number] for number in numbers]
        changed = [at for at, pair in enumerate(zip(old, new, strict=True)) if not _is_equal(*pair)]
        if changed:
            raise SourceError(
                f"column {name!r} of {folder} has other values in the source now: {len(changed):,} samples differ, "
                f"such as {table.paths[changed[0]]!r}, {old[changed[0]]} before and {new[changed[0]]} now. {_ADVICE}"
            )
    gone = [name for name in table if name not in OWN_COLUMNS and name not in listing.columns]
    if gone and not (item is not None and item.columns):  # the samples do not have the column either
        raise SourceError(f"{folder} has a column {gone[0]!r}, and the source does not have it now. {_ADVICE}")


def compared_numbers(listing: Listing) -> frozenset[int]:
    """Return the numbers of up to eight evenly spread samples."""
    count = len(listing.samples)
    return frozenset(number * count // _TRIED for number in range(min(count, _TRIED)))


def content_digests(manifest: Manifest) -> dict[int, str]:
    """Return the content hashes in a manifest by sample number: those of skipped samples, and of a few kept samples."""
    saved = manifest.source.get("digests")
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {
        int(number): digest
        for number, digest in pairs
        if isinstance(digest, str) and number.isdecimal() and len(number) < _MOST_DIGITS
    }


def check_contents(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when the content of a few samples has changed since the cache was built."""
    skipped = {skip.number for skip in cache.manifest.skipped}
    began = time.monotonic()
    for number, digest in sorted(content_digests(cache.manifest).items()):
        if number in skipped or number >= len(listing.samples):
            continue
        with contextlib.suppress(SampleError):
            if source.load(listing.samples[number]).sha256() != digest:
                raise SourceError(
                    f"{listing.samples[number].path!r} has another content than when {cache.directory} was made of it. "
                    "Give the source that the cache was made of, or another folder to build anew"
                )
        if time.monotonic() - began > _COMPARE_SECONDS:
            break


def _first_item(
    source: Source, listing: Listing, numbers: Sequence[int]
) -> tuple[int, Item | None, UnreadLabelError | None]:
    """Return the first sample that can be read, as its position in `numbers` and its item, and a label's error."""
    found: tuple[int, Item] | None = None
    for position, number in enumerate(numbers[:_TRIED]):
        try:
            item = source.load(listing.samples[number])
        except UnreadLabelError as error:
            return (*(found or (0, None)), error)
        except SampleError:
            continue
        if found is not None:
            break
        found = position, item
    return (*(found or (0, None)), None)


def _check_labels(listing: Listing, cache: Cache, position: int, item: Item | None) -> None:
    table, folder, classes = cache.samples, cache.directory, cache.manifest.classes
    numbers = table.numbers.tolist()
    listed = next((label for number in numbers if (label := listing.samples[number].label) is not None), None)
    now = listed if listed is not None or item is None else item.label
    if table.labels is None and now is not None:
        raise SourceError(f"{folder} was made without labels, and the source has labels now. {_ADVICE}")
    if table.labels is None or listed is not None or item is None:
        return
    if now is None:
        raise SourceError(f"{folder} was made with labels, and the source has no labels now. {_ADVICE}")
    before = table.labels[position].tolist()
    if _comparable(now, classes) != _comparable(before, classes):
        raise SourceError(f"the label of {table.paths[position]!r} is {now} now, and {before} in {folder}. {_ADVICE}")
    # Labels in the samples are class numbers, so the classes must have the same numbers as before.
    known = listing.classes[: len(classes)] or tuple(map(str, range(len(classes))))
    if (isinstance(now, int) and known != classes) or (isinstance(now, tuple) and listing.classes != classes):
        raise SourceError(f"{folder} has the classes {classes}, and the source now has {known}. {_ADVICE}")


def _is_equal(old: Any, new: Any) -> bool:
    if str(old) == str(new) or (isinstance(old, str) and isinstance(new, str)):
        return str(old) == str(new)
    number = to_number(str(old))
    return number is not None and number == to_number(str(new))


def check_recipe(cache: Path, manifest: Manifest, recipe: Mapping[str, Any]) -> None:
    """Raise RecipeError when a recipe would make other records than the cache has, or fewer variants."""
    old = {**manifest.recipe}
    if not manifest.augmented:  # the cache has no augmented variants yet
        old.update(augmentation=recipe["augmentation"], augment=recipe["augment"])
    changed = recipe_differences(old, recipe)
    if recipe["variants"] < manifest.augmented:
        changed.append(f"variants {manifest.augmented}, now {recipe['variants']}")
    if changed:
        raise RecipeError(
            f"{cache} was made with another recipe: {'; '.join(changed)}. "
            "Give the same options, or another folder to build anew."
        )


def recipe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each difference between two recipes, such as another size."""
    old, new = before.get("augmentation", {}), now.get("augmentation", {})
    if not old.get("callable") or old.get("callable") != new.get("callable"):
        return differences(before, now)
    modules = code_changes(old, new)
    code = [f"the code of the augmentation {new['callable']} changed, in {', '.join(modules)}"] if modules else []
    return [*differences({**before, "augmentation": new}, now), *code]


def check_masks(source: Source, listing: Listing, recipe: Recipe) -> None:
    """Raise RecipeError if the pixels of masks are probably not class numbers, but black and white or levels of grey.

    The values of up to 32 masks are judged together: a mask with only 0 and 255 is right if other masks have classes
    such as 1 and 2, because 255 is a pixel without a class.
    """
    found, most, looked_at = set[int](), 0, 0
    positions = np.linspace(0, len(listing.samples) - 1, _MASKS).round().astype(int).tolist()
    samples = [listing.samples[position] for position in sorted({*positions})]
    with LoadAhead(source.load, source, samples, Lateness()) as items:
        for sample in samples:
            try:
                mask = items.load(sample).fields.get(MASK)
                if mask is None:
                    continue
                if not looked_at and isinstance(mask, bytes) and mask.startswith(_JPEG):
                    _log.warning(_JPEG_ADVICE)
                    return
                if has_grey_palette(mask, recipe.max_pixels):
                    raise RecipeError(_GREY_PALETTE.format(path=sample.path))
                values = np.unique(decode_mask(mask, "", recipe)).tolist()
            except SampleError:
                continue
            found |= {*values}
            most, looked_at = max(most, len(values)), looked_at + 1
    if (fault := _fault(sorted(found), most)) is not None:
        masks = "the mask that was looked at holds" if looked_at == 1 else f"{looked_at} masks that were looked at hold"
        raise RecipeError(
            f"{masks} {fault}, not class numbers: give --mask-values scale if masks are black and white (white "
            "becomes class 1), or --mask-values keep if the values are class numbers, and 255 is a pixel without "
            "a class, which training ignores"
        )


def _fault(values: list[int], most: int) -> str | None:
    if _WHITE in values and {*values} <= {0, _WHITE}:
        return "0 and 255 alone" if len(values) > 1 else "255 alone"
    gaps = np.diff(values)
    if len(values) > 2 and gaps.min() >= _GREY_STEP and values[-1] >= _BRIGHT:
        return f"levels of grey, {', '.join(map(str, values))}"
    return f"up to {most} different numbers each" if most > _MOST_CLASSES else None
