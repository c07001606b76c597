"""Wheels that are published with a cache, so that machines without a network can install tpucache and other packages.

tpucache's own wheel is made from the running package, without build tools, and has the same bytes every time. It holds
the modules in `_ROOTS`, all modules of tpucache that these import directly or indirectly, and the files in `_DATA`. A
string such as "tpucache.training.page:report_run" counts as an import. pip downloads the wheels of other packages.
"""

from __future__ import annotations

import ast
import base64
import email.parser
import functools
import hashlib
import io
import itertools
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from tpucache import version
from tpucache.errors import DependencyError, PublishError
from tpucache.publish.rules import check_tag
from tpucache.store.codecs import CODECS
from tpucache.store.files import open_file
from tpucache.store.manifest import Manifest
from tpucache.text import redact

_NAME: Final = "tpucache"
# pip writes these files when it installs. They describe that one installation only.
_LOCAL: Final = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")
_MODE: Final = 0o100644 << 16
# The package's files that are not modules, as `pyproject.toml` lists them.
_DATA: Final = ("py.typed", "*/templates/[!._]*")
# Users import these, and `python -m tpucache` runs `__main__`.
_ROOTS: Final = ("tpucache", "tpucache.__main__", "tpucache.jax")
# A string that names a module, or a name in a module. The tables of codecs and commands hold such strings.
_REFERENCE: Final = re.compile(rf"({_NAME}(?:\.\w+)+)(?::\w+)?")

_PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
_PIP_OPTIONS: Final = ("--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--retries", "1")
_LICENSE: Final = "License :: "


def wheel_name() -> str:
    """Return the file name of the running tpucache's wheel."""
    return f"{_NAME}-{version.__version__}-py3-none-any.whl"


def wheel_bytes() -> bytes:
    """Return the bytes of a wheel of the running tpucache. It has no compiled code, so it fits any machine.

    The modules are those of the running package. The metadata come from the installation, which may be editable. The
    format is the binary distribution format of the Python packaging guide, version 1.0.

    Raises DependencyError when tpucache was never installed, OSError when a file cannot be read.
    """
    info = f"{_NAME}-{version.__version__}.dist-info"
    files = dict(_package_files()) | {f"{info}/{name}": data for name, data in _metadata_files()}
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {_NAME} {version.__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ).encode()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    target = io.BytesIO()
    # Stored, not deflated, because compressed bytes differ between releases of zlib.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)  # its default date, 1980-01-01, is the same every time
            member.external_attr = _MODE
            archive.writestr(member, data)
    return target.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Yield the path in the wheel, and the bytes, of each of the package's files: modules, stubs (.pyi), data."""
    package = Path(version.__file__).parent
    modules = _modules(package).values()
    paths = [
        *itertools.chain.from_iterable(map(package.glob, _DATA)),
        *modules,
        *(path.with_suffix(".pyi") for path in modules),
    ]
    for path in sorted(path for path in paths if path.is_file()):
        yield f"{_NAME}/{path.relative_to(package).as_posix()}", path.read_bytes()


@functools.cache
def _modules(package: Path) -> dict[str, Path]:
    """Return the files, by module name, of `_ROOTS` and all modules that these import, directly or indirectly.

    Imports inside functions count, too.
    """
    found: dict[str, Path] = {}
    waiting = list(_ROOTS)
    while waiting:
        name = waiting.pop()
        path = _module_file(package, name)
        if path is not None and name not in found:
            found[name] = path
            for each in (path, path.with_suffix(".pyi")):
                waiting += _imported(ast.parse(each.read_bytes())) if each.is_file() else ()
            waiting.append(name.rpartition(".")[0])
    return found


def _module_file(package: Path, name: str) -> Path | None:
    place = package.parent.joinpath(*name.split(".")) if name.partition(".")[0] == _NAME else package / "nothing"
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names that a module imports. `tree` is the module's syntax tree.

    The names in strings such as "module:name" count as imported. Some of the names are those of functions or classes,
    not of modules.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = _REFERENCE.fullmatch(node.value)
            yield from named.groups() if named else ()


def _metadata_files() -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of each file of the installation's .dist-info folder that a wheel needs.

    METADATA comes first. Raises DependencyError if tpucache was never installed.
    """
    found = next((each for each in distributions(name=_NAME) if each.read_text("METADATA")), None)
    if found is None:  # an .egg-info, which building leaves in a checkout, is not an installation
        raise DependencyError(
            "tpucache runs from a folder that was never installed, so its metadata is missing: `pip install` it first"
        )
    metadata = found.read_text("METADATA") or ""
    # The METADATA of an editable installation may still state an earlier version.
    yield "METADATA", re.sub(r"(?m)^Version: .*$", f"Version: {version.__version__}", metadata, count=1).encode()
    yield from sorted(_others(found))


def _others(found: Distribution) -> Iterator[tuple[str, bytes]]:
    for path in found.files or ():
        if path.parts[0].endswith(".dist-info") and path.name not in (*_LOCAL, "METADATA"):
            yield "/".join(path.parts[1:]), path.read_binary()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class PackageWheel:
    """A wheel: its file name, its bytes, and the licence that its metadata states."""

    name: str
    data: bytes = field(repr=False)
    license_name: str

    @property
    def package(self) -> str:
        """The package that the wheel installs."""
        return self.name.partition("-")[0]

    def to_dict(self) -> dict[str, str]:
        """Return the wheel's name, its licence and the SHA-256 of its bytes, as JSON values."""
        return {"name": self.name, "license": self.license_name, "sha256": hashlib.sha256(self.data).hexdigest()}


def needed_packages(manifest: Manifest) -> tuple[str, ...]:
    """Return the optional packages that reading a cache needs."""
    packages = {CODECS[each.codec].package for each in manifest.fields}
    return tuple(sorted(package for package in packages if package))


def download_wheels(packages: Sequence[str], tag: str) -> list[PackageWheel]:
    """Download the newest wheel of each package for a Python version on Linux x86-64, with pip.

    `tag` names the Python version, such as "cp312". Raises UsageError for a malformed `tag`, PublishError if pip finds
    no wheel, DependencyError without pip.
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
        f"there is no wheel of {package} for {tag} on Linux x86-64: {reason}. Check that this Python version exists, "
        "and the network; pip also takes wheels from the folder that PIP_FIND_LINKS names"
    )


def _read_wheel(path: Path) -> PackageWheel:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return PackageWheel(path.name, path.read_bytes(), _license(archive.read(metadata).decode()))


def _license(metadata: str) -> str:
    headers = email.parser.HeaderParser().parsestr(metadata)
    stated = headers.get("License-Expression") or headers.get("License") or ""
    classifiers = [name for name in headers.get_all("Classifier", []) if name.startswith(_LICENSE)]
    lines = [*stated.splitlines(), *(name.rpartition(" :: ")[2] for name in classifiers)]
    return lines[0] if lines else "not stated"
