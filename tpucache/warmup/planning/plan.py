"""The beginning of a run: what there is to do, beside what stands, and whether it is what an interrupted run began."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import BuildError, NotACacheError, RecipeError, SampleError, SourceError
from tpucache.recipe import EXTENT, Recipe, differences
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE, Field
from tpucache.store.files.atomic import write_atomically
from tpucache.store.manifest import Manifest
from tpucache.store.samples import Column as TableColumn
from tpucache.store.samples import SampleTable, Strings, encode_columns
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.planning.blocks import Block, listing_sha256, plan_blocks
from tpucache.warmup.planning.listing_check import check_listing, label_candidates
from tpucache.warmup.planning.numbering import SIZE_COLUMN, number_samples, old_blocks, order_of, sample_difference
from tpucache.warmup.records.augment import PRESETS, resolve
from tpucache.warmup.records.encode import record_fields
from tpucache.warmup.records.labels import LabelRule, labels_unused
from tpucache.warmup.sources.base import Item, Label, Listing, Sample, Source
from tpucache.warmup.sources.folder import left_out_text
from tpucache.warmup.sources.labelled import LabelKind
from tpucache.warmup.tables import sizes_of, versions
from tpucache.warmup.work.folder import check_files, remove_leftovers
from tpucache.warmup.work.lock import hold

PLAN_NAME: Final = "plan.json"
_LISTING_NAME: Final = "listing.npz"
# The libraries that say what a preset is in full.
_OF_PRESETS: Final = ("tpucache", "albumentations")

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class Plan:
    """What a run is to do: as JSON values to be compared by a rerun, and as blocks."""

    told: Mapping[str, Any]
    listing: Listing
    blocks: Sequence[Block]
    fields: tuple[Field, ...]
    labels: LabelRule | None
    before: Manifest | None


def make_plan(source: Source, listing: Listing, recipe: Recipe, cache: Path, labels_as: LabelKind = "auto") -> Plan:
    """Find what there is to do, beside what a finished cache has. Raises RecipeError, SourceError."""
    before: Manifest | None = None
    with contextlib.suppress(NotACacheError):
        before = Manifest.load(cache)
        check_files(cache, before)
    if before is None:
        first = _first_item(source, listing)
        fields, like = record_fields(first, recipe), first.label
        unused = _unused_labels(listing, first)
    else:
        unused = labels_unused(before.source)
        # Before an augmentation of another size is tried on this cache's records.
        _check_recipe(cache, before, {**recipe.to_dict(), "augmentation": before.recipe.get("augmentation", {})})
        fields, like = before.fields, _label_of(before, cache)
    told_by_listing = any(sample.label is not None for sample in listing.samples)  # then the samples' own do not count
    labels = None if told_by_listing else LabelRule(like, len(listing.classes))
    if recipe.variants and fields[0].name != IMAGE:
        raise RecipeError(f"variants are of images, and {source!r} has none: leave --variants out")
    if listing.left_out:
        _log.warning("files that are no images by their names are left out: %s", left_out_text(listing.left_out))
    told = {**recipe.to_dict(), "augmentation": _augmentation(recipe, fields, before)}
    listed = listing
    if before is None:
        blocks = plan_blocks(listing.samples, fields, recipe)
    else:
        _check_recipe(cache, before, told)
        listing = number_samples(listing, cache, before)
        check_listing(source, listing, cache, before)
        blocks = _missing_blocks(listing, recipe, cache, before)
        if blocks and (other := version_differences(before.created_by)):
            _log.warning("%s was made with other versions, and what is added may differ: %s", cache, "; ".join(other))
    description = {
        "recipe": told,
        "source": {
            "samples": len(listing.samples),
            "sha256": listing_sha256(listing),
            "order": order_of(listing, listed),
        },
        "labels": {"asked": labels_as, "unused": unused},
        "left_out": dict(listed.left_out),
        "fields": [field.to_dict() for field in fields],
        "before": before.identity if before else "",
        "versions": versions(),
    }
    return Plan(json.loads(json.dumps(description)), listing, blocks, fields, labels, before)


def begin(work: Path, plan: Plan) -> tuple[list[Sample], tuple[str, ...]]:
    """Write the plan down, or compare it with the one an interrupted run wrote; remove what that run left half-done.

    Returns the samples that have another size than when it was begun, and the versions that are others now.
    """
    path = work / PLAN_NAME
    changed: list[Sample] = []
    other: tuple[str, ...] = ()
    if path.exists():
        other = _check_plan(work, json.loads(path.read_bytes()), plan)
        samples = plan.listing.samples
        sizes: Any = SampleTable(work / _LISTING_NAME, len(samples))[SIZE_COLUMN]
        changed = [s for s, size in zip(samples, sizes.tolist(), strict=True) if 0 < size != s.bytes > 0]
    else:
        save_listing(work, plan)
        write_atomically(path, json.dumps(plan.told).encode())
    remove_leftovers(work)
    return changed, other


def is_begun(work: Path, manifest: Manifest) -> bool:
    """Tell whether an addition to a finished cache was begun, or is under way, whose work another run must not remove.

    Raises BuildError when another run is just beginning.
    """
    with hold(work):
        try:
            told = json.loads((work / PLAN_NAME).read_bytes())
        except FileNotFoundError:
            return False
        return bool(told["before"] == manifest.identity)


def save_listing(work: Path, plan: Plan) -> None:
    """Write down what the source is like, so that a rerun can say how it differs."""
    samples = plan.listing.samples
    paths: TableColumn = Strings.pack([sample.path for sample in samples])
    write_atomically(work / _LISTING_NAME, encode_columns({"path": paths, SIZE_COLUMN: sizes_of(samples)}))


def _augmentation(recipe: Recipe, fields: Sequence[Field], before: Manifest | None) -> dict[str, Any]:
    """Return the augmentation in full: the finished cache's own where it can be no other."""
    if not recipe.variants:
        return dict(before.recipe["augmentation"]) if before else {}
    if before is not None and before.augmented and recipe.augment in PRESETS:
        used = versions()
        asked = (recipe.augment, list(recipe.to_dict()["size"]), *(used[name] for name in _OF_PRESETS))
        made = (before.recipe.get("augment"), before.recipe.get("size"))
        if asked == (*made, *(before.created_by.get(name) for name in _OF_PRESETS)):
            return dict(before.recipe["augmentation"])
    old = before.recipe["augmentation"] if before is not None else {}
    if old.get("callable") == recipe.augment:
        now = {"callable": recipe.augment, **code_digests(recipe.augment)}
        return now if code_changes(old, now) else dict(old)  # an earlier version may say less of the same code
    return resolve(recipe.augment, recipe.height, recipe.width, fields)


def _check_recipe(cache: Path, before: Manifest, told: Mapping[str, Any]) -> None:
    """Refuse a recipe that makes other records than a finished cache has."""
    old = {**before.recipe}
    if not before.augmented:  # nothing was augmented yet, so any augmentation fits
        old.update(augmentation=told["augmentation"], augment=told["augment"])
    changed = recipe_differences(old, told)
    if told["variants"] < before.augmented:
        changed.append(f"variants {before.augmented}, now {told['variants']}")
    if changed:
        raise RecipeError(
            f"{cache} was made with another recipe: {'; '.join(changed)}. "
            "Give the same options, or another folder to build anew."
        )


def recipe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name each part in which two recipes differ; of a callable's code, the modules that changed."""
    old, new = before.get("augmentation", {}), now.get("augmentation", {})
    changed = differences({**before, "augmentation": new}, now)
    if new.get("callable") and old.get("callable") == new.get("callable"):
        modules = code_changes(old, new)
        return changed + [f"the code of the augmentation {new['callable']} changed, in {', '.join(modules)}"] * bool(
            modules
        )
    if old != new and not any(before.get(name) != now.get(name) for name in ("augment", "size")):
        changed.append(f"the augmentation {now['augment']} now means another one")
    return changed


def _missing_blocks(listing: Listing, recipe: Recipe, cache: Path, before: Manifest) -> list[Block]:
    """Return the new variants of the blocks that stand, and all variants of new samples' blocks."""
    variants = [variant for variant in range(recipe.variants + 1) if variant not in before.variants]
    blocks = old_blocks(listing, cache, before, variants) if variants else []
    known = before.samples + len(before.skipped)
    first = 1 + max((entry.block for entry in before.shards), default=-1)
    return [*blocks, *plan_blocks(listing.samples[known:], before.fields, recipe, first)]


def _unused_labels(listing: Listing, first: Item) -> list[str]:
    """Return, and warn of, what could be labels where there are none."""
    if first.label is not None or any(sample.label is not None for sample in listing.samples):
        return []
    unused = label_candidates(dict(listing.columns), first)
    if unused:
        _log.warning(
            "the samples have no labels, and %s could be: name a table's column with --label-col, and call a dataset's "
            "key 'label'",
            ", ".join(map(repr, unused)),
        )
    return unused


def _first_item(source: Source, listing: Listing) -> Item:
    """Return the first sample that can be read: by it goes what all records and labels are."""
    errors: list[SampleError] = []
    for sample in listing.samples:
        try:
            return source.load(sample)
        except SampleError as error:
            errors.append(error)
    raise SourceError(f"none of the {len(errors)} samples could be used; {errors[0]}")


def _label_of(manifest: Manifest, cache: Path) -> Label:
    """Return the label of a finished cache's first sample."""
    labels = Cache(cache, manifest).samples.labels
    if labels is None or not len(labels):
        return None
    label = labels[0].tolist()
    return label if isinstance(label, int) else tuple(label)


def _check_plan(work: Path, before: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """Refuse to continue with another recipe, source or cache; warn of other versions and return them."""
    cache, now = work.parent, plan.told
    changed = recipe_differences(before["recipe"], now["recipe"])
    for name in EXTENT:
        if before["recipe"][name] != now["recipe"][name]:
            changed.append(f"{name} {before['recipe'][name]}, now {now['recipe'][name]}")
    if changed:
        raise RecipeError(
            f"{cache} was begun with another recipe: {'; '.join(changed)}. Give the same options to go on, another "
            f"folder to build anew, or remove {work} to give up what was begun."
        )
    if before["source"] != now["source"]:
        count = before["source"]["samples"]
        listed = SampleTable(work / _LISTING_NAME, count)
        raise SourceError(
            f"{cache} was begun from {count} samples, the source now has {now['source']['samples']}; "
            f"{sample_difference(listed, plan.listing.samples)}. "
            "Bring the source back as it was to go on, or give another folder to build anew."
        )
    asked = before.get("labels", {}).get("asked", "auto")
    if asked != now["labels"]["asked"]:
        raise SourceError(
            f"{cache} was begun with --labels {asked}, now {now['labels']['asked']}: give the same options to continue"
        )
    if (before["before"], before["fields"]) != (now["before"], now["fields"]):
        raise BuildError(f"{cache} is another cache than when this was begun: remove {work} to give up what was begun")
    if other := version_differences(before["versions"]):
        _log.warning("%s was begun with other versions, whose records may differ: %s", cache, "; ".join(other))
    return tuple(other)


def version_differences(before: Mapping[str, Any]) -> list[str]:
    """Name each version that is another one now, as `pillow 12.0.0, now 12.1.0` or `simplejpeg none, now 1.9.0`."""
    now = versions()
    pairs = {name: (before.get(name) or "none", now.get(name) or "none") for name in {**before, **now}}
    return [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
