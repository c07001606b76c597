"""ImageFolder: a drop-in replacement for torchvision's class. It reads from a cache, which the first use builds."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.adopt.builder import LEAST_GROWING
from tpucache.adopt.kept import BuildChoices, Kept, KeptCache
from tpucache.adopt.picture_folder import PictureFolderSource, check_unchanged, list_at_rest, list_pictures
from tpucache.adopt.pictures import PictureDataset, Size, Transform, to_recipe
from tpucache.errors import UsageError
from tpucache.recipe import Recipe, fingerprint

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError


#: Methods of torchvision's ImageFolder by which a subclass decides which samples and classes a folder has.
_LISTING_METHODS: Final = ("find_classes", "_find_classes", "make_dataset")


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
        for name in _LISTING_METHODS:
            if hasattr(self, name):
                raise UsageError(
                    f"{type(self).__name__} has a {name} of its own, which is not called here: give the data set of "
                    "torchvision to tpucache.cached"
                )
        choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
        self.root = os.path.expanduser(root)  # noqa: PTH111  # a Path would change `photos/` and `./photos`
        kept = _open_or_build(self.root, cache, choices, allow_empty=allow_empty)
        super().__init__(kept, transform, target_transform)
        paths = [os.path.join(self.root, path) for path in self._cached.table.paths]
        self.samples: list[tuple[str, Any]] = list(zip(paths, self.targets, strict=True))
        self.imgs = self.samples
        self._original_samples = tuple(self.samples)  # in the order of the cache; callers may change `samples`
        self._positions: dict[str, int] = {}  # by path; filled when it is first needed

    def __len__(self) -> int:
        return len(self.samples)

    def _entry(self, index: int) -> tuple[int, Any]:
        path, label = self.samples[index]
        return self._position(path, index), label

    def _chosen(self) -> tuple[Sequence[int], Sequence[Any]]:
        labels = [label for _, label in self.samples]
        originals = self._original_samples
        if len(self.samples) == len(originals) and all(map(operator.is_, self.samples, originals)):
            return range(len(labels)), labels
        return [self._position(path, at) for at, (path, _) in enumerate(self.samples)], labels

    def _position(self, path: str, guess: int) -> int:
        if 0 <= guess < len(self._original_samples) and self._original_samples[guess][0] == path:
            return guess
        if not self._positions:
            self._positions = {each: at for at, (each, _) in enumerate(self._original_samples)}
        if path not in self._positions:
            raise UsageError(f"{path} is not one of the pictures that {self.root} had when this ImageFolder was opened")
        return self._positions[path]


def _open_or_build(root: str, cache: str | Path | None, choices: BuildChoices, *, allow_empty: bool) -> KeptCache:
    real = os.path.realpath(root)
    kept = Kept(Path(real).name, ["ImageFolder", real, fingerprint(choices.recipe.to_dict())], cache)
    if kept.folder.is_relative_to(real) or Path(os.path.realpath(kept.folder)).is_relative_to(real):
        raise UsageError(
            f"the cache would lie in {kept.folder}, inside of {root}, whose folders are classes: give another folder "
            "as cache="
        )
    folder = list_pictures(real, allow_empty=allow_empty)
    found = kept.open(folder.state, choices.on_error)
    if found is None:
        folder = list_at_rest(real, allow_empty=allow_empty)
        check = functools.partial(check_unchanged, root, folder, allow_empty=allow_empty)
        if choices.on_error == "fail" and len(folder.files) >= LEAST_GROWING:
            return kept.grow(folder.state, functools.partial(PictureFolderSource, real, folder), choices, check)
        found = kept.build(folder.state, PictureFolderSource(real, folder), choices, check)
    return found
