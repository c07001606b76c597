"""Drop-in data sets: ImageFolder, `cached` for any map-style data set, and from_hf for one of Hugging Face's datasets.

Each is a PictureDataset: the pictures and labels of a cache, with the interface of torchvision's data sets.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpucache.adopt.kept import BuildChoices, Kept, KeptCache
from tpucache.adopt.states import (
    CONTENT,
    MapStyleSource,
    PictureFolderSource,
    compared,
    hugging_face_state,
    list_pictures,
)
from tpucache.errors import SourceError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.tensors import Dataset
from tpucache.progress import note
from tpucache.recipe import Recipe
from tpucache.store.fields import IMAGE
from tpucache.store.files import check_is_local
from tpucache.warmup.sources.datasets import DatasetSource, is_saved, is_stream, load_saved

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.sources.source import Items

#: The (height, width) of pictures in pixels, or one number for both.
Size = int | tuple[int, int]
#: A function of one picture or of one label.
Transform = Callable[[Any], Any]


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
        self._cached = cached = CachedDataset(kept.cache)
        self._use = kept.use
        if cached.names != [IMAGE]:
            raise UsageError(
                f"{cached.directory} has {', '.join(cached.names)}, not only a picture: read it as a CachedDataset"
            )
        field = cached.manifest.fields[0]
        if transform is not None and (field.dtype != "|u1" or field.shape[2] not in (1, 3)):
            raise UsageError(
                "a transform takes pictures of 8 bits, grey or RGB: leave out the transform, or mode='keep'"
            )
        self.transform, self.target_transform = transform, target_transform
        self.classes = list(cached.classes)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.targets: list[Any] = self._labels()

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return a picture and its label."""
        position, label = self._entry(index)
        picture, _ = self._cached[position]
        if self.transform is not None:
            from PIL import Image

            rows = np.asarray(picture).transpose(1, 2, 0)
            picture = self.transform(Image.fromarray(rows[:, :, 0] if rows.shape[2] == 1 else rows))
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
                raise UsageError(
                    f"{type(self).__name__} has a {name}, which changes samples one by one: leave it out, and change "
                    "whole batches instead: CachedLoader(…, augment=…, normalise=…)"
                )
        for name in ("__getitem__", "__getitems__", "__len__"):
            owners = [kind.__module__ for kind in type(self).__mro__ if name in vars(kind)]
            if owners and not owners[0].startswith("tpucache."):
                raise UsageError(
                    f"{type(self).__name__} has a {name} of its own, which changes samples: use DataLoader instead"
                )
        entries, before = self._entries(), self._labels()
        if len(entries) != len(self) or any(label != before[position] for position, label in entries):
            raise UsageError(
                f"labels of this {type(self).__name__} were changed, and the cache in {self.directory} has the old "
                "labels: change the cache by `tpucache relabel`, or read this dataset with DataLoader"
            )
        chosen = [position for position, _ in entries]
        return self._cached if chosen == [*range(len(before))] else self._cached.select(chosen)

    def _entry(self, index: int) -> tuple[int, Any]:
        position = range(len(self))[index]
        return position, self.targets[position]

    def _entries(self) -> list[tuple[int, Any]]:
        return [*enumerate(self.targets)]

    def _labels(self) -> list[Any]:
        """Return the label of each sample in the cache: a number, a list of numbers, or -1 if there is no label."""
        labels = self._cached.table.labels
        if labels is None:
            return [-1] * len(self._cached)
        return (labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels).tolist()  # type: ignore[no-any-return]  # a list


class ImageFolder(PictureDataset):
    """torchvision's ImageFolder, but each picture is decoded and resized only once: `picture, label = dataset[0]`.

    `classes`, `class_to_idx`, `samples`, `imgs` and `targets` are those of torchvision, in the same order. As in
    torchvision, the list `samples` decides which samples the data set has: you may shorten, reorder or relabel it.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        *,
        size: Size = 224,
        cache: str | Path | None = None,
        recipe: Recipe | None = None,
        allow_empty: bool = False,
        on_error: OnError = "fail",
        jobs: int | None = None,
    ) -> None:
        """Open the cache of a folder that has one subfolder for each class. Build the cache if there is none.

        `transform` is called with a PIL image (RGB, of the cached size), and its result is the picture. Without a
        transform, the picture is a tensor, uint8 (3, height, width). `target_transform` is called with the number of
        the class.

        `size` is the size of the cached pictures in pixels, one number or (height, width): each picture is scaled until
        it covers that size, and its middle is cut out. A `recipe` has more options; if it is given, its size is used
        instead of `size`.

        The cache is stored in a subfolder of `cache`; the default is TPUCACHE_DIR, or `tpucache` in the user's cache
        folder. A new cache is built for another path or recipe, and after a picture was added, removed or replaced, as
        the names, sizes and times of the files show. `jobs` processes build it, by default one for each core. The next
        use continues a build that was killed.

        A folder of 256 pictures or more can be read while its cache is built (see `open_or_build`): reading a picture
        waits until it is built, and raises the error if building fails. The cache of a smaller folder is built before
        this returns.

        A file that cannot be decoded is an error. With `on_error="skip"` such files are left out of the samples, and
        the whole cache is built before this returns. A class folder without pictures is an error, too; with
        `allow_empty` it is a class without samples.

        Raises UsageError, SourceError, SampleError for a picture that cannot be used, RecipeError, and BuildError when
        the cache cannot be written.
        """
        # By these methods of torchvision's ImageFolder a subclass decides which samples and classes a folder has.
        for name in ("find_classes", "_find_classes", "make_dataset"):
            if hasattr(self, name):
                raise UsageError(
                    f"{type(self).__name__} has a {name} of its own, which is not called here: give the data set of "
                    "torchvision to tpucache.cached"
                )
        choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
        self.root = os.path.expanduser(root)  # noqa: PTH111  # a Path would change `photos/` and `./photos`
        real = os.path.realpath(self.root)
        kept = Kept(Path(real).name, ["ImageFolder", real], cache, choices)
        if kept.folder.is_relative_to(real) or Path(os.path.realpath(kept.folder)).is_relative_to(real):
            raise UsageError(
                f"the cache would lie in {kept.folder}, inside of {self.root}, whose folders are classes: give another "
                "folder as cache="
            )
        find = functools.partial(list_pictures, real, allow_empty=allow_empty)
        listing, state = find()
        source = functools.partial(PictureFolderSource, real, listing)
        found = kept.open(state, source, lambda: find().state, len(listing.samples))
        super().__init__(found, transform, target_transform)
        paths = [os.path.join(self.root, path) for path in self._cached.table.paths]
        self.samples: list[tuple[str, Any]] = list(zip(paths, self.targets, strict=True))
        self.imgs = self.samples
        self._positions = {path: at for at, path in enumerate(paths)}  # in the cache; callers may change `samples`

    def __len__(self) -> int:
        return len(self.samples)

    def _entry(self, index: int) -> tuple[int, Any]:
        path, label = self.samples[index]
        if path not in self._positions:
            raise UsageError(f"{path} is not one of the pictures that {self.root} had when this ImageFolder was opened")
        return self._positions[path], label

    def _entries(self) -> list[tuple[int, Any]]:
        return [self._entry(index) for index in range(len(self))]


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
    each call reads and compares all pictures. If a picture or label differs, a new cache is built.

    `size`, `recipe`, `cache`, `on_error` and `jobs` are those of ImageFolder. The data set is pickled for the workers.

    Raises the errors of ImageFolder, and UsageError for an item that differs each time it is read.
    """
    choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
    source = MapStyleSource(dataset)
    numbers: Sequence[int] = compared(len(source))
    few = source.state(numbers, 1)
    if identity is not None:
        kept = Kept(identity, ["cached", identity], cache, choices)
    else:
        numbers = range(len(source))
        kept = Kept(source.name, ["cached", source.kind, few], cache, choices)
        if kept.states():
            note(
                f"{kept.name}: comparing all {len(source):,} pictures with its cache. To compare only a few, pass an "
                "identity=, a text by which you state that the pictures are the same"
            )
    state = source.state(numbers, jobs)  # the few are read again, so that items that differ each time are found early
    found = kept.open(state, source, lambda: state)
    table = found.cache.samples
    try:
        source.check(dict(zip(table.numbers.tolist(), map(str, table[CONTENT]), strict=True)))
    except UsageError:
        directory = found.cache.directory
        del found
        kept.remove(directory)
        raise
    return PictureDataset(found, transform, target_transform)


def from_hf(
    dataset: Any,
    size: Size = 224,
    *,
    transform: Transform | None = None,
    target_transform: Transform | None = None,
    cache: str | Path | None = None,
    recipe: Recipe | None = None,
    on_error: OnError = "fail",
    jobs: int | None = None,
) -> PictureDataset:
    """Return the pictures and labels of a `datasets.Dataset`, read from a cache. Build the cache if there is none.

    `dataset` may also be a folder that `save_to_disk` wrote. The picture is in the column `image`, or, without such a
    column, in the only column of pictures. The label is in the column `label`, or in the only column of classes.

    A new cache is built when the data set's own fingerprint has changed, as it does after each `map`, `filter` or
    `select`. It is also built when one of up to 33 compared samples has changed, and, if the data set stores paths
    instead of pictures, when the size or a time of a picture file has changed.

    The other arguments are those of ImageFolder. Raises the errors of ImageFolder, UsageError also for a stream, for
    several splits and for a data set that has a format or transform, and DependencyError without `datasets`.
    """
    choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
    if isinstance(dataset, (str, Path)):
        check_is_local(dataset)
        if not is_saved(dataset):
            raise SourceError(
                f"{dataset} is not a folder that save_to_disk wrote: give such a folder, or the data set that "
                "datasets.load_dataset returns"
            )
        dataset = load_saved(dataset)
    if isinstance(dataset, dict):
        raise UsageError(
            f"the data set has the splits {', '.join(map(str, dataset))}: give one of them, dataset[SPLIT]"
        )
    if is_stream(dataset):
        raise UsageError("a stream has no items by number: load the data set without streaming, or use build_cache")
    if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "features")):
        raise UsageError(f"a {type(dataset).__name__} is not a datasets.Dataset: use tpucache.cached")
    if dataset.format["type"] is not None:
        raise UsageError(
            f"the data set has the format or transform {dataset.format['type']!r}: give dataset.with_format(None), and "
            "move a transform to the argument transform="
        )
    if not len(dataset):
        raise UsageError("the data set has no samples")
    try:
        source = DatasetSource(dataset)
    except UsageError as error:  # the data set is in memory
        raise UsageError(f"{error}; or call dataset.save_to_disk(FOLDER), and from_hf(FOLDER)") from error
    name = f"{dataset.info.dataset_name or 'dataset'}-{dataset.split or 'all'}"
    kept = Kept(name, ["from_hf", dataset._fingerprint], cache, choices)
    if not kept.states() and (others := kept.namesakes()):
        note(
            f"{name}: caches of {others:,} other data sets or recipes of this name are kept. If each run adds one, the "
            "data set is drawn anew each time: give train_test_split and shuffle a seed=. `tpucache cached --clear "
            f"{name}` removes these caches"
        )
    find = functools.partial(hugging_face_state, dataset, source)
    state = find()
    return PictureDataset(kept.open(state, source, find, len(dataset)), transform, target_transform)


def to_recipe(size: Size, recipe: Recipe | None, transform: Any) -> Recipe:
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
