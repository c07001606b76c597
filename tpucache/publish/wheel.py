"""tpucache's own wheel, made from the package that runs: no network, no build tools, the same bytes every time."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

import tpucache
from tpucache.errors import DependencyError

_NAME: Final = "tpucache"
# What pip wrote when it installed, and what tells of that one installation only.
_LOCAL: Final = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")
_MODE: Final = 0o100644 << 16


def wheel_name() -> str:
    """Return the file name of this tpucache's wheel."""
    return f"{_NAME}-{tpucache.__version__}-py3-none-any.whl"


def write_wheel(folder: Path) -> Path:
    """Write this tpucache as a wheel into a folder and return its path; it holds Python alone and fits any machine.

    The package's files are those that run, the metadata those that pip installed; an editable installation serves as
    well. Format: the binary distribution format of the Python packaging guide, version 1.0. Raises DependencyError
    when tpucache was never installed, OSError.
    """
    info = f"{_NAME}-{tpucache.__version__}.dist-info"
    files = dict(_package_files()) | {f"{info}/{name}": data for name, data in _metadata_files()}
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {_NAME} {tpucache.__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ).encode()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    path = folder / wheel_name()
    # Stored, not deflated: compressed bytes differ between releases of zlib.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)  # its default date, 1980-01-01, is the same every time
            member.external_attr = _MODE
            archive.writestr(member, data)
    return path


def _package_files() -> Iterator[tuple[str, bytes]]:
    package = Path(tpucache.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield f"{_NAME}/{path.relative_to(package).as_posix()}", path.read_bytes()


def _metadata_files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the installation's .dist-info that belong into a wheel, METADATA first."""
    found = next((each for each in distributions(name=_NAME) if each.read_text("METADATA")), None)
    if found is None:  # what building leaves in a checkout, an .egg-info, is no installation
        raise DependencyError(
            "tpucache runs from a folder that was never installed, so its metadata is missing: `pip install` it first"
        )
    metadata = found.read_text("METADATA") or ""
    # An editable installation goes on to tell the version it was installed at.
    yield "METADATA", re.sub(r"(?m)^Version: .*$", f"Version: {tpucache.__version__}", metadata, count=1).encode()
    yield from sorted(_others(found))


def _others(found: Distribution) -> Iterator[tuple[str, bytes]]:
    for path in found.files or ():
        if path.parts[0].endswith(".dist-info") and path.name not in (*_LOCAL, "METADATA"):
            yield "/".join(path.parts[1:]), path.read_binary()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
