"""ImageFolder: torchvision's class, reading from a cache that the first use builds."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.adopt.builder import LEAST_GROWING
from tpucache.adopt.kept import BuildChoices, Kept, KeptCache
from tpucache.adopt.picture_folder import PictureFolderSource, check_unchanged, list_at_rest, list_pictures
from tpucache.adopt.pictures import PictureDataset, Size, Transform, to_recipe
from tpucache.errors import UsageError
from tpucache.recipe import Recipe, fingerprint

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError


class ImageFolder(PictureDataset):
    """torchvision's ImageFolder, but each picture is decoded and resized only once: `picture, label = dataset[0]`.

    `classes`, `class_to_idx`, `samples`, `imgs` and `targets` are those of torchvision, in the same order. As there,
    the list `samples` decides what the data set holds: you may shorten, reorder or relabel it.
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
        """Open the cache of a folder with one subfolder for each class. Build the cache if there is none for these
        files.

        `transform` is called with a PIL image (RGB, of the cached size), and its result is the picture. Without it, the
        picture is a tensor, uint8 (3, height, width). `target_transform` is called with the number of the class.

        `size` is the size of the cached pictures in pixels, one number or (height, width): each picture is scaled until
        it covers that size, and its middle is cut out. A `recipe` can say more about how pictures are stored; then its
        own size is used.

        The cache is stored below `cache`; by default below TPUCACHE_DIR, or `tpucache` in the user's cache folder. It
        belongs to this path and recipe, and to the names, sizes and times of the files: after a picture was added,
        removed or replaced, a new cache is built. `jobs` processes build it, by default one for each core. A build that
        was killed is continued.

        A folder of 256 pictures or more is read while its cache is built (see `open_or_build`): reading a picture waits
        until it is built, and raises the error if that fails. Smaller folders are built before this returns.

        A file that cannot be decoded is an error. With `on_error="skip"` such files are left out of the samples, and
        the whole cache is built before this returns. A folder without a picture is an error, too; with `allow_empty` it
        is a class without samples.

        Raises UsageError, SourceError, SampleError for a picture that cannot be used, RecipeError, and BuildError where
        the cache cannot be written.
        """
        choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
        self.root = os.path.expanduser(root)  # noqa: PTH111  # a Path would change `photos/` and `./photos`
        kept = _open_or_build(self.root, cache, choices, allow_empty=allow_empty)
        super().__init__(kept, transform, target_transform)
        paths = [os.path.join(self.root, path) for path in self._cached.table.paths]
        self.samples: list[tuple[str, Any]] = list(zip(paths, self.targets, strict=True))
        self.imgs = self.samples
        self._kept_samples = tuple(self.samples)  # in the order of the cache, even if the caller changes the list
        self._places: dict[str, int] = {}  # position by path, filled once the caller has changed the samples

    def __len__(self) -> int:
        return len(self.samples)

    def _entry(self, index: int) -> tuple[int, Any]:
        path, label = self.samples[index]
        return self._place(path, index), label

    def _chosen(self) -> tuple[Sequence[int], Sequence[Any]]:
        labels = [label for _, label in self.samples]
        if len(self.samples) == len(self._kept_samples) and all(map(operator.is_, self.samples, self._kept_samples)):
            return range(len(labels)), labels
        return [self._place(path, at) for at, (path, _) in enumerate(self.samples)], labels

    def _place(self, path: str, likely: int) -> int:
        """Return the position in the cache of the picture at a path. It is most likely its position among the samples.

        Raises UsageError for a path that was not in the folder.
        """
        if 0 <= likely < len(self._kept_samples) and self._kept_samples[likely][0] == path:
            return likely
        if not self._places:
            self._places = {each: at for at, (each, _) in enumerate(self._kept_samples)}
        if path not in self._places:
            raise UsageError(f"{path} is not one of the pictures that {self.root} had when this ImageFolder was opened")
        return self._places[path]


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
