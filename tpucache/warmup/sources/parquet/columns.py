"""The columns of a parquet file, by their types, their names and what Hugging Face's metadata says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tpucache.errors import SourceError
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.table import PATH_NAMES, TableOptions
from tpucache.warmup.sources.values import LABEL_NAMES

_FEATURES: Final = b"huggingface"


@dataclass(frozen=True)
class Roles:
    """Which column is what: the image and its mask ("" where there is none), labels, the fold, arrays and the rest.

    `classes` are the names of the classes where the metadata has them. `unread` are columns of kinds that are not kept.
    """

    image: str
    mask: str
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    arrays: tuple[str, ...]
    kept: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def heavy(self) -> tuple[str, ...]:
        """The columns that are read sample by sample."""
        return tuple(name for name in (self.image, self.mask, *self.arrays) if name)


def find_roles(schema: Any, options: TableOptions, where: str) -> Roles:
    """Return what the columns of an Arrow schema are. Raises SourceError, with `where`, for what is ambiguous."""
    features = _features(schema)
    types = {field.name: field.type for field in schema if not options.is_dropped(field.name)}
    for name in (options.path_col, options.mask_col, options.fold_col, *options.label_cols):
        if name is not None and name not in types:
            raise SourceError(f"{where} has no column {name!r}: there are {', '.join(map(repr, types))}")
    images = [name for name in types if _is_image(types[name])]
    mask = options.mask_col or (MASK if MASK in images else "")
    image = options.path_col or _image([name for name in images if name != mask], types, where)
    labels = options.label_cols or _labels(types, features, {image, mask, options.fold_col}, where)
    free = [name for name in types if name not in {image, mask, *labels, options.fold_col}]
    wanted = [name for name in free if options.is_kept(name)]
    arrays = tuple(name for name in wanted if _is_numbers(types[name]))
    kept = tuple(name for name in wanted if _is_plain(types[name]))
    return Roles(
        image,
        mask,
        tuple(labels),
        _class_names(features, labels),
        arrays,
        kept,
        tuple(name for name in wanted if name not in (*arrays, *kept)),
    )


def _features(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's metadata says of each column; nothing where there is none, or it cannot be read."""
    try:
        features = json.loads((schema.metadata or {})[_FEATURES])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _is_image(kind: Any) -> bool:
    """Return whether a column holds encoded images: bytes, or Hugging Face's struct of bytes and a path."""
    from pyarrow import types

    is_struct = types.is_struct(kind) and "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    return bool(is_struct or types.is_binary(kind) or types.is_large_binary(kind))


def _image(images: Sequence[str], types: Mapping[str, Any], where: str) -> str:
    if IMAGE in images or len(images) == 1:
        return IMAGE if IMAGE in images else images[0]
    if images:
        raise SourceError(f"{where} has several columns of images, {', '.join(images)}: name one with --path-col")
    paths = (name for known in PATH_NAMES for name in types if name.lower() == known and _is_text(types[name]))
    has_numbers = any(map(_is_numbers, types.values()))
    return next((name for name in paths if not (has_numbers and name.lower() == "id")), "")


def _labels(types: Mapping[str, Any], features: Mapping[str, Any], used: set[str | None], where: str) -> Sequence[str]:
    free = [name for name in types if name not in used]
    named = [name for name in LABEL_NAMES if name in free]
    classes = [name for name in free if _names_of(features.get(name))]
    if len(classes) > 1 and not named:
        raise SourceError(f"{where} has several columns of classes, {', '.join(classes)}: name one with --label-col")
    return (named or classes)[:1]


def _class_names(features: Mapping[str, Any], labels: Sequence[str]) -> tuple[str, ...]:
    return _names_of(features.get(labels[0])) if len(labels) == 1 else ()


def _names_of(feature: Any) -> tuple[str, ...]:
    """Return the class names of a feature, or of the items of a feature that is a list of classes."""
    for part in _parts(feature):
        names = part.get("names")
        if (
            part.get("_type") == "ClassLabel"
            and isinstance(names, list)
            and all(isinstance(name, str) for name in names)
        ):
            return tuple(names)
    return ()


def _parts(feature: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    if isinstance(feature, dict):
        yield feature
        if isinstance(feature.get("feature"), dict):
            yield feature["feature"]


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_plain(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    return _is_text(kind) or bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _is_numbers(kind: Any) -> bool:
    """Return whether a column holds lists of numbers, or lists of such lists."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)  # Hugging Face's arrays are an extension type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        return _is_numbers(inner) or (_is_plain(inner) and not _is_text(inner))
    return False
