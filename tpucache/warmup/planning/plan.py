"""Plan: what a run is to build, either a new cache or what is added to a finished one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tpucache.errors import RecipeError, SampleError, SourceError
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE, MASK, Field
from tpucache.warmup.options import BuildOptions, LabelKind
from tpucache.warmup.planning.asked import check_given_classes
from tpucache.warmup.planning.augmentation import full_augmentation
from tpucache.warmup.planning.blocks import Block, listing_sha256, missing_blocks, plan_blocks
from tpucache.warmup.planning.labels import (
    check_labels,
    find_unused_labels,
    first_label,
    label_rule,
    saved_unused_labels,
)
from tpucache.warmup.planning.listing_check import check_contents, check_listing
from tpucache.warmup.planning.numbering import number_samples, order_of
from tpucache.warmup.planning.recipe_check import check_recipe
from tpucache.warmup.planning.retrying import check_can_retry, retried_blocks, unchanged_samples
from tpucache.warmup.records.arrays import ARRAY_CODECS, record_fields
from tpucache.warmup.records.decoding.masks import decode_mask
from tpucache.warmup.records.labels import LabelRule
from tpucache.warmup.sources.base import Item, Listing, Source, source_name
from tpucache.warmup.sources.folder import left_out_text
from tpucache.warmup.versions import version_differences

_log: Final = logging.getLogger("tpucache")
_WHITE: Final = 255
_JPEG: Final = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Plan:
    """What a run is to build.

    `augmentation` is in full, as JSON values. `listing` is numbered as in the cache, and `order` states where its
    samples are in the source's own listing. `labels` is what the user wants labels read as, `label_rule` what labels in
    the samples must be, `unused_labels` names what could have been labels. `existing` is the cache that is added to.
    With `is_retry`, `blocks` are of its skipped samples, and have the numbers that its blocks will have; `unchanged` is
    how many are not tried again, because they are as they were.
    """

    recipe: Recipe
    augmentation: Mapping[str, Any]
    fields: tuple[Field, ...]
    listing: Listing
    order: str
    blocks: Sequence[Block]
    labels: LabelKind
    label_rule: LabelRule | None
    unused_labels: Sequence[str]
    existing: Cache | None = None
    is_retry: bool = False
    unchanged: int = 0

    @property
    def full_recipe(self) -> dict[str, Any]:
        """The recipe with its augmentation in full, as a manifest has it: JSON values."""
        return full_recipe(self.recipe, self.augmentation)

    @functools.cached_property
    def source(self) -> dict[str, Any]:
        """The source's samples as a manifest describes them: JSON values."""
        listing = self.listing
        return {"samples": len(listing.samples), "sha256": listing_sha256(listing), "order": self.order}


def plan_build(source: Source, listing: Listing, recipe: Recipe, labels: LabelKind = BuildOptions.labels) -> Plan:
    """Plan a new cache. Raises RecipeError, SourceError."""
    check_labels(listing)
    first, fields = _first_item(source, listing, recipe)
    _warn_of_white_masks(first, recipe)
    unused = find_unused_labels(listing, first)
    _check_variants(source, recipe, fields)
    _check_codec(source, recipe, fields)
    _warn_of_left_out(listing)
    return Plan(
        recipe=recipe,
        augmentation=full_augmentation(recipe, fields),
        fields=fields,
        listing=listing,
        order=order_of(listing, listing),
        blocks=plan_blocks(listing.samples, fields, recipe),
        labels=labels,
        label_rule=label_rule(listing, first.label),
        unused_labels=unused,
    )


def plan_addition(
    source: Source,
    listing: Listing,
    recipe: Recipe,
    cache: Cache,
    labels: LabelKind = BuildOptions.labels,
    retry: bool = BuildOptions.retry,
    retry_all: bool = BuildOptions.retry_all,
) -> Plan:
    """Plan what a finished cache lacks of a recipe and a source, or to try again what it skipped.

    Raises RecipeError, SourceError, and UsageError for both at once.
    """
    check_labels(listing)
    manifest = cache.manifest
    is_retry = (retry or retry_all) and bool(manifest.skipped)
    unchanged: frozenset[int] = frozenset()
    # Before an augmentation of another size is tried on this cache's records.
    check_recipe(cache.directory, manifest, full_recipe(recipe, manifest.recipe.get("augmentation", {})))
    rule = label_rule(listing, first_label(cache))
    _check_variants(source, recipe, manifest.fields)
    _warn_of_left_out(listing)
    augmentation = full_augmentation(recipe, manifest.fields, manifest)
    check_recipe(cache.directory, manifest, full_recipe(recipe, augmentation))
    numbered = number_samples(listing, cache)
    check_given_classes(manifest, numbered, cache.directory)
    check_listing(source, numbered, cache)
    blocks = missing_blocks(cache, numbered, recipe)
    if is_retry:
        check_can_retry(cache, is_growing=bool(blocks))
        unchanged = frozenset() if retry_all else unchanged_samples(source, numbered, cache, recipe)
        blocks = retried_blocks(cache, numbered, recipe, unchanged)
        _warn_of_unchanged(cache, len(unchanged))
    if not blocks:
        check_contents(source, numbered, cache)
    if blocks and (other := version_differences(manifest.created_by)):
        _log.warning(
            "%s was made with other versions, and what is added may differ: %s", cache.directory, "; ".join(other)
        )
    return Plan(
        recipe=recipe,
        augmentation=augmentation,
        fields=manifest.fields,
        listing=numbered,
        order=order_of(numbered, listing),
        blocks=blocks,
        labels=labels,
        label_rule=rule,
        unused_labels=saved_unused_labels(manifest.source),
        existing=cache,
        is_retry=is_retry,
        unchanged=len(unchanged),
    )


def full_recipe(recipe: Recipe, augmentation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with its augmentation in full, as a manifest has it: JSON values."""
    return {**recipe.to_dict(), "augmentation": dict(augmentation)}


def _first_item(source: Source, listing: Listing, recipe: Recipe) -> tuple[Item, tuple[Field, ...]]:
    """Return the first sample that can be used, and its fields: it decides what all records and labels are like."""
    errors: list[SampleError] = []
    for sample in listing.samples:
        try:
            item = source.load(sample)
            return item, record_fields(item, recipe, sample.path)
        except SampleError as error:
            errors.append(error)
    raise SourceError(f"none of the {len(errors)} samples could be used; {errors[0]}")


def _check_variants(source: Source, recipe: Recipe, fields: Sequence[Field]) -> None:
    if recipe.variants and fields[0].name != IMAGE:
        raise RecipeError(f"variants are of images, and {source_name(source)} has none: leave --variants out")


def _check_codec(source: Source, recipe: Recipe, fields: Sequence[Field]) -> None:
    if fields[0].name != IMAGE and recipe.codec not in ARRAY_CODECS:
        raise RecipeError(
            f"--codec {recipe.codec} is of images, and {source_name(source)} has none: arrays are stored as "
            f"{' or '.join(ARRAY_CODECS)}. Give one of these"
        )


def _warn_of_white_masks(first: Item, recipe: Recipe) -> None:
    """Warn of a mask of black and white, or of a JPEG, whose numbers would be taken as classes."""
    mask = first.fields.get(MASK)
    if mask is None or IMAGE not in first.fields or recipe.mask_values == "scale":
        return
    if isinstance(mask, bytes) and mask.startswith(_JPEG) and recipe.mask_colours is None:
        _log.warning(
            "the first mask is a JPEG, which changes numbers of classes: save masks without loss, as PNG, or give "
            "--mask-values scale where they are black and white"
        )
        return
    try:
        values = set(np.unique(decode_mask(mask, "", recipe)).tolist())
    except SampleError:  # reported when it is built
        return
    if _WHITE in values <= {0, _WHITE}:
        _log.warning(
            "the first mask holds 0 and 255 alone, and training ignores pixels of 255: --mask-values scale makes them "
            "0 and 1"
        )


def _warn_of_unchanged(cache: Cache, count: int) -> None:
    if count:
        _log.warning(
            "%d of %d skipped samples are as they were and are not tried again: --retry-all tries them, too",
            count,
            len(cache.manifest.skipped),
        )


def _warn_of_left_out(listing: Listing) -> None:
    if listing.left_out:
        _log.warning("files that are no images by their names are left out: %s", left_out_text(listing.left_out))
