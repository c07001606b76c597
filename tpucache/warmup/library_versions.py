"""The versions of Python, tpucache and the libraries that decide the bytes of records."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from tpucache.plugins import package_versions
from tpucache.version import __version__
from tpucache.warmup.records.presize import image_versions

_LIBRARIES: Final = ("numpy", "lmdb", "joblib")
_OPTIONAL: Final = ("albumentations", "pillow-heif", "pydicom")
#: Listed only if they are installed, because each replaces another library.
_REPLACEMENTS: Final = ("nrtk-albumentations",)


def versions() -> dict[str, str]:
    """Return the installed versions of Python, tpucache, libraries and plugins by name."""
    optional = {name: _version(name) for name in (*_OPTIONAL, *_REPLACEMENTS)}
    return {
        "tpucache": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        **{name: value for name, value in optional.items() if value or name in _OPTIONAL},
        **image_versions(),
        **package_versions("tpucache.codecs", "tpucache.sources"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def version_differences(before: Mapping[str, Any]) -> list[str]:
    """Describe versions that differ from `before`, as `pillow 12.0.0, now 12.1.0` or `simplejpeg none, now 1.9.0`."""
    now = versions()
    pairs = {name: (before.get(name) or "none", now.get(name) or "none") for name in {**before, **now}}
    return [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
