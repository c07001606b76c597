"""Make `data/VERSION.zip` with the code of that release, which is imported in place of this one's.

    git worktree add /tmp/VERSION vVERSION
    PYTHONPATH=/tmp/VERSION:/tmp/VERSION/tests/training python tests/earlier/make_data.py VERSION

It holds a cache of six images for each codec and one of 16 bits (`deep`), the pixels that were read from the lossy
ones (`pixels.npz`), the hashes of records that were added to them (`expected.json`), a warmup that was interrupted
(`begun`), one that was interrupted while it added to a cache (`adding`), and runs that are finished and stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from pictures import write_deep_images, write_mosaics

import tpucache
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.cli import main
from tpucache.store.codecs import IMAGE_CODECS

#: Where a step is taken.
_LEARNER = "tpucache.training.learn.learner"
_LOSSLESS = ("raw", "png", "zstd")
_ZIP_DATE = (2026, 11, 23, 0, 0, 0)


def make(release: str) -> None:
    """Make all data of a release."""
    with tempfile.TemporaryDirectory() as name:
        source, data = Path(name) / "images", Path(name) / "data"
        write_mosaics(source, 6)
        expected: dict[str, Any] = {"added": {}}
        pixels = {}
        for codec in IMAGE_CODECS:
            made = build_cache(source, data / codec, Recipe(size=16, codec=codec), jobs=1)
            assert made.samples == 6
            if codec not in _LOSSLESS:
                pixels[codec] = _pixels(data / codec)
        write_deep_images(Path(name) / "deep", 6)
        build_cache(Path(name) / "deep", data / "deep", Recipe(size=16, mode="keep"), jobs=1)
        _interrupt(source, data / "begun", Recipe(size=16, variants=1, augment="flip"), "_run_chunk", 4)
        shutil.copytree(data / "raw", data / "adding")
        more = Recipe(size=16, variants=1, augment="flip")
        write_mosaics(source, 9)
        for codec in IMAGE_CODECS:
            shutil.copytree(data / codec, Path(name) / codec)
            made = build_cache(source, Path(name) / codec, Recipe(size=16, codec=codec, variants=1, augment="flip"))
            expected["added"][codec] = {entry.name: entry.records_sha256 for entry in made.shards}
        _interrupt(source, data / "adding", more, "_save", 1)
        _make_runs(Path(name), data)
        np.savez_compressed(data / "pixels.npz", **pixels)
        (data / "expected.json").write_text(json.dumps(expected, indent=1))
        _pack(data, Path(__file__).parent / "data" / f"{release}.zip")


def _pixels(cache: Path) -> np.ndarray[Any, Any]:
    dataset = CachedDataset(cache)
    return np.stack([np.asarray(dataset[at][0]) for at in range(len(dataset))])


def _interrupt(source: Path, cache: Path, recipe: Recipe, what: str, times: int) -> None:
    """Build a cache, and end as by Ctrl-C after a number of chunks (`_run_chunk`) or receipts of shards (`_save`)."""
    name = "build_chunk" if what == "_run_chunk" else "save_receipt"
    with contextlib.ExitStack() as stack:
        calls = [0]
        for module in _modules():
            if callable(function := vars(module).get(name)):
                stack.enter_context(patch.object(module, name, _until(function, calls, times)))
        with contextlib.suppress(KeyboardInterrupt):
            build_cache(source, cache, recipe, jobs=1)
            raise RuntimeError("the build was not interrupted")
    shutil.rmtree(cache / ".warmup" / "lock", ignore_errors=True)


def _until(function: Callable[..., Any], calls: list[int], times: int) -> Callable[..., Any]:
    def limited(*arguments: Any, **named: Any) -> Any:
        if calls[0] == times:
            raise KeyboardInterrupt
        calls[0] += 1
        return function(*arguments, **named)

    return limited


def _modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(tpucache.__path__, "tpucache."):
        if found.name.startswith("tpucache.warmup"):
            with contextlib.suppress(ImportError):
                yield importlib.import_module(found.name)


def _make_runs(folder: Path, data: Path) -> None:
    images = write_mosaics(folder / "twelve", 12)
    build_cache(folder / "twelve", data / "twelve", Recipe(size=16), jobs=1)
    table = folder / "numbers.csv"
    rows = [f"{'ab'[at % 2]}/{at:02d}.bmp,{image.mean() + 500:.3f}" for at, image in enumerate(images)]
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    arguments = ["warmup", table, data / "numbers", "--root", folder / "twelve", "--size", "16", "--label-col", "label"]
    assert main([*map(str, arguments), "--jobs", "1"]) == 0
    options = "--model tiny_models:tiny --epochs 2 --batch-size 4 --lr 0.05 --checkpoint-every 1"
    for kind, cache, more in (
        ("", "twelve", "--valid 0.25 --flip --ema 0.9"),
        ("numbers-", "numbers", "--valid 0.25 --optimizer adamw"),
    ):
        command = ["train", str(data / cache), *options.split(), *more.split(), "--backend", "torch"]
        assert main([*command, "--run", str(data / f"{kind}finished")]) == 0
        step = importlib.import_module(_LEARNER).Learner.step
        stopped = ["--run", str(data / f"{kind}stopped")]
        with patch(f"{_LEARNER}.Learner.step", _until(step, [0], 3)):
            assert main([*command, *stopped]) != 0
        out = data / f"{kind}predictions.csv"
        predict = ["predict", data / f"{kind}finished", data / cache, "-o", out, "--backend", "torch"]
        predict += ["--trust", "tiny_models:tiny"]
        assert main(list(map(str, predict))) == 0
    for path in data.rglob("curves.*"):
        path.unlink()


def _pack(folder: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and ".tmp" not in path.name:
                entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _ZIP_DATE)
                content = path.read_bytes()
                if path.name == "run.json":  # where it was made is nobody's business
                    content = content.replace(str(folder).encode(), b"/data")
                archive.writestr(entry, content, zipfile.ZIP_LZMA)
                print(f"{path.stat().st_size:8,} {entry.filename}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    make(parser.parse_args().release)
