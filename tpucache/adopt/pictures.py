"""PictureDataset: the pictures and labels of a cache, with the interface of torchvision's data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tpucache.adopt.kept import KeptCache
from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.tensors import Dataset
from tpucache.recipe import Recipe
from tpucache.store.fields import IMAGE

#: The (height, width) of pictures in pixels, or one number for both.
Size = int | tuple[int, int]
#: A function of one picture or of one label.
Transform = Callable[[Any], Any]

_ADVICE: Final = "leave it out, and change whole batches instead: CachedLoader(…, augment=…, normalise=…)"


class PictureDataset(Dataset[Any]):
    """Pictures and their labels, read from a cache: `picture, label = dataset[0]`. `cached` and `from_hf` return it.

    As in torchvision's data sets, a `transform` is called with a PIL image, and its result is the picture. Without a
    transform, the picture is a tensor (channels, height, width) in the cache's dtype, usually uint8, which DataLoader
    collates into batches. A label is a Python number, a list of numbers, or -1 if there is none; `target_transform` is
    called with each label. `targets` is the list of all labels, and `classes` the list of class names.

    The data set works with DataLoader and any kind of worker. `CachedLoader` is faster; it takes the data set, or a
    Subset, if there are no transforms.
    """

    def __init__(
        self, kept: KeptCache, transform: Transform | None = None, target_transform: Transform | None = None
    ) -> None:
        """Open a cache in which each record is one picture. Raises UsageError for a cache with other records.

        Also raises UsageError if there is a `transform`, and PIL has no images of the pictures' dtype and channels.
        """
        self._cached = CachedDataset(kept.cache)
        self._use = kept.use
        _check(self._cached, transform)
        self.transform, self.target_transform = transform, target_transform
        self.classes = list(self._cached.classes)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.targets: list[Any] = self._labels()

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return a picture and its label. Raises IndexError when there is no such sample."""
        position, label = self._entry(index)
        picture, _ = self._cached[position]
        if self.transform is not None:
            picture = self.transform(_to_pil(np.asarray(picture)))
        return picture, label if self.target_transform is None else self.target_transform(label)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(samples={len(self)}, classes={len(self.classes)}, cache={str(self.directory)!r})"

    @property
    def directory(self) -> Any:
        """The folder of the cache. `CachedDataset` and all commands accept this path."""
        return self._cached.directory

    def to_cached(self) -> CachedDataset:
        """Return the same samples as a CachedDataset, from which `CachedLoader` reads whole batches.

        Raises UsageError if a transform, a subclass or a changed label makes samples differ from the cache.
        """
        for name in ("transform", "target_transform"):
            if getattr(self, name) is not None:
                raise UsageError(f"{type(self).__name__} has a {name}, which changes samples one by one: {_ADVICE}")
        if method := _own_method(self):
            raise UsageError(
                f"{type(self).__name__} has a {method} of its own, which changes samples: use DataLoader instead"
            )
        chosen, labels = self._chosen()
        before = self._labels()
        if labels != [before[position] for position in chosen]:
            raise UsageError(
                f"labels of this {type(self).__name__} were changed, and the cache in {self.directory} has the old "
                "labels: change the cache by `tpucache relabel`, or read this dataset with DataLoader"
            )
        return self._cached if chosen == range(len(before)) else self._cached.select(list(chosen))

    def _entry(self, index: int) -> tuple[int, Any]:
        """Return a sample's position in the cache, and its label. Raises IndexError if there is no sample `index`."""
        position = range(len(self))[index]
        return position, self.targets[position]

    def _chosen(self) -> tuple[Sequence[int], Sequence[Any]]:
        """Return the position of each sample in the cache, and the label of each sample."""
        return range(len(self)), self.targets

    def _labels(self) -> list[Any]:
        """Return the label of each sample in the cache: a number, a list of numbers, or -1 if there is no label."""
        labels = self._cached.table.labels
        if labels is None:
            return [-1] * len(self._cached)
        return (labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels).tolist()  # type: ignore[no-any-return]  # a list


def _own_method(dataset: PictureDataset) -> str | None:
    """Return a method by which a subclass of the user's decides what the samples are; None if there is none."""
    for name in ("__getitem__", "__getitems__", "__len__"):
        owner = next((kind for kind in type(dataset).__mro__ if name in vars(kind)), None)
        if owner is not None and owner.__module__.partition(".")[0] != "tpucache":
            return name
    return None


def to_recipe(size: Size, recipe: Recipe | None, transform: Any) -> Recipe:
    """Return the recipe of the cache: `recipe`, or a recipe with this size if it is None.

    Raises UsageError for a recipe with augmented variants and for a `transform` that is not callable, RecipeError for
    an invalid size.
    """
    if transform is not None and not callable(transform):
        raise UsageError(
            f"transform is called with each picture, and {transform!r:.60} is not a function: give a size as size="
        )
    recipe = recipe or Recipe(size=size)
    if recipe.variants:
        raise UsageError(
            "only CachedDataset reads augmented variants: build the cache by `warmup`, or augment by a transform"
        )
    return recipe


def _check(cached: CachedDataset, transform: Transform | None) -> None:
    if cached.names != [IMAGE]:
        raise UsageError(
            f"{cached.directory} has {', '.join(cached.names)}, not only a picture: read it as a CachedDataset"
        )
    field = cached.manifest.fields[0]
    if transform is not None and (field.dtype != "|u1" or field.shape[2] not in (1, 3)):
        raise UsageError("a transform takes pictures of 8 bits, grey or RGB: leave out the transform, or mode='keep'")


def _to_pil(pixels: Any) -> Any:
    """Return an array (channels, height, width) as a PIL image over the same memory."""
    from PIL import Image

    rows = pixels.transpose(1, 2, 0)
    return Image.fromarray(rows[:, :, 0] if rows.shape[2] == 1 else rows)
