"""Which libraries are installed, found without importing them, and what each is for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Final

#: What tpucache uses, by the names of the distributions, in the order of its own parts.
_USES: Final = {
    "numpy": "everything",
    "torch": "training; batches as tensors, without it as arrays",
    "jax": "",
    "torch_xla": "training on a TPU",
    "libtpu": "reaching a TPU",
    "torch_tpu": "",
    "pillow": "warmup, preview, report, PNG records",
    "simplejpeg": "decoding JPEG fast",
    "cykooz-resizer": "resizing fast in warmup",
    "llvmlite": "copying and unpacking batches fast",
    "zstandard": "zstd records",
    "lmdb": "warmup",
    "joblib": "warmup",
    "tqdm": "warmup's progress bar",
    "albumentations": "augmented variants in warmup",
    "albumentationsx": "",
    "PyYAML": "augmentations in YAML files",
    "google-crc32c": "TFRecord sources",
    "protobuf": "TFRecord sources",
}


@dataclass(frozen=True)
class Library:
    """A library's version, None where it is not installed, and what tpucache needs it for."""

    name: str
    version: str | None
    needed_for: str


def find_libraries() -> tuple[Library, ...]:
    """Return all libraries that tpucache may use. One that nothing uses is left out where it is not installed."""
    found = (Library(name, _version(name), use) for name, use in _USES.items())
    return tuple(library for library in found if library.version or library.needed_for)


def find_decoders() -> dict[str, str]:
    """Return the versions of simplejpeg and, by what they decode, of Pillow's libraries; "" for what is not there."""
    decoders = {"simplejpeg": _version("simplejpeg") or ""}
    try:
        from PIL import features
    except ImportError:
        return {**decoders, "JPEG": "", "PNG": ""}
    names = {"JPEG": ("libjpeg_turbo", "jpg"), "PNG": ("zlib_ng", "zlib"), "WebP": ("webp",), "AVIF": ("avif",)}
    names |= {"TIFF": ("libtiff",), "JPEG 2000": ("jpg_2000",)}
    for kind, parts in names.items():
        decoders[kind] = next((version for part in parts if (version := _feature(features, part))), "")
    return decoders


def _feature(features: object, part: str) -> str:
    try:
        return str(features.version(part) or "")  # type: ignore[attr-defined]  # a module, imported by the caller
    except ValueError:  # a part that this Pillow does not know
        return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
