"""A notebook without network: only numpy and torch, a read-only copy of a published folder, and the wheel.

It makes an environment of links to the installed torch, numpy and what torch requires, cuts the network off, installs
tpucache's wheel there, and reads and trains. Where JAX is installed, it does the same in an environment with numpy and
JAX but without torch: it reads, and feeds a JAX program. It ends in status 1 where anything fails.

    python -m scripts.checks offline
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from scripts.bench.photos import write_pictures
from scripts.commands import ROOT, CommandError, make_parser
from scripts.environments import Environment, Environments

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
import os
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
again = DataLoader(CachedDataset(folder), 32, num_workers=min(2, len(os.sched_getaffinity(0))))
assert sum(len(labels) for _, labels in again) == len(data), len(data)
print(len(data), "samples read by CachedLoader and by DataLoader, batches", tuple(batches[0][0].shape))
"""

FEED = f"""
import sys
try:
    import torch
    sys.exit("torch can be imported")
except ModuleNotFoundError:
    pass
import numpy as np
from tpucache import CachedDataset, CachedLoader
from tpucache.jax import AugmentSettings, feed

data = CachedDataset("kaggle:{SLUG}", variant="epoch")
(images, labels) = next(iter(CachedLoader(data, 24)))
assert type(images) is np.ndarray and type(labels) is np.ndarray
batches = feed(CachedLoader(data, 24, shuffle=True), augment=AugmentSettings(flip=True, shift=2))
seen = sum(len(labels) for _ in range(2) for _, labels in batches)
assert seen == 2 * len(data), seen
print(seen, "samples fed to", next(batches)[0].devices())
"""

TRAIN = ("--backend", "torch", "--model", "cnn", "--epochs", "1", "--batch-size", "16", "--valid", "0.2")

# Words before a command: its own network, which has no way out, and its own mounts, of which one folder is read-only.
ALONE = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
SPACES = (["unshare", "--net", "--mount"], ["unshare", "--user", "--map-root-user", "--net", "--mount"])


def cut_off(folder: Path) -> list[str | Path]:
    """Return the words before a command that run it without network, a folder read-only. Ends where that is refused."""
    for space in SPACES:
        words: list[str | Path] = [*space, "sh", "-c", ALONE, folder]
        if (
            shutil.which("unshare")
            and not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
        ):
            return words
    sys.exit("offline: this machine lets nobody cut the network off (unshare --net --mount)")


def run_module(*words: str | Path) -> None:
    """Run a module of this Python. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", *words], check=True)


def make_cache(place: Path) -> Path:
    """Build a small cache of noise in two classes."""
    write_pictures(place / "photos", 120, 32)
    options = ["--size", "32", "--variants", "2", "--jobs", "1"]
    run_module("tpucache", "warmup", place / "photos", place / "cache", *options)
    return place / "cache"


def check(place: Path) -> None:
    """Publish a cache, and read it and train on it as that notebook would."""
    options = ["--id", f"ann/{SLUG}", "--title", "An offline check", "--license", "other", "--dry-run"]
    run_module("tpucache", "publish", make_cache(place), *options, "--out", place / "published")
    mount = shutil.copytree(place / "published", place / "input" / "datasets" / "ann" / SLUG)
    before = cut_off(mount)
    environments = Environments(place / "environments")
    environment = {
        "PATH": os.defpath,
        "HOME": str(place),
        "PYTHONNOUSERSITE": "1",
        "TPUCACHE_PATH": str(place / "input"),
    }
    run_module("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place / "wheels", ROOT)
    (wheel,) = (place / "wheels").glob("tpucache-*.whl")

    def runner(name: str, *links: str) -> Callable[..., None]:
        """Return what runs Python in an environment that holds these libraries and the wheel alone."""
        python = environments.prepare(Environment(name, links=links))

        def run(*words: str | Path) -> None:
            subprocess.run([*before, python, *words], env=environment, cwd=place, check=True)

        run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
        return run

    run = runner("offline", "numpy", "torch")
    run("-c", READ)
    run("-m", "tpucache", "train", f"kaggle:ann/{SLUG}", "--run", place / "run", *TRAIN)
    run("-m", "tpucache", "verify", f"kaggle:{SLUG}")
    if find_spec("jax") is None:
        print("offline: JAX is not installed, so feeding it was not tried")
    else:
        runner("offline-jax", "numpy", "jax")("-c", FEED)


def main() -> None:
    """Run the check as the command line asks."""
    make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            check(Path(name))
        except CommandError as error:
            sys.exit(f"offline: {error}")
        except subprocess.CalledProcessError as error:
            sys.exit(f"offline: the command above failed with status {error.returncode}")
    print("offline: installed, read and trained with numpy and torch alone, without network, from read-only files")
