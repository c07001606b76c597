"""Trains from raw pixels and from packed coefficients, several seeds each, and compares the accuracies.

    python -m scripts.checks accuracy PHOTOGRAPHS --codec dct-zstd --quality 90

The runs of a seed differ in nothing but the codec: same start, same order, same quarter of the photographs to validate
on. It fails where the mean accuracies, each run's of its last epoch, are further apart than `--within`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from scripts.commands import ROOT, say
from tpucache import Recipe, build_cache

_RAW: Final = "raw"
_OPTIONS: Final = (
    "--backend torch --valid 0.25 --batch-size 32 --lr 0.05 --weight-decay 1e-3 --smoothing 0.1 --ema 0.99 "
    "--flip --shift 4"
)


def accuracy_of(cache: Path, run: Path, options: argparse.Namespace, seed: int) -> float:
    """Train, and return the validation accuracy of the last epoch."""
    words = ["train", cache, "--run", run, "--model", options.model, "--epochs", options.epochs, "--seed", seed]
    command = [sys.executable, "-m", "tpucache", *map(str, words), *_OPTIONS.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"status {done.returncode}: {done.stderr[-2000:]}")
    report = json.loads((run / "report.json").read_text())
    return float(report["epochs"][-1]["valid_accuracy"])


def main() -> int:
    """Run the check as the command line asks; 1 where the accuracies are too far apart."""
    options = _parse()
    found: dict[str, list[float]] = {_RAW: [], options.codec: []}
    with tempfile.TemporaryDirectory() as work:
        for codec in found:
            quality = None if codec == _RAW else options.quality
            recipe = Recipe(size=options.size, codec=codec, quality=quality)
            build_cache(options.source, Path(work, codec), recipe, on_error="skip")
        for seed in range(options.seeds):
            for codec, accuracies in found.items():
                accuracies.append(accuracy_of(Path(work, codec), Path(work, f"{codec}-{seed}"), options, seed))
                say(f"seed {seed}, {codec}: {accuracies[-1]:.3f}")
    means = {codec: statistics.mean(accuracies) for codec, accuracies in found.items()}
    for codec, accuracies in found.items():
        print(f"{codec}: {means[codec]:.3f}, of {', '.join(f'{accuracy:.3f}' for accuracy in accuracies)}")
    difference = means[options.codec] - means[_RAW]
    print(f"difference {difference:+.3f}, allowed {options.within:g}")
    return int(abs(difference) > options.within)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--codec", default="dct-zstd", help="compared with raw (%(default)s)")
    parser.add_argument("--quality", type=int, default=90, help="of it (%(default)s)")
    parser.add_argument("--size", type=int, default=64, help="of the images (%(default)s)")
    parser.add_argument("--model", default="resnet9", help="as `train` takes it (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of a run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs with each codec (%(default)s)")
    parser.add_argument("--within", type=float, default=0.02, help="allowed difference of the means (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
