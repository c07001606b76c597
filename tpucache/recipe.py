"""Recipe: the settings by which records are built, as a manifest stores them, and the fingerprint of a recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from tpucache.errors import FormatError, RecipeError
from tpucache.geometry import Coordinates, Fit
from tpucache.options import option
from tpucache.store.codecs import ARRAY_CODECS, CODECS, IMAGE_CODECS
from tpucache.store.codecs.coefficients import CHROMA
from tpucache.store.fields import IMAGE, Field
from tpucache.store.history import load_version, split_version
from tpucache.store.manifest import Manifest
from tpucache.text import DISTINCT, Limit, between, check_types, matching

Mode = Literal["rgb", "grey", "keep"]
MaskValues = Literal["keep", "scale"]

MAX_SIDE: Final = 16384
MAX_VARIANTS: Final = 1000

#: Settings that say how many records are built, and in how many files. They do not change the records themselves, so
#: changing them rebuilds nothing.
EXTENT: Final = ("variants", "max_blocks", "shard_mb")
#: Settings that do not change records: the extent, and which images are refused.
_OF_NO_RECORD: Final = (*EXTENT, "max_pixels")

_Colour = Annotated[str, matching("[0-9a-f]{6}", "a colour as rrggbb")]
_COLOURS: Final = Limit(lambda colours: 1 < len(colours) <= 256, "one of 2 to 256 colours")

#: Settings that must be equal in caches that are used together: the form of images, and how images are stored.
SHARED: Final = (
    "size",
    "fit",
    "codec",
    "quality",
    "chroma",
    "mode",
    "max_boxes",
    "mask_values",
    "mask_colours",
)

#: A setting with this value is left out of fingerprints, so that recipes from before the setting existed keep theirs.
_ADDED: Final[Mapping[str, Any]] = {
    "coordinates": None,
    "white_level": None,
    "chroma": None,
    "mode": "rgb",
    "max_pixels": None,
    "mask_values": "keep",
    "mask_colours": None,
}


@dataclass(frozen=True)
class Recipe:
    """How images are brought to one size, augmented and encoded.

    `size` is (height, width) in pixels, or one number for both. `fit` says how an image of another shape gets this
    size: `crop` scales the image until it covers the size and cuts out its middle, `pad` scales it until it lies within
    the size and adds black, `stretch` scales height and width separately. `variants` is the number of augmented
    variants, in addition to the clean one. `augment` is a preset's name, a YAML or JSON file of
    `albumentations.to_dict`, or `module:name` of a callable. `quality` is 1-100 for jpeg (default 95), dct-zstd and
    dct-lz4 (default 90), or the compression level of png and zstd. `chroma` is the resolution of the colours in
    dct-zstd and dct-lz4: "420" (default) or "444". `shard_mb` is the target size of a shard in MiB. `exact` decodes
    JPEG files at full scale; otherwise they are decoded at the smallest scale of at least twice the size. `max_boxes`
    is the number of boxes that a record has room for, if the source has boxes. `max_blocks` limits the number of shards
    of each variant; if it is too low for `shard_mb`, the shards become larger.

    `coordinates` says what masks, boxes and keypoints refer to: the image as `displayed`, turned by its EXIF
    orientation, or as `stored`. With None, if the two differ, samples with boxes or keypoints are refused, and samples
    with a mask whose size does not show which is meant. `white_level` is the value of white in images of more than 8
    bits; with None, images are refused whose values do not show which value is white.

    `mode` is the form of images: `rgb`, `grey` (one channel), or `keep`, which keeps 1 to 16 channels of uint8, uint16,
    int16 or float32, in the codecs raw and zstd. `max_pixels` is the largest source image, in pixels; None is Pillow's
    limit, about 89 million. `mask_values` "scale" turns black and white masks into 0 and 1. "keep" takes a mask's
    values as classes; None does so, too, but refuses masks whose values do not look like classes. `mask_colours` are
    the classes' colours in RGB masks, as hexadecimal rrggbb.

    Raises RecipeError for values that no cache can have.
    """

    size: int | tuple[int, int] = option(224, "height and width of every cached image, in pixels", metavar="N|HxW")
    fit: Fit = option("crop", "how an image of another shape gets the cached size: cropped, padded or stretched")
    variants: Annotated[int, between(0, MAX_VARIANTS)] = option(
        0, "augmented variants of each image, in addition to the clean one", metavar="K"
    )
    augment: str = option(
        "standard",
        "flip, affine, standard or strong; a YAML or JSON file of albumentations.to_dict; or your own function",
        metavar="PRESET|FILE|module:name",
        code="",
    )
    seed: Annotated[int, between(0, 2**63 - 1)] = option(0, "seed of the augmentation", metavar="N")
    codec: str = option("raw", "how images are stored; raw and zstd also store arrays", choices=IMAGE_CODECS)
    quality: int | None = option(
        None, "quality of jpeg and dct (1 to 100), or compression level of png or zstd", metavar="Q"
    )
    chroma: str | None = option(
        None,
        "resolution of the colours in dct-zstd and dct-lz4: 420 is half in both directions, as in most JPEG files; "
        "444 is full, for drawings and text",
        choices=CHROMA,
    )
    shard_mb: Annotated[int, between(1, 1 << 16)] = option(128, "target size of a shard, in MiB", metavar="N")
    exact: bool = option(False, "decode whole images, never at a reduced scale")
    max_boxes: Annotated[int, between(1, 1 << 16)] = option(
        100, "boxes that a record has room for", metavar="N", minimum=1
    )
    max_blocks: Annotated[int, between(1, 1 << 20)] | None = None
    coordinates: Coordinates | None = option(
        None,
        "what masks, boxes and keypoints refer to where EXIF turns an image: the image as displayed or as stored; "
        "without this option, such samples may be refused",
    )
    white_level: Annotated[int, between(1, 2**31 - 1)] | None = option(
        None, "the value that is white in images of more than 8 bits, such as 4095", metavar="N", minimum=1
    )

    mode: Mode = option("rgb", "form of the images: colours, one grey channel, or keep their channels and bit depth")
    max_pixels: Annotated[int, between(1, 2**31 - 1)] | None = option(
        None, "refuse images of more than N pixels; the default is about 89 million", metavar="N", minimum=1
    )
    mask_values: MaskValues | None = option(
        None,
        "scale: the values 0 and 255 or 65535 of black and white masks become 0 and 1; keep: values are classes; "
        "without this option, values are kept, and masks whose values do not look like classes are refused",
    )
    mask_colours: Annotated[tuple[_Colour, ...], _COLOURS, DISTINCT] | None = option(
        None, "a .csv of red, green, blue in the order of the classes: RGB masks become class numbers", metavar="FILE"
    )

    def __post_init__(self) -> None:
        size = tuple(self.size) if isinstance(self.size, (tuple, list)) else (self.size, self.size)
        if len(size) != 2 or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in size):
            raise RecipeError(f"size is one or two whole numbers from 1 to {MAX_SIDE}, not {self.size!r}")
        object.__setattr__(self, "size", size)
        if self.codec not in IMAGE_CODECS:  # the list of names is made only for the error
            self._check("codec", False, "one of " + ", ".join(IMAGE_CODECS))
        chromas, (low, high) = CODECS[self.codec].chromas, CODECS[self.codec].quality_range or (1, 0)
        for name, allowed, text in (
            ("chroma", chromas, f"one of {', '.join(chromas)}"),
            ("quality", range(low, high + 1), f"{low} to {high}"),
        ):
            value = getattr(self, name)
            if value is not None and not allowed:
                raise RecipeError(f"{name} is no setting of the codec {self.codec}: leave it out")
            is_fine = value is None or (value in allowed and not isinstance(value, (bool, float)))
            self._check(name, is_fine, f"{text} for {self.codec}")
        try:
            check_types(vars(self), Recipe, "recipe")
        except FormatError as error:
            raise RecipeError(str(error)) from None
        if self.mode == "keep" and not CODECS[self.codec].holds_any_array:
            self._check("codec", False, f"{' or '.join(ARRAY_CODECS)} for the mode keep")
        if self.mask_colours is not None:
            object.__setattr__(self, "mask_colours", tuple(self.mask_colours))
        try:
            if self.mode == "grey":
                CODECS[self.codec].check(self.image_field())
        except FormatError as error:
            raise RecipeError(
                f"the mode grey needs a codec that stores images of one channel, not {self.codec!r}: {error}"
            ) from error

    @property
    def height(self) -> int:
        """The number of rows of pixels in each cached image."""
        return self._size[0]

    @property
    def width(self) -> int:
        """The number of columns of pixels in each cached image."""
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def image_field(self) -> Field:
        """Return the field in which records store images of the modes rgb and grey; it does not fit the mode keep."""
        codec, channels = CODECS[self.codec], 1 if self.mode == "grey" else 3
        return Field(
            IMAGE,
            self.codec,
            "|u1",
            (self.height, self.width, channels),
            quality=None if codec.default_quality is None else self.quality or codec.default_quality,
            chroma=(self.chroma or codec.chromas[0]) if codec.chromas else None,
            packing=codec.packing,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a dictionary of JSON values: the size as [height, width], other tuples as lists."""
        colours = None if self.mask_colours is None else list(self.mask_colours)
        # How masks are refused does not change records.
        decided = {"size": list(self._size), "mask_values": self.mask_values or "keep", "mask_colours": colours}
        return {**dataclasses.asdict(self), **decided}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Recipe:
        """Return the recipe from a dictionary that `to_dict` has made; unknown keys are ignored.

        Raises RecipeError for a value that a recipe cannot have, and if `size` is missing.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in known}
            if values.get("mask_values") == "keep":  # to_dict writes this for None, too
                values["mask_values"] = None
            return cls(**{**values, "size": tuple(content["size"])})
        except (TypeError, KeyError) as error:
            raise RecipeError(f"the recipe in the manifest cannot be read: {error!r}. Build the cache anew") from error

    @classmethod
    def like(cls, cache: str | Path, **options: Any) -> Recipe:
        """Return a recipe whose records can be used together with those of the finished cache `cache`.

        The settings in SHARED, such as size, fit, codec and quality, are the cache's; `options` are the other settings.
        Raises RecipeError for an option that differs from the cache's setting, and the errors of `load_version`.
        """
        recipe = cls.from_dict(load_version(*split_version(cache)).recipe)
        kept = {name: getattr(recipe, name) for name in SHARED}
        chosen = cls(**{**kept, **options, "codec": recipe.codec})
        before, asked = recipe.to_dict(), {**chosen.to_dict(), "codec": options.get("codec", recipe.codec)}
        changed = [name for name in SHARED if asked[name] != before[name]]
        if changed:
            texts = [f"{name} {before[name]}, not {asked[name]}" for name in changed]
            raise RecipeError(
                f"the records of {cache} have {'; '.join(texts)}: leave out {', '.join(changed)}, or --like"
            )
        return chosen

    def _check(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:
            raise RecipeError(f"{name} is {allowed}, not {getattr(self, name)!r}")


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """Return the SHA-256, as hexadecimal text, of those settings of a recipe that change records.

    `recipe` is the dictionary from `Recipe.to_dict`. Recipes that make equal records have the same fingerprint.
    """
    content = {
        name: value
        for name, value in recipe.items()
        if name not in _OF_NO_RECORD and (name not in _ADDED or value != _ADDED[name])
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def image_settings(manifest: Manifest) -> dict[str, str]:
    """Return the settings `fit` and `mode`, with which the images of a cache were made; {} without images."""
    if all(field.name != IMAGE for field in manifest.fields):
        return {}
    found = {**_ADDED, **manifest.recipe}
    return {name: value for name in ("fit", "mode") if isinstance(value := found.get(name), str)}


def differing_images(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, str]:
    """Return the settings that differ between two results of `image_settings`, as options of warmup: `--fit crop`.

    The two texts are empty if no setting differs, or if one of the two has none.
    """
    names = [name for name, value in first.items() if second.get(name, value) != value]
    one, other = (" ".join(f"--{name} {settings[name]}" for name in names) for settings in (first, second))
    return one, other


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each setting that differs between two recipes, as text such as `seed 0, now 1`.

    `before` and `now` are dictionaries from `Recipe.to_dict`. Settings that do not change records are left out.
    """
    before, now = {**_ADDED, **before}, {**_ADDED, **now}
    names = sorted({*before, *now}.difference(_OF_NO_RECORD))
    return [
        f"{name} {before.get(name)!r}, now {now.get(name)!r}" for name in names if before.get(name) != now.get(name)
    ]
