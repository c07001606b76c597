"""The first epoch on a cache that is built meanwhile, compared with warmup alone, later epochs and a plain DataLoader.

    python -m scripts.bench growing PHOTOGRAPHS --size 224 --rounds 3
    python -m scripts.bench growing PHOTOGRAPHS --codec dct-lz4 --epochs 5
    python -m scripts.bench growing PHOTOGRAPHS --device-rate 2000
    python -m scripts.bench growing PHOTOGRAPHS --late 30
    python -m scripts.bench growing PHOTOGRAPHS --train cnn

Each round takes, in new folders: `warmup` and then its epochs; `open_or_build` and as many epochs; a DataLoader with a
worker for each core that decodes and resizes with Pillow. Each begins in a process of its own that has just imported
tpucache, so that workers of an earlier round help none of them. The first two are taken once more "with imports", in
processes that have imported nothing yet, as a new notebook: reading imports torch, which takes a second or two, and
`open_or_build` does that while the other process builds. A round before the first one is not counted: it reads
the photographs into the page cache, and writes the bytecode of all modules, as pip does. Without bytecode, each process
would compile them, for about a second. Nothing learns: it is how long batches take. With
`--device-rate`, each batch waits as long as a device of that many images a second computes. One JSON object.
With `--late`, each round takes the first epoch alone, where each photograph opens and reads at once, and that many
milliseconds late (see `scripts.bench late`; a C compiler is needed).
With `--train`, each round takes two ways of commands, from the start of the first to the end of the last: `tpucache
train PHOTOGRAPHS`, which builds the cache meanwhile; and `tpucache warmup` and then `tpucache train CACHE`. Both train
this model on the CPU, with batches of `--batch-size`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.commands import ROOT, say

Way = Callable[[argparse.Namespace, Path], dict[str, float]]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder with one folder for each class")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-rate", type=float, default=float("inf"), metavar="N", help="images/s of a device")
    parser.add_argument("--late", type=float, metavar="MS", help="compare with storage that answers so late")
    parser.add_argument("--train", metavar="MODEL", help="compare the commands, which train this model")
    return parser.parse_args(words)


def main() -> None:
    """Measure, and print seconds, the median of the rounds."""
    words = sys.argv[1:]
    options = _parse(words)
    if options.late is not None:
        print(json.dumps(_late(options)))
        return
    if options.train is not None:
        print(json.dumps(_trained(options)))
        return
    rows: list[dict[str, float]] = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            ways = (_grown, _built, _grown_with_imports, _built_with_imports, _plain)
            rows.append({name: each for way in ways for name, each in _in_fresh_process(way, words, folder).items()})
        say(f"round {number}{'' if number else ' (not counted)'}: {json.dumps(rows[-1])}")
    found = {name: round(statistics.median(row[name] for row in rows[1:]), 3) for name in rows[0]}
    ratios = {
        "first_epoch_of_warmup": found["growing_first_epoch"] / found["warmup"],
        "all_of_warmup_and_epochs": found["growing_all"] / (found["warmup"] + found["finished_epochs"]),
        "all_of_warmup_and_epochs_with_imports": found["growing_with_imports"]
        / found["warmup_and_epochs_with_imports"],
        "all_of_dataloader": found["growing_all"] / (options.epochs * found["dataloader_epoch"]),
    }
    print(json.dumps({**found, **{name: round(value, 3) for name, value in ratios.items()}}))


_FIRST_EPOCH = """
import sys, time
from pathlib import Path
from tpucache import CachedLoader, Recipe, open_or_build

if __name__ == "__main__":
    photographs, cache, size, codec, batch_size = sys.argv[1:]
    began = time.monotonic()
    dataset = open_or_build(photographs, cache, Recipe(size=int(size), codec=codec))
    for _ in CachedLoader(dataset, int(batch_size), shuffle=True):
        pass
    print(len(dataset) / (time.monotonic() - began))
"""


def _late(options: argparse.Namespace) -> dict[str, float]:
    """Return the images a second of the first epoch on storage that answers at once and late, and their ratio."""
    from scripts.bench.late import make_shim  # it imports tpucache's modules, which measured processes do themselves

    found: dict[float, list[float]] = {0.0: [], options.late: []}
    with tempfile.TemporaryDirectory() as folder:
        shim, photographs = make_shim(Path(folder)), options.photographs.resolve()
        script = Path(folder, "measured.py")
        script.write_text(_FIRST_EPOCH)
        for number in range(options.rounds):
            for milliseconds, rates in found.items():
                environment = {
                    **os.environ,
                    "LD_PRELOAD": str(shim),
                    "LATE_BELOW": str(photographs),
                    "LATE_MICROSECONDS": str(round(milliseconds * 1000)),
                    "PYTHONPATH": str(ROOT),
                }
                cache = Path(folder, f"cache-{number}-{milliseconds}")
                words = [photographs, cache, options.size, options.codec, options.batch_size]
                command = [sys.executable, str(script), *map(str, words)]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                rates.append(float(done.stdout.split()[-1]))
                shutil.rmtree(cache)
                say(f"round {number + 1}, {milliseconds:g} ms: {rates[-1]:,.0f} images/s")
    at_once, late = (statistics.median(rates) for rates in found.values())
    return {
        "late_ms": options.late,
        "local": round(at_once, 1),
        "late": round(late, 1),
        "ratio": round(late / at_once, 3),
    }


def _trained(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of training on the photographs, and of warmup and then training, and their ratio."""
    found: dict[str, list[float]] = {"train": [], "warmup_and_train": []}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    recipe = ["--size", str(options.size), "--codec", options.codec]
    build_options = ["--build", " ".join(recipe)]
    training = ["--model", options.train, "--epochs", str(options.epochs), "--batch-size", str(options.batch_size)]
    training += ["--backend", "torch"]

    def seconds(*commands: Sequence[str | Path]) -> float:
        began = time.perf_counter()
        for words in commands:
            command = [sys.executable, "-m", "tpucache", *map(str, words)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
        return time.perf_counter() - began

    photographs = options.photographs.resolve()
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            cache, run = Path(folder, "cache"), Path(folder, "run")
            found["train"].append(seconds(["train", photographs, "--run", run, *build_options, *training]))
            build = ["warmup", photographs, cache, *recipe]
            found["warmup_and_train"].append(seconds(build, ["train", cache, "--run", run.with_name("two"), *training]))
        say(f"round {number}: {json.dumps({name: round(each[-1], 3) for name, each in found.items()})}")
    one, two = (statistics.median(each[1:]) for each in found.values())
    return {"train": round(one, 3), "warmup_and_train": round(two, 3), "ratio": round(one / two, 3)}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _train(batches: Iterable[Any], options: argparse.Namespace) -> None:
    """Take all batches, with the pauses in which a device computes."""
    for _ in batches:
        _compute(options)


def _compute(options: argparse.Namespace) -> None:
    time.sleep(options.batch_size / options.device_rate)


def _in_fresh_process(way: Way, words: Sequence[str], folder: str) -> dict[str, float]:
    """Return what a way takes in a process of its own: joblib's workers of an earlier round would start no more."""
    code = f"import sys; from scripts.bench.growing import print_way; print_way({way.__name__!r}, {folder!r}, sys.argv)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def print_way(name: str, folder: str, words: Sequence[str]) -> None:
    """Print what a way of this module takes, for `_in_fresh_process`."""
    print(json.dumps(globals()[name](_parse(words[1:]), Path(folder))))


def _grown(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    from tpucache import CachedLoader, Recipe, open_or_build

    began = time.perf_counter()
    recipe = Recipe(size=options.size, codec=options.codec)
    dataset = open_or_build(options.photographs, folder / "growing", recipe)
    loader = CachedLoader(dataset, options.batch_size, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    first_batch = time.perf_counter() - began
    _compute(options)
    _train(iterator, options)
    first_epoch = time.perf_counter() - began
    for _ in range(options.epochs - 1):
        _train(loader, options)
    dataset.digest  # noqa: B018  # it waits for the end
    whole = time.perf_counter() - began
    return {"growing_first_batch": first_batch, "growing_first_epoch": first_epoch, "growing_all": whole}


def _grown_with_imports(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    from tpucache import Recipe, open_or_build

    dataset = open_or_build(
        options.photographs, folder / "growing-anew", Recipe(size=options.size, codec=options.codec)
    )
    from tpucache import CachedLoader

    loader = CachedLoader(dataset, options.batch_size, shuffle=True)
    _train(itertools.chain.from_iterable([loader] * options.epochs), options)
    dataset.digest  # noqa: B018  # it waits for the end
    return {"growing_with_imports": time.perf_counter() - began}


def _built_with_imports(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    from tpucache import Recipe, build_cache

    build_cache(options.photographs, folder / "finished-anew", Recipe(size=options.size, codec=options.codec))
    from tpucache import CachedDataset, CachedLoader

    loader = CachedLoader(CachedDataset(folder / "finished-anew"), options.batch_size, shuffle=True)
    _train(itertools.chain.from_iterable([loader] * options.epochs), options)
    return {"warmup_and_epochs_with_imports": time.perf_counter() - began}


def _built(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    from tpucache import CachedDataset, CachedLoader, Recipe, build_cache

    recipe = Recipe(size=options.size, codec=options.codec)
    warmup = _seconds(lambda: build_cache(options.photographs, folder / "finished", recipe))
    loader = CachedLoader(CachedDataset(folder / "finished"), options.batch_size, shuffle=True)
    epochs = _seconds(lambda: _train(itertools.chain.from_iterable([loader] * options.epochs), options))
    return {"warmup": warmup, "finished_epochs": epochs}


class _Plain:
    """Photographs, each decoded and resized when it is asked for."""

    def __init__(self, root: Path, size: int) -> None:
        self._paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        self._size = size

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        import numpy as np
        from PIL import Image

        with Image.open(self._paths[index]) as image:
            image.draft("RGB", (self._size, self._size))
            return np.array(image.convert("RGB").resize((self._size, self._size)))


def _plain(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    from torch.utils.data import DataLoader

    cores = len(os.sched_getaffinity(0))
    dataset: Any = _Plain(options.photographs, options.size)
    loader = DataLoader(dataset, options.batch_size, shuffle=True, num_workers=cores)
    return {"dataloader_epoch": _seconds(lambda: _train(loader, options))}


if __name__ == "__main__":
    main()
