"""Compares a source and a recipe with those of a cache, and numbers the samples as there: one rule for changed ones."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

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
from tpucache.text import named
from tpucache.warmup.code_digest import code_changes
from tpucache.warmup.records.masks import decode_mask, has_grey_palette
from tpucache.warmup.sources import label_source, pad_source, select_source
from tpucache.warmup.sources.columns import to_number
from tpucache.warmup.sources.labelled import UnreadLabelError
from tpucache.warmup.sources.source import Item, Listing, LoadAhead, Sample, Source, name_some, taken

#: The column of the samples table with each sample's size in its source.
SIZE_COLUMN: Final = "source_bytes"
#: The columns of the samples table that every cache may have; all others came from its source.
OWN_COLUMNS: Final = ("number", "path", LABEL, SIZE_COLUMN, *IMAGE_COLUMNS)
_ABSENT: Final = "-"
#: The value of a sample that has no label, or no such column.
_NOTHING: Final = "(none)"

_log: Final = logging.getLogger("tpucache")

_TRIED: Final = 8
_MOST_DIGITS: Final = 20
#: After this many seconds no further sample is compared: a run on a finished cache should end at once.
_COMPARE_SECONDS: Final = 0.5

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


@dataclass(frozen=True)
class Changes:
    """How samples differ from those of a cache: texts by path. `what` is that in which the `changed` ones differ."""

    what: str
    gone: Mapping[str, str]
    new: Mapping[str, str]
    changed: Mapping[str, str]

    @property
    def answer(self) -> Literal["same", "more", "fewer", "changed"]:
        """Whether this still is the source of the cache; "fewer" may have new samples, too."""
        if self.changed:
            return "changed"
        if self.gone:
            return "fewer"
        return "more" if self.new else "same"

    def __str__(self) -> str:
        kinds = {"gone": self.gone, "new": self.new, f"samples have another {self.what}": self.changed}
        return "; ".join(f"{len(each):,} {kind}: {named(each.values())}" for kind, each in kinds.items() if each)

    def refuse(self, cache: Path) -> None:
        """Raise SourceError unless samples are the same, or more."""
        if self.gone or self.changed:
            raise SourceError(
                f"the source is not that of {cache} any more: {self}. Give the same options and the source as it was, "
                "or another folder to build anew. `tpucache relabel` changes labels, folds and other columns of a "
                f"cache, and `tpucache delete {cache} --paths FILE` deletes samples"
            )


def compare(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare values of samples by path, those of a cache and those now; None is not known."""
    return Changes(
        what,
        gone={path: repr(path) for path in before if path not in now},
        new={path: repr(path) for path in now if path not in before},
        changed={
            path: f"{path!r}: {old!s:.80} before and {now[path]!s:.80} now"
            for path, old in before.items()
            if path in now and not _is_same(old, now[path])
        },
    )


def _is_same(old: Any, new: Any) -> bool:
    if old is None or new is None or old == new or str(old) == str(new):
        return True
    number, are_texts = to_number(str(old)), isinstance(old, str) and isinstance(new, str)
    return not are_texts and number is not None and number == to_number(str(new))


def _label_text(label: Any, classes: Sequence[str]) -> str:
    if label is None:
        return _NOTHING
    if isinstance(label, int):
        return classes[label] if label < len(classes) else str(label)  # classes without names are named by number
    if isinstance(label, str) or any(isinstance(part, str) for part in label):
        return str(label)
    values = np.asarray(label, np.float32).tolist()
    if len(classes) == len(values):
        return str(sorted(pair for pair in zip(classes, values, strict=True) if pair[1]))
    return str(values)


def sizes_of(samples: Sequence[Sample]) -> npt.NDArray[np.uint64]:
    """Return the sizes of samples in their source, in bytes: uint64 (n,)."""
    return np.array([sample.bytes for sample in samples], np.uint64)


def compare_sizes(table: SampleTable, samples: Sequence[Sample], others: Iterable[str] = ()) -> Changes:
    """Compare samples and sizes with those in a table, and with `others` of unknown size."""
    sizes: Any = table.get(SIZE_COLUMN, np.zeros(len(table.paths)))
    before = dict.fromkeys(others)
    before |= {path: size or None for path, size in zip(table.paths, np.asarray(sizes).tolist(), strict=True)}
    return compare("size", before, {sample.path: sample.bytes or None for sample in samples})


def check_sizes(changed: Sequence[Sample]) -> None:
    """Raise SourceError for samples whose size has changed since their records were made."""
    if changed:
        raise SourceError(
            f"{len(changed):,} samples have another size than when their records were made: "
            f"{name_some([sample.path for sample in changed])}. Bring them back as they were, or give another folder "
            "to build anew"
        )


def number_samples(listing: Listing, cache: Cache, *, retry: bool = False) -> Listing:
    """Return a listing in which each sample of the cache, kept or skipped, has its old number; new samples follow.

    Raises SourceError if samples are gone or have another size.
    """
    manifest, table = cache.manifest, cache.samples
    check_boxes(manifest, listing, cache.directory)
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    names = dict(zip(table.numbers.tolist(), table.paths, strict=True))
    names |= {each.number: each.path for each in manifest.skipped}
    names |= {each.number: each.path for each in manifest.deleted}
    others = {each.path for each in manifest.skipped} | ({each.path for each in manifest.deleted} & places.keys())
    changes = compare_sizes(table, listing.samples, others)
    changes.refuse(cache.directory)
    order = [*(names.get(number, "") for number in range(len(names))), *changes.new]
    numbered = taken(listing, [places.get(path, 0) for path in order])
    samples = [  # a deleted sample that the source lacks becomes an empty sample, which is never read
        sample if path in places else Sample(number, path)
        for number, (path, sample) in enumerate(zip(order, numbered.samples, strict=True))
    ]
    numbered = dataclasses.replace(numbered, samples=samples)
    is_same = changes.answer == "same" and not (retry and manifest.skipped)
    return _relabelled(numbered, cache) if earlier_tables(manifest) and is_same else numbered


def _relabelled(numbered: Listing, cache: Cache) -> Listing:
    _log.warning("%s was relabelled: its own labels and columns are used, not those of the source", cache.directory)
    manifest, table = cache.manifest, cache.samples
    rows = np.zeros(len(numbered.samples), np.int64)  # row 0 stands for samples that are not built
    rows[table.numbers.astype(np.int64)] = np.arange(len(table.paths))
    labels = [tuple(label) if isinstance(label, list) else label for label in _labels(table)]
    samples = [Sample(0, *each) for each in zip(table.paths, labels, strict=True)]
    columns = {name: column for name, column in table.items() if name not in OWN_COLUMNS}
    own = taken(Listing(samples, columns=columns), rows.tolist())
    samples = [
        dataclasses.replace(sample, label=each.label)
        for sample, each in zip(numbered.samples, own.samples, strict=True)
    ]
    return dataclasses.replace(
        numbered, samples=samples, columns=own.columns, classes=manifest.classes, value_names=manifest.value_names
    )


def _labels(table: SampleTable) -> list[Any]:
    return [None] * len(table.paths) if table.labels is None else table.labels.tolist()


def order_of(numbered: Listing, listing: Listing) -> str:
    """Return where each sample of `numbered` is in `listing`, as by `to_slices`."""
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
    """Return the position of each sample in the source by its number, from the manifest."""
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


def as_asked(source: Source, manifest: Manifest) -> Source:
    """Return `source`, read with the options of a cache: limit, patterns, padding, labels, classes."""
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
    """Raise SourceError if options such as --limit differ from those when the build began."""
    changed = [
        f"--{name} {before.get(name, 'not given')}, now {now.get(name, 'not given')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise SourceError(f"{cache} was started with {'; '.join(changed)}: give the same options to continue")


def check_names(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError if names of given classes, values or masks differ from those of a cache."""
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
    """Raise SourceError if only the cache or only the listing has --boxes."""
    before, now = _saved(manifest.source.get("asked")).get("boxes"), listing.asked.get("boxes")
    if (before is None) != (now is None):
        made = "without --boxes: leave --boxes out" if before is None else f"with --boxes {before}: give --boxes again"
        raise SourceError(f"{cache} was made {made}, or give another folder")


def _saved(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, dict) else {}


def check_listing(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when labels, classes, folds or other columns differ from those of a finished cache.

    Of labels stored in the samples, the first ones are compared.
    """
    table, folder = cache.samples, cache.directory
    samples = [listing.samples[number] for number in table.numbers.tolist()]
    items = _first_items(source, samples)
    _check_labels(listing, samples, items, cache)
    absent = {sample.path: _NOTHING for sample in samples}
    have_own = any(item.columns for item in items.values())  # columns may be stored in the samples, too
    for name in sorted({*table, *listing.columns} - {*OWN_COLUMNS}):
        column = listing.columns.get(name)
        if column is not None or not have_own:
            old = dict(zip(absent, table[name], strict=True)) if name in table else absent
            now = absent if column is None else {sample.path: column[sample.number] for sample in samples}
            compare(f"value in column {name!r}", old, now).refuse(folder)


def _check_labels(listing: Listing, samples: Sequence[Sample], items: Mapping[str, Item], cache: Cache) -> None:
    folder, classes = cache.directory, cache.manifest.classes
    before = {
        sample.path: _label_text(label, classes) for sample, label in zip(samples, _labels(cache.samples), strict=True)
    }
    now: dict[str, str | None] = {sample.path: _label_text(sample.label, listing.classes) for sample in samples}
    if all(sample.label is None for sample in samples):  # labels are stored in the samples
        known = listing.classes[: len(classes)] or tuple(map(str, range(len(classes))))
        if known != classes and any(isinstance(item.label, (int, tuple)) for item in items.values()):
            raise SourceError(
                f"{folder} has the classes {classes}, and the source now has {known}: the labels in its samples would "
                "mean other classes. Give the same source, or another folder to build anew"
            )
        now = {**dict.fromkeys(before), **{path: _label_text(item.label, classes) for path, item in items.items()}}
    compare("label", before, now).refuse(folder)


def _first_items(source: Source, samples: Sequence[Sample]) -> dict[str, Item]:
    """Return the first two readable samples of eight, by path. A text says why a label cannot be read."""
    items = dict[str, Item]()
    for sample in samples[:_TRIED]:
        try:
            items[sample.path] = source.load(sample)
        except UnreadLabelError as error:
            items[sample.path] = Item({}, f"({error.reason})")
        except SampleError:
            continue
        if len(items) == 2:
            break
    return items


def compared_numbers(listing: Listing) -> frozenset[int]:
    """Return the numbers of up to eight evenly spread samples."""
    count = len(listing.samples)
    return frozenset(number * count // _TRIED for number in range(min(count, _TRIED)))


def content_digests(manifest: Manifest) -> dict[int, str]:
    """Return the content hashes in a manifest by sample number: of skipped samples, and of a few others."""
    saved = manifest.source.get("digests")
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {
        int(number): digest
        for number, digest in pairs
        if isinstance(digest, str) and number.isdecimal() and len(number) < _MOST_DIGITS
    }


def check_contents(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when the content of a few samples has changed."""
    skipped = {skip.number for skip in cache.manifest.skipped}
    began = time.monotonic()
    for number, digest in sorted(content_digests(cache.manifest).items()):
        if number in skipped or number >= len(listing.samples):
            continue
        sample = listing.samples[number]
        with contextlib.suppress(SampleError):
            now = {sample.path: source.load(sample).sha256()}
            compare("content", {sample.path: digest}, now).refuse(cache.directory)
        if time.monotonic() - began > _COMPARE_SECONDS:
            break


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
    """Raise RecipeError if the pixels of masks are probably black and white or levels of grey, not class numbers.

    Up to 32 masks are judged together: one with only 0 and 255 is right if others have classes such as 1 and 2.
    """
    found: list[list[int]] = []  # the values of each mask
    positions = np.linspace(0, len(listing.samples) - 1, _MASKS).round().astype(int).tolist()
    samples = [listing.samples[position] for position in sorted({*positions})]
    with LoadAhead(source.load, source, samples, Lateness()) as items:
        for sample in samples:
            try:
                mask = items.load(sample).fields.get(MASK)
                if mask is None:
                    continue
                if not found and isinstance(mask, bytes) and mask.startswith(_JPEG):
                    _log.warning(_JPEG_ADVICE)
                    return
                if has_grey_palette(mask, recipe.max_pixels):
                    raise RecipeError(_GREY_PALETTE.format(path=sample.path))
                found.append(np.unique(decode_mask(mask, "", recipe)).tolist())
            except SampleError:
                continue
    if (fault := _fault(found)) is not None:
        count = len(found)
        masks = "the mask that was looked at holds" if count == 1 else f"{count} masks that were looked at hold"
        raise RecipeError(
            f"{masks} {fault}, not class numbers: give --mask-values scale if masks are black and white (white "
            "becomes class 1), or --mask-values keep if the values are class numbers, and 255 is a pixel without "
            "a class, which training ignores"
        )


def _fault(masks: Sequence[Sequence[int]]) -> str | None:
    values, most = sorted(set[int]().union(*masks)), max(map(len, masks), default=0)
    if _WHITE in values and {*values} <= {0, _WHITE}:
        return "0 and 255 alone" if len(values) > 1 else "255 alone"
    gaps = np.diff(values)
    if len(values) > 2 and gaps.min() >= _GREY_STEP and values[-1] >= _BRIGHT:
        return f"levels of grey, {', '.join(map(str, values))}"
    return f"up to {most} different numbers each" if most > _MOST_CLASSES else None
