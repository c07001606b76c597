"""How long three epochs with random crop and flip take on a CPU: everything from the start of the program is counted.

Each of these is a program of its own, whose imports, building and reading are in its figure:

- torchvision: ImageFolder, RandomResizedCrop, RandomHorizontalFlip, Normalize and a DataLoader with workers;
- tpucache: `warmup` of an empty folder, then a CachedLoader that crops on the host, `--stored` pixels to `--size`;
- tpucache again: the same with the cache that is there;
- FFCV: its DatasetWriter, then its Loader with RandomResizedCrop and flip.

Nothing is learned: a batch is summed, so that what is lazy is done. Photographs stay in the page cache.
torchvision and FFCV are installed into environments of their own, before the clock starts.

    python -m scripts.bench three_epochs photos/train --rounds 3 --markdown epochs.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from scripts.bench.read_contenders import FFCV
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from scripts.commands import CommandError, say
from scripts.environments import Environment, Environments

_EPOCHS: Final = 3
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_VISION: Final = "torchvision==0.24.0"  # of the torch that is here
_TIMEOUT: Final = 3600.0


def run_torchvision(options: argparse.Namespace) -> int:
    """Decode, crop and flip every photograph in every epoch."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

    steps = [RandomResizedCrop(options.size), RandomHorizontalFlip(), ToTensor(), Normalize(_MEAN, _STD)]
    folder = ImageFolder(options.photos, Compose(steps))
    loader = DataLoader(folder, options.batch, shuffle=True, num_workers=options.threads)
    return _consume(loader)


def run_tpucache(options: argparse.Namespace) -> int:
    """Build the cache unless it is there, then crop out of its records."""
    from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
    from tpucache.ondevice import AugmentSettings

    cache = options.work / "cache"
    if not cache.exists():
        build_cache(options.photos, cache, Recipe(size=options.stored, codec=options.codec), jobs=options.threads)
    augment = AugmentSettings(crop=True, flip=True)
    loader = CachedLoader(
        CachedDataset(cache), options.batch, shuffle=True, augment=augment, size=options.size, threads=options.threads
    )
    return _consume(loader)


def run_ffcv(options: argparse.Namespace) -> int:
    """Write FFCV's file, then crop out of it."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    file = str(options.work / "photos.beton")
    image = RGBImageField(write_mode="raw", max_resolution=options.stored)
    DatasetWriter(file, {"image": image, "label": IntField()}, num_workers=options.threads).from_indexed_dataset(
        _Photographs(options.photos)
    )
    scale = NormalizeImage(255 * np.array(_MEAN), 255 * np.array(_STD), np.float32)
    pipelines = {
        "image": [
            RandomResizedCropRGBImageDecoder((options.size, options.size)),
            RandomHorizontalFlip(),
            scale,
            ToTensor(),
            ToTorchImage(),
        ],
        "label": [IntDecoder(), ToTensor()],
    }
    loader = Loader(
        file, batch_size=options.batch, num_workers=options.threads, order=OrderOption.RANDOM, pipelines=pipelines,
        os_cache=True, drop_last=False,
    )  # fmt: skip
    return _consume(loader)


class _Photographs:
    """What FFCV's writer is given: pictures of one subfolder a class, and their classes' numbers."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(path for path in folder.glob("*/*") if path.is_file())
        self._classes = sorted({path.parent.name for path in self._paths})

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        from PIL import Image

        path = self._paths[at]
        return Image.open(path).convert("RGB"), self._classes.index(path.parent.name)


def _consume(loader: Any) -> int:
    """Read three epochs, and return how many samples that were."""
    samples = 0
    for _ in range(_EPOCHS):
        for images, labels in loader:
            images.sum()
            samples += len(labels)
    return samples


class Contender(NamedTuple):
    """A program, the environment it runs in, and whether it begins without what an earlier turn has built."""

    run: Callable[[argparse.Namespace], int]
    environment: Environment | None = None
    is_fresh: bool = True


def _contenders() -> dict[str, Contender]:
    pins = tuple(f"{name}=={version(name)}" for name in ("torch", "numpy"))
    vision = Environment("torchvision", ((_VISION,),), pins, inherits=True)
    return {
        "torchvision": Contender(run_torchvision, vision),
        "tpucache": Contender(run_tpucache),
        "tpucache again": Contender(run_tpucache, is_fresh=False),
        "FFCV": Contender(run_ffcv, FFCV),
    }


def turn(name: str, contender: Contender, python: Path, options: argparse.Namespace) -> tuple[float, int]:
    """Run a contender's program; return its seconds, from start to end, and its samples. Raises CommandError."""
    work = options.work / "built"
    if contender.is_fresh:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    command = [python, "-m", "scripts.bench.three_epochs", options.photos, "--work", work]
    for option in ("size", "stored", "codec", "batch", "threads"):
        command += [f"--{option}", str(getattr(options, option))]
    began = time.monotonic()
    done = subprocess.run(
        [*map(str, command), "--program", name], check=False, capture_output=True, text=True, timeout=_TIMEOUT
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise CommandError(f"{name}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'it failed'}")
    return seconds, int(done.stdout.split()[-1])


Ready = dict[str, tuple[Contender, Path]]


def _prepare(options: argparse.Namespace) -> tuple[Ready, list[str]]:
    """Install what contenders need; return them with their interpreters, and a line for each that is left out."""
    environments, ready, left_out = Environments(options.work / "env"), {}, []
    for name, contender in _contenders().items():
        if options.only and name not in options.only:
            continue
        try:
            ready[name] = contender, environments.prepare(contender.environment)
        except CommandError as error:
            left_out.append(f"- left out: {name}: {error}")
    if not ready:
        sys.exit("\n".join(["three_epochs: there is nobody to measure", *left_out]))
    return ready, left_out


def _race(ready: Ready, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each contender's turns, and the samples of one. Raises CommandError."""
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    samples = 0
    for number in range(options.rounds):
        for name, (contender, python) in ready.items():
            say(f"round {number + 1} of {options.rounds}: {name}")
            took, samples = turn(name, contender, python, options)
            seconds[name].append(took)
    return seconds, samples


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder of photographs, one subfolder a class")
    parser.add_argument("--size", type=int, default=224, help="side of the crops in pixels (%(default)s)")
    parser.add_argument("--stored", type=int, default=256, help="side of the pictures in caches (%(default)s)")
    parser.add_argument("--codec", default="raw", help="of tpucache's cache (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples in a batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads or workers of each (%(default)s)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these alone: torchvision, tpucache, FFCV …")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    add_race_options(parser, "build/three-epochs")
    options = parse_options(parser, {"size": 8, "stored": 8, "batch": 1, "threads": 1})
    options.photos = options.photos.resolve()
    if options.program:
        programs = {"torchvision": run_torchvision, "FFCV": run_ffcv}
        print(programs.get(options.program, run_tpucache)(options))
        return
    ready, left_out = _prepare(options)
    try:
        seconds, samples = _race(ready, options)
    except CommandError as error:
        sys.exit(f"three_epochs: {error}")
    taking = list(ready)
    first = statistics.median(seconds[taking[0]])
    rows = [["", "seconds", "least", "most", f"of {taking[0]}"]]
    for name, each in seconds.items():
        median = statistics.median(each)
        rows.append([name, f"{median:.1f}", f"{min(each):.1f}", f"{max(each):.1f}", f"{median / first:.2f}"])
    notes = (
        f"{samples // _EPOCHS:,} photographs, three epochs, {options.stored} to {options.size} pixels, "
        f"median of {options.rounds} rounds. {machine_line(machine())}."
    )
    print(as_text(rows), notes, *left_out, sep="\n")
    figures = {"seconds": seconds, "samples": samples, "machine": machine()}
    write_files(options, json.loads(json.dumps(figures)), "\n".join([as_markdown(rows), notes, "", *left_out]) + "\n")


if __name__ == "__main__":
    main()
