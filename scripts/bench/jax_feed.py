"""How long a JAX program waits for its data, with a step and a loader of given times.

Steps of `--step` milliseconds, each on a batch that the device has finished, are fed by `tpucache.jax.feed` from a
loader that takes `--load` milliseconds a batch. While loading is the shorter, the program should hardly wait.

    python -m scripts.bench jax_feed --step 20 --load 15
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from scripts.digits import write_digits
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
from tpucache.jax import AugmentSettings, feed
from tpucache.loading.reading.record_reader import WaysRead


class SlowDataset(CachedDataset):
    """A dataset whose every batch takes as long as asked."""

    seconds = 0.0

    def read_into(self, *arguments: Any) -> WaysRead:
        """Read, and sleep for the rest of the time."""
        until = time.perf_counter() + self.seconds
        found = super().read_into(*arguments)
        time.sleep(max(0.0, until - time.perf_counter()))
        return found


def main() -> None:
    """Run the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=20, help="milliseconds of a step")
    parser.add_argument("--load", type=float, default=15, help="milliseconds in which the loader reads a batch")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    SlowDataset.seconds = options.load / 1000
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder) / "digits")
        build_cache(Path(folder) / "digits", Path(folder) / "cache", Recipe(size=32), jobs=1)
        loader = CachedLoader(SlowDataset(Path(folder) / "cache"), 64, shuffle=True, drop_last=True, threads=1)
        batches = feed(loader, augment=AugmentSettings(flip=True, shift=2))
        began, steps = time.perf_counter(), 0
        for _ in range(options.epochs):
            for images, _labels in batches:
                jax.block_until_ready(images)
                time.sleep(options.step / 1000)
                steps += 1
        seconds = time.perf_counter() - began
    print(f"{steps} steps of {options.step:g} ms, {options.load:g} ms to read a batch, {jax.device_count()} device(s)")
    print(f"waited for data {batches.waited:.1%} of the time; {1000 * seconds / steps:.1f} ms a step in all")


if __name__ == "__main__":
    main()
