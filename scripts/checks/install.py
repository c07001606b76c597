"""Builds sdist and wheel, installs them into clean environments, and tries there what each is for.

The environments have numpy alone; numpy and torch; numpy and JAX; and everything. Their libraries are links to those
installed here, so that nothing is downloaded but the build's own tools. What README installs, from an index, is the
subject of `page_blocks`.

    python -m scripts.checks install
    python -m scripts.checks install numpy all
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from scripts.checks.offline import TRAIN, make_cache
from scripts.commands import CommandError, make_parser
from scripts.environments import Environment, Environments

READ: Final = """
import importlib.util, sys
import numpy as np
import tpucache
from tpucache import CachedDataset, CachedLoader, verify_cache

cache, *absent = sys.argv[1:]
assert "site-packages" in tpucache.__file__, tpucache.__file__
found = [name for name in absent if importlib.util.find_spec(name) is not None]
assert not found, f"{found} can be imported"
assert verify_cache(cache) == []
data = CachedDataset(cache, variant="epoch")
batches = list(CachedLoader(data, 32, shuffle=True))
assert sum(len(labels) for _, labels in batches) == len(data)
print("read", len(data), "samples as", type(batches[0][0]).__name__)
"""

FEED: Final = """
import sys
from tpucache import CachedDataset, CachedLoader
from tpucache.jax import feed

data = CachedDataset(sys.argv[1])
assert sum(len(labels) for _, labels in feed(CachedLoader(data, 24))) == len(data)
print("fed", len(data), "samples to JAX")
"""

PUBLISH: Final = ("--id", "ann/installed", "--title", "An install check", "--license", "other", "--dry-run")


class Kind(NamedTuple):
    """An environment: the libraries in it, or () for all of them, and what must not be there."""

    libraries: tuple[str, ...]
    absent: tuple[str, ...]


WARMUP: Final = ("PIL", "lmdb", "joblib", "albumentations", "tqdm")
KINDS: Final = {
    "numpy": Kind(("numpy",), ("torch", "jax", *WARMUP)),
    "torch": Kind(("numpy", "torch"), ("jax", "torch_xla", *WARMUP)),
    "jax": Kind(("numpy", "jax"), ("torch", *WARMUP)),
    "all": Kind((), ()),
}


def try_in(name: str, python: Path, cache: Path, place: Path) -> None:
    """Run what an environment is for. Raises CalledProcessError."""
    command = [python.with_name("tpucache")]
    environment = {"PATH": os.defpath, "HOME": str(place), "PYTHONNOUSERSITE": "1"}

    def run(*words: str | Path) -> None:
        subprocess.run(words, env=environment, cwd=place, check=True, timeout=600, stdout=subprocess.DEVNULL)

    run(*command, "--version")
    run(python, "-c", READ, cache, *KINDS[name].absent)
    run(*command, "inspect", cache)
    run(*command, "verify", cache)
    if name in ("jax", "all"):
        run(python, "-c", FEED, cache)
    if name == "torch":
        run(*command, "train", cache, "--run", place / "run", *TRAIN)
        run(*command, "predict", place / "run", cache, "-o", place / "predictions.csv", "--backend", "torch")
    if name == "all":
        run(*command, "warmup", place / "photos", place / "again", "--size", "32", "--jobs", "1")
        run(*command, "publish", place / "again", *PUBLISH, "--out", place / "published")
    print(f"install: {name}: as it should be", flush=True)


def check(place: Path, kinds: Sequence[str]) -> None:
    """Build, install and try. Raises CommandError, CalledProcessError."""
    subprocess.run([sys.executable, "-m", "scripts.checks", "build", "--keep", place / "dist"], check=True, timeout=600)
    (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    cache = make_cache(place)
    environments = Environments(place / "environments")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]

    def install(python: Path, built: Path) -> None:
        options = ["install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
        subprocess.run([*pip, python, *options, built], check=True, timeout=600)

    for name in kinds:
        kind = KINDS[name]
        python = environments.prepare(Environment(name, links=kind.libraries, inherits=not kind.libraries))
        install(python, wheel)
        try_in(name, python, cache, place)
    if "all" not in kinds:
        return
    # Of the sdist pip makes a wheel, with build tools from the index; it replaces the other one where everything is.
    # pip makes it here: in an environment that inherits ours it would find our setuptools before the build's own.
    made: list[str | Path] = ["wheel", "--quiet", "--no-deps", "--wheel-dir", place / "made", sdist]
    subprocess.run([*pip[:-1], *made], check=True, timeout=600)
    (made_here,) = (place / "made").glob("*.whl")
    python = environments.python(Environment("all"))
    install(python, made_here)
    subprocess.run([python.with_name("tpucache"), "verify", cache], check=True, timeout=600)


def main() -> None:
    """Run the check as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("kinds", nargs="*", help=f"which environments: {', '.join(KINDS)} (all of them)")
    kinds = parser.parse_args().kinds or [*KINDS]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there are no environments {unknown}")
    with tempfile.TemporaryDirectory() as name:
        try:
            check(Path(name), kinds)
        except CommandError as error:
            sys.exit(f"install: {error}")
        except subprocess.CalledProcessError as error:
            sys.exit(f"install: the command above failed with status {error.returncode}")
    print(f"install: the wheel{' and the sdist' * ('all' in kinds)} can be installed and work: {', '.join(kinds)}")
