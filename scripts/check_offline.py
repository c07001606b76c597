"""A notebook without network: only numpy and torch, a read-only copy of a published folder, and the wheel in it.

It makes an environment of links to the installed torch, numpy and what torch requires, cuts the network off, installs
the bundled wheel there, and reads and trains. Prints what it did, and ends in status 1 where anything fails.

    python scripts/check_offline.py [CACHE]
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from PIL import Image

SLUG = "offline-check"
# What warmup and publish use; none of it may be importable there.
ABSENT = (
    "lmdb",
    "PIL",
    "joblib",
    "albumentations",
    "cv2",
    "tqdm",
    "sklearn",
    "torch_xla",
    "simplejpeg",
    "cykooz_resizer",
)

READ = f"""
import socket, sys
for name in {ABSENT!r}:
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(name + " can be imported")
try:
    socket.create_connection(("1.1.1.1", 53), 2)
    sys.exit("there is a network")
except OSError:
    pass
import tpucache
from torch.utils.data import DataLoader
from tpucache import CachedDataset, CachedLoader, find_cache, verify_cache

assert "site-packages" in tpucache.__file__, tpucache.__file__
folder = find_cache("kaggle:{SLUG}")
try:
    (folder / "file").touch()
    sys.exit("the published folder can be written to")
except OSError:
    pass
assert verify_cache(folder) == []
data = CachedDataset("kaggle:ann/{SLUG}", variant="epoch")
batches = list(CachedLoader(data, 32, shuffle=True))
assert sum(len(labels) for _, labels in batches) == len(data), len(data)
again = DataLoader(CachedDataset(folder), 32, num_workers=2)
assert sum(len(labels) for _, labels in again) == len(data), len(data)
print(len(data), "samples read by CachedLoader and by DataLoader, batches", tuple(batches[0][0].shape))
"""


def closure(*names: str) -> list[importlib.metadata.Distribution]:
    """Return installed distributions and all that they require here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # required of another platform's torch only
            continue
        needs = [Requirement(text) for text in found[name].requires or ()]
        waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def make_environment(place: Path) -> Path:
    """Make an environment that has pip, numpy, torch and what torch requires, and return its Python."""
    venv.create(place, with_pip=True)
    (site,) = place.glob("lib/python*/site-packages")
    for distribution in closure("numpy", "torch"):
        tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    return place / "bin" / "python"


# Words before a command: its own network, which has no way out, and its own mounts, of which one folder is read-only.
ALONE = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
SPACES = (["unshare", "--net", "--mount"], ["unshare", "--user", "--map-root-user", "--net", "--mount"])


def cut_off(folder: Path) -> list[str | Path]:
    """Return the words before a command that run it without network, a folder read-only. Ends where that is refused."""
    for space in SPACES:
        words = [*space, "sh", "-c", ALONE, folder]
        if (
            shutil.which("unshare")
            and not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
        ):
            return words
    sys.exit("check_offline: this machine lets nobody cut the network off (unshare --net --mount)")


def make_cache(place: Path) -> Path:
    """Build a small cache of noise in two classes."""
    rng = np.random.default_rng(0)
    for number in range(120):
        path = place / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    words = ["warmup", place / "photos", place / "cache", "--size", "32", "--variants", "2", "--jobs", "1"]
    subprocess.run([sys.executable, "-m", "tpucache", *words], check=True)
    return place / "cache"


def check(place: Path) -> None:
    """Publish a cache, and read it and train on it as that notebook would."""
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else make_cache(place)
    told = ["--id", f"ann/{SLUG}", "--title", "An offline check", "--license", "other", "--dry-run"]
    command = [sys.executable, "-m", "tpucache", "publish", cache, *told, "--out", place / "published"]
    subprocess.run(command, check=True)
    mount = shutil.copytree(place / "published", place / "input" / "datasets" / "ann" / SLUG)
    before = cut_off(mount)
    python = make_environment(place / "environment")
    environment = {
        "PATH": os.defpath,
        "HOME": str(place),
        "PYTHONNOUSERSITE": "1",
        "TPUCACHE_PATH": str(place / "input"),
    }

    def run(*words: str | Path) -> None:
        subprocess.run([*before, python, *words], env=environment, cwd=place, check=True)

    (wheel,) = mount.glob("tpucache-*.whl")
    run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
    run("-c", READ)
    options = ["--backend", "eager", "--model", "cnn", "--epochs", "1", "--batch-size", "16", "--valid", "0.2"]
    run("-m", "tpucache", "train", f"kaggle:ann/{SLUG}", "--run", place / "run", *options)
    run("-m", "tpucache", "verify", f"kaggle:{SLUG}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        try:
            check(Path(name))
        except subprocess.CalledProcessError as error:
            sys.exit(f"check_offline: the command above failed with status {error.returncode}")
    print(
        "check_offline: installed, read and trained with numpy and torch alone, without network, from read-only files"
    )


if __name__ == "__main__":
    main()
