"""A picture of a batch as the model receives it in training: augmented on the device, with mixed labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.loading.sampler import full_order
from tpucache.ondevice.draws import draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings
from tpucache.report.draw import Cell, Layout, draw_record, draw_sheet, fitted_size
from tpucache.report.text import describe_label
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, LABEL, MASK, Field
from tpucache.types import Array

if TYPE_CHECKING:
    from PIL import Image


SAMPLES: Final = 12


def preview_batch(
    cache: str | Path | CachedDataset,
    augment: AugmentSettings | None = None,
    samples: int = SAMPLES,
    *,
    seed: int = 0,
    side: int = 192,
) -> Image.Image:
    """Return a sheet with the images of the first batch that training with the seed `seed` reads.

    The batch has at most `samples` samples. Its images are augmented by the settings `augment`, as on the device, and
    shown without normalisation; the longer side of each has `side` pixels. Above each image is its label after
    augmentation; for two mixed images the label has the share of each class. Masks are moved and mixed with their
    image. Augmentation on the device does not move boxes and keypoints, so they are drawn only if the settings neither
    move nor mix pixels. If `cache` is a path, and the cache has augmented variants, the batch shows these.

    Raises UsageError when there is nothing to show or a setting does not fit the images, and NotACacheError,
    FormatError or DamageError for the cache.
    """
    if not isinstance(cache, CachedDataset):
        cache = CachedDataset(cache)
        cache = cache.in_variant("epoch") if cache.manifest.augmented else cache
    if IMAGE not in cache.names or not len(cache):
        raise UsageError(f"{cache.directory} holds no image to show: give a cache with at least one image")
    settings = augment or AugmentSettings()
    batch = cache[full_order(len(cache), seed, 0)[:samples]]
    paths = [path for path in batch.paths for _ in range(settings.views)]
    image = cache.manifest.fields[cache.names.index(IMAGE)]
    shown, targets = _augmented(batch, image, settings, seed)
    cells = (
        Cell(
            describe_label(None if targets is None else targets[row], cache.classes),
            path,
            [draw_record({name: array[row] for name, array in shown.items()}, cache.classes, side)],
        )
        for row, path in enumerate(paths)
    )
    chosen = [f"{name} {value:g}" for name, value in vars(settings).items() if value != getattr(AugmentSettings, name)]
    line = f"a batch of {len(batch)}, {', '.join(chosen) if chosen else 'not augmented'}"
    layout = Layout(len(paths), 1, fitted_size(image.shape, side))
    return draw_sheet(layout, Path(cache.place).resolve().name, line, cells)


def _augmented(
    batch: CachedDataset, image: Field, settings: AugmentSettings, seed: int
) -> tuple[dict[str, Array], Array | None]:
    """Return a batch's augmented fields by name, and its labels as float rows (None if it has no labels).

    Images are (batch, height, width, channels), in their dtype.
    """
    given = next(iter(CachedLoader(batch, len(batch))))
    fields = dict(given) if isinstance(given, Mapping) else {IMAGE: given[0], LABEL: given[1]}
    labels = fields.pop(LABEL)
    fields[IMAGE] = fields[IMAGE].permute(0, 2, 3, 1)
    statistics = batch.manifest.statistics
    height, width, channels = image.shape
    augment = Augment(settings, statistics.mean, statistics.std, height, width, torch.device("cpu"), image.dtype)
    draws = torch.from_numpy(draw(settings, seed, 0, len(batch), (height, width)))
    moved = augment.fields(fields, draws)
    pixels, targets = augment.mix(moved[IMAGE], augment.views(_targets(labels, len(batch.classes))), draws)
    spread = torch.tensor([each or 1.0 for each in statistics.std]).view(1, channels, 1, 1)
    numbers = pixels * spread + torch.tensor(statistics.mean).view(1, channels, 1, 1)
    shown = {IMAGE: _rounded(numbers.permute(0, 2, 3, 1).numpy(), image.dtype)}
    if MASK in moved:
        shown[MASK] = _mixed_masks(augment, moved, draws)
    if not (settings.moves or settings.mixes):
        shown |= {name: moved[name].numpy() for name in (BOXES, KEYPOINTS) if name in moved}
    return shown, None if batch.table.labels is None else targets.numpy()


def _targets(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return labels as float32 rows (batch, outputs): class numbers one-hot, other labels unchanged.

    The label -1 (no label) counts as class 0.
    """
    if labels.dim() > 1 or labels.is_floating_point():
        return labels.float().reshape(len(labels), -1)
    known = labels.clamp(min=0)
    return torch.nn.functional.one_hot(known, max(classes, int(known.max()) + 1)).float()


def _mixed_masks(augment: Augment, moved: Mapping[str, torch.Tensor], draws: torch.Tensor) -> Array:
    """Return the mixed masks, uint8 (batch, height, width, 1): for each pixel, the class with the largest share."""
    masks = moved[MASK][..., 0].long()
    shares = torch.nn.functional.one_hot(masks, int(masks.max()) + 1).permute(0, 3, 1, 2).float()
    _, mixed = augment.mix(moved[IMAGE], shares, draws)
    classes: Array = mixed.argmax(1)[..., None].to(torch.uint8).numpy()
    return classes


def _rounded(numbers: Array, dtype: str) -> Array:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return numbers
    limits = np.iinfo(kind)
    return np.asarray(np.rint(numbers).clip(limits.min, limits.max), kind)
