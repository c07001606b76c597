"""Builds the sdist and the wheel of what is committed, and compares their contents with it.

The sdist is the tracked files and what setuptools adds; the wheel is the package alone. Needs a package index, or pip's
configuration of one, for the build's own tools.

    python -m scripts.checks build
    python -m scripts.checks build --keep dist      # both are copied there once they are compared
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from scripts.commands import make_parser
from tpucache import __version__

NAME = f"tpucache-{__version__}"
ADDED = ("PKG-INFO", "setup.cfg", "tpucache.egg-info/")


def differ(what: str, found: set[str], expected: set[str]) -> None:
    """End the check when two sets of names differ."""
    if found != expected:
        sys.exit(f"build: {what} lacks {sorted(expected - found)} and has {sorted(found - expected)} besides")
    print(f"{what}: {len(found)} files, as they should be")


def members(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def main() -> None:
    """Run the check."""
    parser = make_parser(__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy sdist and wheel into this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        tree = place / "tree"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        tracked = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
        subprocess.run([sys.executable, "-m", "build", "--outdir", place, tree], check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(place / f"{NAME}.tar.gz") as sdist:
            names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
        differ("sdist", {name for name in names if not name.startswith(ADDED)}, tracked)
        wheel = members(place / f"{NAME}-py3-none-any.whl")
        package = {name for name in tracked if name.startswith("tpucache/")}
        metadata = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
        metadata |= {f"{NAME}.dist-info/{name}" for name in ("entry_points.txt", "top_level.txt", "licenses/LICENSE")}
        differ("wheel", set(wheel), package | metadata)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            for built in (f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"):
                shutil.copy(place / built, options.keep)
    print("build: sdist and wheel hold what is committed")
