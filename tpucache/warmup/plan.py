"""BuildPlan: what a run will build, which is a new cache or additions to a finished one."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import DamageError, RecipeError, SampleError, SourceError, calling
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.codecs import ARRAY_CODECS, CODECS, Codec
from tpucache.store.fields import BOXES, IMAGE, MASK, Field
from tpucache.store.files import read_text
from tpucache.store.manifest import Manifest
from tpucache.text import parse_json
from tpucache.warmup.blocks import (
    Block,
    listing_sha256,
    missing_blocks,
    plan_blocks,
)
from tpucache.warmup.build_options import BuildOptions, LabelKind, SourceOptions
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.library_versions import version_differences, versions
from tpucache.warmup.listing import (
    check_contents,
    check_listing,
    check_masks,
    check_names,
    check_recipe,
    number_samples,
    order_of,
)
from tpucache.warmup.records.arrays import image_fields, record_fields
from tpucache.warmup.records.augment import PRESETS, augment_fields, preset
from tpucache.warmup.records.encode import LabelPlace, SampleEncoder
from tpucache.warmup.sources import label_source, pad_source
from tpucache.warmup.sources.labelled import class_names, labels_before
from tpucache.warmup.sources.source import Column, Item, Listing, Source, left_out_text, source_name

_log: Final = logging.getLogger("tpucache")

_LABEL_NAMES: Final = frozenset(
    ("label", "labels", "target", "targets", "class", "classes", "class_id", "class_name", "category", "diagnosis", "y")
)
_LABEL_SUFFIXES: Final = ("_label", "_labels", "_target", "_class")

#: The libraries whose versions decide what a preset means.
_PRESET_LIBRARIES: Final = ("tpucache", "albumentations", "nrtk-albumentations")
_TRIALS: Final = 4


@dataclass(frozen=True)
class BuildPlan:
    """What a run will build.

    `augmentation` is the full definition of the augmentation, as JSON values. The samples of `listing` have the cache's
    numbers, and `order` has their positions in the source's own listing. `labels` is the user's option `--labels`, and
    `label_place` says where the labels are.
    `unused_labels` are names of columns that look like labels but are not used.

    `existing` is the finished cache to add to, or None. With `is_retry`, `blocks` have its skipped samples, too.
    `latency` is the time in seconds that the storage took to deliver the first sample of a new cache; 0 if that was not
    measured. `first` is the number of this sample and its content hash; None for an addition.
    """

    recipe: Recipe
    augmentation: Mapping[str, Any]
    fields: tuple[Field, ...]
    listing: Listing
    order: str
    blocks: Sequence[Block]
    labels: LabelKind
    label_place: LabelPlace
    unused_labels: Sequence[str]
    existing: Cache | None = None
    is_retry: bool = False
    latency: float = 0.0
    first: tuple[int, str] | None = None

    @property
    def full_recipe(self) -> dict[str, Any]:
        """The recipe with the full definition of the augmentation, as JSON values for a manifest."""
        return full_recipe(self.recipe, self.augmentation)

    @functools.cached_property
    def source(self) -> dict[str, Any]:
        """The number, the hash and the order of the source's samples, as JSON values for a manifest."""
        listing = self.listing
        return {"samples": len(listing.samples), "sha256": listing_sha256(listing), "order": self.order}


def meant_source(source: Source, cache: str | Path, options: SourceOptions) -> Source:
    """Return a source that pads sequences and reads labels as the user's options say."""
    padded = pad_source(source, options.pad, options.truncate)
    names, before = class_names(options.classes), labels_before(Path(cache))
    return label_source(padded, options.labels, names, options.missing_label, before)


def make_encoder(source: Source, recipe: Recipe, plan: BuildPlan) -> SampleEncoder:
    """Return the encoder that makes the records of a plan."""
    return SampleEncoder(source, recipe, plan.augmentation, plan.fields, plan.label_place)


def plan_build(
    source: Source, listing: Listing, recipe: Recipe, options: BuildOptions, existing: Cache | None = None
) -> BuildPlan:
    """Return the plan of a new cache, or of what the cache `existing` lacks: samples, variants, or skipped samples."""
    if listing.doubt and "classes" not in listing.asked:
        raise SourceError(listing.doubt)
    if listing.left_out:
        _log.warning(
            "files that are no images by their names are left out: %s. Labels are read from a .csv, boxes from COCO's "
            "JSON by --boxes", left_out_text(listing.left_out),
        )  # fmt: skip
    if existing is None:
        return _plan_new(source, listing, recipe, options)
    return _plan_addition(source, listing, recipe, options, existing)


def _plan_new(source: Source, listing: Listing, recipe: Recipe, options: BuildOptions) -> BuildPlan:
    began, busy = time.monotonic(), time.thread_time()
    number, first, fields = first_item(source, listing, recipe)
    latency = max(0.0, time.monotonic() - began - (time.thread_time() - busy))
    if recipe.mask_values is None and recipe.mask_colours is None and {IMAGE, MASK} <= {*first.fields}:
        check_masks(source, listing, recipe)
    _check_variants(source, recipe, fields)
    _check_codec(source, recipe, fields)
    return BuildPlan(
        recipe=recipe,
        augmentation=full_augmentation(recipe, fields),
        fields=fields,
        listing=listing,
        order=order_of(listing, listing),
        blocks=plan_blocks(listing.samples, fields, recipe),
        labels=options.labels,
        label_place=_label_place(listing, first.label is not None),
        unused_labels=find_unused_labels(listing, first),
        latency=latency,
        first=(number, first.sha256()),
    )


def _plan_addition(source: Source, listing: Listing, recipe: Recipe, options: BuildOptions, cache: Cache) -> BuildPlan:
    manifest = cache.manifest
    # The recipe is checked first with the old augmentation, because the new one may not fit this cache's records.
    check_recipe(cache.directory, manifest, full_recipe(recipe, manifest.recipe.get("augmentation", {})))
    _check_variants(source, recipe, manifest.fields)
    augmentation = full_augmentation(recipe, manifest.fields, manifest)
    check_recipe(cache.directory, manifest, full_recipe(recipe, augmentation))
    numbered = number_samples(listing, cache, retry=options.retry)
    check_names(manifest, numbered, cache.directory)
    check_listing(source, numbered, cache)
    blocks = missing_blocks(cache, numbered, recipe, retry=options.retry)
    if not blocks:
        check_contents(source, numbered, cache)
    if blocks and (other := version_differences(manifest.created_by)):
        _log.warning(
            "%s was made with other versions of libraries, so added records may differ: %s",
            cache.directory,
            "; ".join(other),
        )
    return BuildPlan(
        recipe=recipe,
        augmentation=augmentation,
        fields=manifest.fields,
        listing=numbered,
        order=order_of(numbered, listing),
        blocks=blocks,
        labels=options.labels,
        label_place=_label_place(listing, cache.samples.labels is not None),
        unused_labels=saved_unused_labels(manifest.source),
        existing=cache,
        is_retry=options.retry and bool(manifest.skipped),
    )


def full_recipe(recipe: Recipe, augmentation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with the full definition of its augmentation, as JSON values for a manifest."""
    return {**recipe.to_dict(), "augmentation": dict(augmentation)}


def first_item(source: Source, listing: Listing, recipe: Recipe) -> tuple[int, Item, tuple[Field, ...]]:
    """Return the number of the first usable sample, its content, and its fields.

    All other samples must have the same fields.
    """
    errors: list[SampleError] = []
    for sample in listing.samples:
        try:
            item = source.load(sample)
            return sample.number, item, record_fields(item, recipe, sample.path)
        except SampleError as error:
            errors.append(error)
    raise SourceError(f"none of the {len(errors)} samples could be used; {errors[0]}")


def _check_variants(source: Source, recipe: Recipe, fields: Sequence[Field]) -> None:
    if recipe.variants and fields[0].name != IMAGE:
        raise RecipeError(f"variants need images, and {source_name(source)} has none: leave --variants out")


def _check_codec(source: Source, recipe: Recipe, fields: Sequence[Field]) -> None:
    if fields[0].name != IMAGE and not CODECS[recipe.codec].holds_any_array:
        raise RecipeError(
            f"--codec {recipe.codec} needs images, and {source_name(source)} has none: arrays are stored as "
            f"{' or '.join(ARRAY_CODECS)}. Give one of these codecs"
        )
    for field in fields:
        if field.codec not in CODECS.own:
            _try_codec(field, recipe.quality if field.codec == recipe.codec else None)


def _try_codec(field: Field, quality: int | None) -> None:
    array = np.zeros(field.shape, field.dtype)
    data = CODECS.use(field.codec, lambda codec: codec.encode(field, array, quality))

    def decode(codec: Codec) -> None:
        try:
            codec.decode_into(field, memoryview(data), np.empty_like(array))
        except DamageError as error:  # the bytes are not damaged, so the codec is wrong
            raise ValueError(str(error)) from error

    CODECS.use(field.codec, decode)


def _label_place(listing: Listing, has_label: bool) -> LabelPlace:
    if any(sample.label is not None for sample in listing.samples):
        return "listed"
    return "inside" if has_label else "none"


def find_unused_labels(listing: Listing, first: Item) -> list[str]:
    """Return the names of columns that look like labels, and warn about them; [] if the samples have labels."""
    if first.label is not None or any(sample.label is not None for sample in listing.samples):
        return []
    unused = _label_candidates(listing.columns, first)
    if unused:
        _log.warning(
            "the samples have no labels, and %s may be labels: name the column or feature with --label-col; in a "
            "dataset of dictionaries, call the key 'label'",
            ", ".join(repr(listing.spellings.get(name, name)) for name in unused),
        )
    return unused


def saved_unused_labels(source: Mapping[str, Any]) -> list[str]:
    """Return the names that `find_unused_labels` returned for a cache, from the value `source` of its manifest."""
    read = source.get("labels")
    unused = read.get("unused") if isinstance(read, dict) else None
    return [name for name in unused if isinstance(name, str)] if isinstance(unused, list) else []


def _label_candidates(columns: Mapping[str, Column], item: Item) -> list[str]:
    """Return the columns and keys that may be labels: those with usual names of labels, if there are any.

    Otherwise, these are the columns with repeated values, and the keys of the first sample whose values are whole
    numbers.
    """
    names = [
        name
        for name in (*columns, *{**item.columns, **item.fields})
        if name.lower() in _LABEL_NAMES or name.lower().endswith(_LABEL_SUFFIXES)
    ]
    likely = [name for name, column in columns.items() if name != "fold" and _repeats(column)]
    return names or [*likely, *(name for name, value in item.columns.items() if isinstance(value, int))]


def _repeats(column: Column) -> bool:
    """Return whether a column may be labels: floats, or several values, each of them twice or more on average."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return True
    values = list(map(str, column))
    return 1 < len(set(values)) <= len(values) / 2


def resolve(name: str, height: int, width: int, fields: Sequence[Field] = ()) -> dict[str, Any]:
    """Return the full definition of an `--augment` value, as JSON values for the manifest and the fingerprint."""
    if name in PRESETS:
        # albumentations can change the colours of 8-bit grey or RGB images.
        images = [field for field in fields if field.name == IMAGE]
        has_colours = all(field.dtype == "|u1" and field.shape[2] in (1, 3) for field in images)
        with calling("albumentations", RecipeError, f"Install a version that has the transforms of the preset {name}"):
            definition: dict[str, Any] = _plain(preset(name, height, width, has_colours=has_colours))
    elif name.endswith((".json", ".yaml", ".yml")):
        definition = _read_file(Path(name))
    elif ":" in name:
        definition = {"callable": name, **code_digests(name)}
    else:
        raise RecipeError(
            f"there is no augmentation {name!r}: use one of {', '.join(PRESETS)}, a .yaml or .json file of "
            "albumentations.to_dict, or module:name of a callable"
        )
    fields = fields or (Field(IMAGE, "raw", "|u1", (height, width, 3)),)
    blank = {field.name: np.full(field.shape, -(field.name == BOXES), field.dtype) for field in fields}
    augment_fields(blank, definition, 0, 0, 1)
    if name not in PRESETS:
        _check_reproducible(name, blank, definition)
    return definition


def full_augmentation(recipe: Recipe, fields: Sequence[Field], before: Manifest | None = None) -> dict[str, Any]:
    """Return the full definition of the augmentation as JSON values: that of the cache, if it still means the same."""
    if not recipe.variants:
        return dict(before.recipe["augmentation"]) if before else {}
    if before is not None and before.augmented and recipe.augment in PRESETS:
        used = versions()
        asked = (recipe.augment, list(recipe.to_dict()["size"]), *(used.get(name) for name in _PRESET_LIBRARIES))
        made = (before.recipe.get("augment"), before.recipe.get("size"))
        if asked == (*made, *(before.created_by.get(name) for name in _PRESET_LIBRARIES)):
            found = dict(before.recipe["augmentation"])
            if "callable" in found:  # never run code that only a manifest names
                raise RecipeError(
                    f"the manifest says that the preset {recipe.augment} is the code {found['callable']!r}, which no "
                    "version of tpucache writes: build the cache anew"
                )
            return found
    old = before.recipe["augmentation"] if before is not None else {}
    if old.get("callable") == recipe.augment:
        now = {"callable": recipe.augment, **code_digests(recipe.augment)}
        return now if code_changes(old, now) else dict(old)
    return resolve(recipe.augment, recipe.height, recipe.width, fields)


def _check_reproducible(name: str, record: Mapping[str, Array], definition: Mapping[str, Any]) -> None:
    if not image_fields(record):
        return
    noise = np.random.default_rng(0).integers(0, 256, record[IMAGE].shape, np.uint8).astype(record[IMAGE].dtype)
    passes = [
        [augment_fields({**record, IMAGE: noise}, definition, 0, number, 1) for number in range(_TRIALS)]
        for _ in range(2)
    ]
    for first, second in zip(*passes, strict=True):
        if not all(np.array_equal(first[field], second[field]) for field in first):
            raise RecipeError(
                f"the augmentation {name} returns different arrays for the same image each time it is called: draw all "
                "random numbers from the generator that it receives, and keep nothing from one call to the next"
            )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the augmentation file {path} cannot be read: {error}") from error
    try:
        content = _plain(parse_json(text) if path.suffix == ".json" else _parse_yaml(text))
    except Exception as error:  # yaml's errors share no base with json's
        raise RecipeError(f"{path} is not a valid .{path.suffix[1:]} file: {error}") from error
    if not isinstance(content, dict) or "transform" not in content or "callable" in content:
        raise RecipeError(f"{path} holds no augmentation: write albumentations.to_dict(pipeline) into it")
    return content


def _parse_yaml(text: str) -> Any:
    """Raises ValueError for a repeated key: yaml would silently use the last one."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, times in keys.items() if times > 1]:
                raise ValueError(f"the key {twice[0]!r:.60} is there twice in one mapping: remove one of the two")
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # noqa: S506  # a SafeLoader


def _plain(content: Any) -> Any:
    """Return content after a round trip through JSON, so that it equals the content read back from a manifest."""
    return json.loads(json.dumps(content))
