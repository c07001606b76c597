"""Wheels of the packages that a cache's codecs need, for a machine without a network: downloaded by pip, as files."""

from __future__ import annotations

import email.parser
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tpucache.errors import DependencyError, PublishError
from tpucache.publish.rules import check_tag
from tpucache.redact import redact
from tpucache.store.codecs import CODECS
from tpucache.store.files import open_file
from tpucache.store.manifest import Manifest

#: All packages that a codec may need.
PACKAGES: Final = tuple(sorted({codec.package for codec in CODECS.values() if codec.package}))

_PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
_PIP_OPTIONS: Final = ("--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--retries", "1")
_LICENSE: Final = "License :: "


@dataclass(frozen=True)
class PackageWheel:
    """A wheel: its file name, its bytes, and the licence that its metadata states."""

    name: str
    data: bytes = field(repr=False)
    license_name: str

    @property
    def package(self) -> str:
        """The package that it installs."""
        return self.name.partition("-")[0]

    def to_dict(self) -> dict[str, str]:
        """Return all but the bytes as JSON values, with their SHA-256."""
        return {"name": self.name, "license": self.license_name, "sha256": hashlib.sha256(self.data).hexdigest()}


def needed_packages(manifest: Manifest) -> tuple[str, ...]:
    """Return the optional packages that reading a cache needs."""
    packages = {CODECS[each.codec].package for each in manifest.fields}
    return tuple(package for package in PACKAGES if package in packages)


def download_wheels(packages: Sequence[str], tag: str) -> list[PackageWheel]:
    """Return the newest wheels of packages for a Python on Linux, x86-64, as pip finds them here.

    Raises UsageError for a tag that is none, PublishError where pip finds no wheel, DependencyError without pip.
    """
    version = f"3.{check_tag(tag).removeprefix('cp3')}"
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as folder:
        for package in packages:
            command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--python-version", version]
            command += ["--abi", tag, *platforms, "--dest", folder, package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # no shell, our own words
            if done.returncode:
                raise _failure(package, tag, done.stderr)
        return [_read_wheel(path) for path in sorted(Path(folder).iterdir())]


def _failure(package: str, tag: str, errors: str) -> PublishError | DependencyError:
    if "No module named pip" in errors:
        return DependencyError("--wheels needs pip, which this Python does not have: `python -m ensurepip`")
    lines = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
    reason = redact(lines[-1].removeprefix("ERROR: ")) if lines else "pip failed"
    return PublishError(
        f"there is no wheel of {package} for {tag} on Linux x86-64: {reason}. Is there such a Python, and a network? "
        "pip also takes wheels from the folder that PIP_FIND_LINKS names"
    )


def _read_wheel(path: Path) -> PackageWheel:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return PackageWheel(path.name, path.read_bytes(), _license(archive.read(metadata).decode()))


def _license(metadata: str) -> str:
    """Return the licence that the metadata of a wheel states."""
    headers = email.parser.HeaderParser().parsestr(metadata)
    stated = headers.get("License-Expression") or headers.get("License") or ""
    classifiers = [name for name in headers.get_all("Classifier", []) if name.startswith(_LICENSE)]
    lines = [*stated.splitlines(), *(name.rpartition(" :: ")[2] for name in classifiers)]
    return lines[0] if lines else "not stated"
