"""Installs the wheel next to the packages of Kaggle's and Colab's images, and builds, reads and trains there.

For each list of packages it makes an environment with the listed versions, as far as the index has wheels of them. Then
it installs tpucache as the second notebook does, to train, and as the first does, to build a cache: both have to leave
every other version as it is, and `pip check` without new complaints. It prints two rows for each list, and what could
not be installed. An environment takes 10 to 20 GB and as many minutes; it is removed before the next one is made.

    python -m scripts.checks images --work DIR
    python -m scripts.checks images --work DIR kaggle-tpu ../lists/mine-python3.12.txt
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scripts.checks.install import FEED, READ
from scripts.checks.offline import TRAIN, make_cache
from scripts.checks.pythons import find_pythons
from scripts.commands import ROOT, CommandError, make_parser, say
from scripts.install import find_uv

LISTS: Final = Path(__file__).with_name("image_lists")
#: What the two notebooks of docs/kaggle.md give to pip.
WAYS: Final = {"train": ("--no-deps", "--no-index", "{wheel}"), "build": ("{wheel}[augment,fast,lz4,report,zstd]",)}
_REASONS: Final = {
    "no usable wheels": "has no wheel",
    "was not found": "is not on the index",
    "no version": "is not there in this version",
}
_PIN: Final = re.compile(r"[\w.-]+==\S+")
_HOUR: Final = 3600


@dataclass
class Image:
    """The environment of one list."""

    name: str
    python: Path
    pins: list[str]
    others: list[str]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """The number of packages that the list names."""
        return len(self.pins) + len(self.others)


def read_list(path: Path) -> Image:
    """Read a list, whose name ends in `-python3.X.txt`. Raises CommandError where this machine lacks that Python."""
    name, version = re.fullmatch(r"(.+)-python(3\.\d+)", path.stem).groups()  # type: ignore[union-attr]
    major, minor = map(int, version.split("."))
    python = find_pythons().get((major, minor))
    if python is None:
        raise CommandError(f"{path.name} is for Python {version}, which is not on this machine")
    # A later line wins: an image adds to another one's packages.
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    # Of `torch==2.10.0+cu128`, which PyTorch's own index has, PyPI has another build.
    pinned = {line.partition("==")[0].lower(): line.partition("+")[0] for line in lines if _PIN.fullmatch(line)}
    return Image(name, python, [*pinned.values()], [line for line in lines if not _PIN.fullmatch(line)])


class Place:
    """The folder in which environments are made, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = shutil.which("uv") or find_uv(Path(sys.executable))
        if found is None:
            raise CommandError("uv is not here, and pip finds none: `pip install uv`")
        self._uv = str(found)
        self.python = folder / "environment" / "bin" / "python"

    def make(self, image: Image) -> None:
        """Make the environment of a list, and fill in what cannot be installed."""
        self._run("venv", "--quiet", "--clear", "--seed", "--python", image.python, self.folder / "environment")
        constraints = self.folder / "pins.txt"
        constraints.write_text("\n".join(image.pins))
        self._install(image.pins, image.missing, "--no-deps")
        self._install(image.others, image.missing, "--constraint", constraints)
        # The torch of an image without a GPU is the build for CPUs. PyPI has another build, which requires NVIDIA's
        # libraries, in other versions than the image has some of them for other packages.
        constraints.write_text("\n".join(pin for pin in image.pins if not pin.startswith("nvidia-")))
        torch = [pin for pin in image.pins if pin.startswith("torch==")]
        self._install(torch, image.missing, "--constraint", constraints)

    def _install(self, wanted: Sequence[str], missing: dict[str, str], *options: str | Path) -> None:
        """Install all of these that can be: where some cannot, halves are tried."""
        if not wanted:
            return
        words = ["pip", "install", "--python", self.python, "--only-binary", ":all:", *options, *wanted]
        done = self._run(*words, check=False)
        if not done.returncode:
            return
        if len(wanted) == 1:
            errors = " ".join(done.stderr.split())
            reasons = [text for sign, text in _REASONS.items() if sign in errors]
            missing[wanted[0]] = reasons[0] if reasons else "does not fit the others"
            return
        half = len(wanted) // 2
        self._install(wanted[:half], missing, *options)
        self._install(wanted[half:], missing, *options)

    def _run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [self._uv, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=check, timeout=_HOUR)

    def pip(self, *words: str | Path, check: bool = True) -> str:
        """Return what pip of the environment prints. Raises CommandError."""
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_HOUR)
        if check and done.returncode:
            raise CommandError(f"pip {words[0]}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def versions(self) -> dict[str, str]:
        """Return the version of each package that is installed."""
        return {row["name"].lower(): row["version"] for row in json.loads(self.pip("list", "--format", "json"))}

    def complaints(self) -> set[str]:
        """Return the lines of `pip check`."""
        return {line for line in self.pip("check", check=False).splitlines() if not line.startswith("No broken")}


def try_way(way: str, place: Place, wheel: Path, cache: Path) -> str:
    """Install the wheel in one way, use it, and remove it again. Return the cells of a row. Raises CommandError."""
    before, complaints = place.versions(), place.complaints()
    place.pip("install", "--quiet", *(word.format(wheel=wheel) for word in WAYS[way]))
    after = place.versions()
    changed = {name: f"{before[name]} to {after.get(name)}" for name in before if after.get(name) != before[name]}
    added = sorted(set(after) - set(before))
    new = sorted(place.complaints() - complaints)
    done = use(way, place, cache)
    place.pip("uninstall", "--quiet", "--yes", *added)
    if changed:
        raise CommandError(f"{way}: it changed {changed}")
    # Reading and training need no lmdb: without dependencies, this is the one that an image lacks.
    if unexpected := [line for line in new if way == "build" or not re.match(r"tpucache \S+ requires lmdb,", line)]:
        raise CommandError(f"{way}: pip check says {unexpected}")
    return f"{', '.join(added)} | none | {'; '.join(new) or 'clean'} | {', '.join(done)}"


def use(way: str, place: Place, cache: Path) -> list[str]:
    """Use tpucache as a notebook does, and return what was done. Raises CommandError."""
    folder = place.folder / "use"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = place.python.with_name("tpucache")
    environment = {
        "PATH": f"{place.python.parent}:{os.defpath}",
        "HOME": str(folder),
        "PYTHONNOUSERSITE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
    }

    def run(*words: str | Path) -> None:
        done = subprocess.run(
            words, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=_HOUR
        )
        if done.returncode:
            raise CommandError(f"{way}: {' '.join(map(str, words))[:200]}: {done.stderr.strip()[-1500:]}")

    def has(name: str) -> bool:
        found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        return not subprocess.run([place.python, "-c", found], check=False, timeout=_HOUR).returncode

    if way == "build":
        options = ["--size", "32", "--variants", "2", "--target", "kaggle"]
        run(command, "warmup", cache.parent / "photos", "cache", *options)
        run(command, "verify", "cache")
        run(place.python, "-c", READ, folder / "cache")
        return ["warmup", "verify", "read"]
    run(place.python, "-c", READ, cache)
    done = ["read"]
    for backend, library in (("torch", "torch"), ("xla", "torch_xla")):
        if has(library):
            run(command, "train", cache, "--run", folder / backend, "--backend", backend, *TRAIN[2:])
            done.append(f"train by {backend}")
    if has("jax"):
        run(place.python, "-c", FEED, cache)
        done.append("JAX feed")
    return done


def check(place: Place, paths: Sequence[Path]) -> list[str]:
    """Try each list, print the table, and return what failed."""
    words: list[str | Path] = [sys.executable, "-m", "scripts.checks", "build", "--keep", place.folder / "dist"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=_HOUR, stdout=subprocess.DEVNULL)
    (wheel,) = (place.folder / "dist").glob("*.whl")
    cache = make_cache(place.folder)
    rows, failed, missing = [], [], []
    for path in paths:
        image = read_list(path)
        say(f"{image.name}: installing {image.wanted} packages for {image.python.name}")
        place.make(image)
        missing.append(f"{image.name}: {len(image.missing)} of {image.wanted} could not be installed")
        missing += [f"  {name} {why}" for name, why in sorted(image.missing.items())]
        for way in WAYS:
            try:
                row = try_way(way, place, wheel, cache)
            except CommandError as error:
                failed.append(f"{image.name}, {error}")
                row = f"{error}".replace("\n", " ").replace("|", "/")[:200]
            rows.append(f"| {image.name} | {image.python.name} | {way} | {row} |")
            say(rows[-1])
        shutil.rmtree(place.folder / "environment")
    print("| image | Python | to | added | versions changed | pip check | done |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join([*rows, "", *missing]))
    return failed


def main() -> None:
    """Run the check as the command line asks."""
    parser = make_parser(__doc__)
    known = {path.stem.rpartition("-")[0]: path for path in sorted(LISTS.glob("*.txt"))}
    parser.add_argument("lists", nargs="*", metavar="LIST", help=f"a file, or one of {', '.join(known)} (all of these)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where environments are made (a temporary folder)")
    options = parser.parse_args()
    paths = [known.get(name, Path(name)) for name in options.lists or known]
    if lost := [str(path) for path in paths if not path.is_file() or not re.search(r"-python3\.\d+$", path.stem)]:
        parser.error(f"no list: {', '.join(lost)}; the name of a file ends in -python3.X.txt")
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        try:
            failed = check(Place(Path(name)), paths)
        except CommandError as error:
            sys.exit(f"images: {error}")
    if failed:
        sys.exit("\n".join(f"images: {line}" for line in failed))
    print("images: nothing changed version, and tpucache builds, reads and trains with all that could be installed")
