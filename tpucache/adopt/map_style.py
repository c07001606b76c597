"""cached: reads any map-style data set of pictures and labels from a cache, and builds the cache on first use.

A data set does not show whether its pictures have changed since the cache was built. So either all pictures are
compared with the cache, or the caller passes an `identity` and thereby states that the pictures are the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tpucache.adopt.kept import BuildChoices, Kept, KeptCache
from tpucache.adopt.map_source import MapStyleSource
from tpucache.adopt.pictures import PictureDataset, Size, Transform, to_recipe
from tpucache.errors import SourceError
from tpucache.progress import note
from tpucache.recipe import Recipe, fingerprint

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.sources.source import Items


def cached(
    dataset: Items,
    size: Size = 224,
    *,
    transform: Transform | None = None,
    target_transform: Transform | None = None,
    identity: str | None = None,
    cache: str | Path | None = None,
    recipe: Recipe | None = None,
    on_error: OnError = "fail",
    jobs: int | None = None,
) -> PictureDataset:
    """Return the pictures and labels of any map-style data set, read from a cache. Build the cache if there is none.

    An item is a tuple of a picture (a PIL image, or an array or tensor of 1 or 3 channels: whole numbers from 0 to
    255, or floats from 0 to 1) and a label (the number or name of a class, or one or several numbers). The data set
    must not augment or normalise its pictures: do that in `transform`, which is called with a PIL image.

    With `identity`, a text such as "birds, third release", you state that the pictures are the same as in earlier calls
    with this text. Then only the length and 33 pictures and labels, evenly spread, are compared. Without `identity`,
    each call compares all pictures, which takes as long as reading the data set once. If a picture or label differs, a
    new cache is built.

    `size`, `recipe`, `cache`, `on_error` and `jobs` are those of ImageFolder. The data set is pickled for the workers.

    Raises the errors of ImageFolder, and UsageError for an item that differs each time it is read.
    """
    choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
    source = MapStyleSource(dataset)
    first = source.few_contents()
    made_by = fingerprint(choices.recipe.to_dict())
    if identity is not None:
        kept = Kept(identity, ["cached", identity, made_by], cache)
        found = _open_or_build(kept, hashlib.sha256(repr(first).encode()).hexdigest()[:32], source, choices)
    else:
        kept = Kept(source.name, ["cached", source.kind, first, made_by], cache)
        found = _compared(kept, source, choices)
    return PictureDataset(found, transform, target_transform)


def _open_or_build(kept: Kept, state: str, source: MapStyleSource, choices: BuildChoices) -> KeptCache:
    found = kept.open(state, choices.on_error)
    return kept.build(state, source, choices) if found is None else found


def _compared(kept: Kept, source: MapStyleSource, choices: BuildChoices) -> KeptCache:
    """Return the newest cache if all its pictures and labels equal those of the data set. Otherwise build a new cache.

    An unfinished cache may hold pictures that have changed since: it is removed and built from the beginning.
    """
    numbers = [int(state, 16) for state in kept.states()]
    latest = max(numbers, default=0)
    found = kept.open(f"{latest:x}", choices.on_error)
    if found is not None:
        note(
            f"{kept.name}: comparing all {len(source):,} pictures with its cache. To compare only a few, pass an "
            "identity=, a text by which you state that the pictures are the same"
        )
        if (changed := source.difference(found.cache, choices.jobs)) is None:
            return found
        note(f"{kept.name}: {changed}")
        latest, found = latest + 1, None  # `build` removes the old cache only if nothing refers to it
    elif numbers:
        kept.remove(f"{latest:x}")
    found = kept.build(f"{latest:x}", source, choices)
    if not found.is_new and (changed := source.difference(found.cache, choices.jobs)) is not None:
        raise SourceError(f"{kept.name}: another process has built its cache, and {changed}. Run this again")
    return found
