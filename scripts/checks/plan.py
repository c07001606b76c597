"""Compares what `plan` estimates with the caches that are then built and read.

    python -m scripts.checks plan PHOTOGRAPHS --sizes 224 --codecs raw dct-zstd --variants 0 2

Each row of the plan is built by a warmup in a process of its own, and read as `bench` reads. Minutes are those of
`build_cache`, without the start of Python. It fails where bytes differ by more than a tenth, or minutes or images/s by
more than 30 %; on a machine that does other work these say little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from scripts.commands import ROOT, say
from tpucache import CachedDataset, CachePlan, Manifest, PlanRow, Recipe, plan_cache
from tpucache.report.bench import measure_reading

_BYTES: Final = 0.1
_TIMES: Final = 0.3
_BUILD: Final = """
import json, sys, time
from tpucache import Recipe, build_cache
source, cache, recipe, jobs = sys.argv[1:]
began = time.monotonic()
build_cache(source, cache, Recipe.from_dict(json.loads(recipe)), on_error="skip", jobs=int(jobs) or None)
print(time.monotonic() - began)
"""


def build(source: Path, row: PlanRow, cache: Path, jobs: int | None) -> float:
    """Build the cache of a row, and return the seconds that it took."""
    recipe = Recipe(size=row.size, codec=row.codec, variants=row.variants, bands=row.bands)
    words = [sys.executable, "-c", _BUILD, str(source), str(cache), json.dumps(recipe.to_dict()), str(jobs or 0)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode:
        sys.exit(f"status {done.returncode}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def read(cache: Path, row: PlanRow, seconds: float, threads: int) -> float:
    """Return the images a second of a cache, in the size of a row."""
    with CachedDataset(cache, variant="epoch" if row.variants else 0, resolution=row.resolution) as dataset:
        rounds = [
            measure_reading(dataset, batch_size=min(256, len(dataset)), threads=threads, rounds=3, seconds=seconds)
            for _ in range(2)
        ]
    return statistics.median(rounds)


def compare(plan: CachePlan, source: Path, options: argparse.Namespace) -> bool:
    """Build and read each row's cache, and print its figures; return whether all are as near as they should be."""
    print(f"{'':30} {'MB':>19} {'seconds':>17} {'images/s':>19}")
    is_near = True
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        built: dict[object, tuple[Path, float]] = {}
        for row in plan.rows:
            if row.cache not in built:
                cache = Path(work, str(len(built)))
                built[row.cache] = cache, build(source, row, cache, options.jobs)
            cache, seconds = built[row.cache]
            rate = read(cache, row, options.seconds, plan.threads)
            pairs = [
                (row.bytes / 1e6, Manifest.load(cache).total_bytes / 1e6, _BYTES, ",.1f"),
                (row.seconds, seconds, _TIMES, ",.1f"),
                (row.images_per_second, rate, _TIMES, ",.0f"),
            ]
            far = [abs(estimate / found - 1) > within for estimate, found, within, _ in pairs]
            is_near &= not any(far)
            shown = "" if row.resolution is None else f" as {row.resolution[0]}"
            name = f"{row.codec}{' bands' if row.bands else ''} {row.size[0]}{shown}, {row.variants} variants"
            cells = [
                f"{estimate:{digits}} {found:{digits}} {estimate / found:.2f}{'!' if wrong else ' '}".rjust(19)
                for (estimate, found, _, digits), wrong in zip(pairs, far, strict=True)
            ]
            print(f"{name:30} {' '.join(cells)}", flush=True)
    return is_near


def main() -> int:
    """Run the check as the command line asks; 1 where an estimate is too far from what is then built and read."""
    options = _parse()
    began = time.monotonic()
    plan = plan_cache(
        options.source,
        sizes=options.sizes,
        codecs=options.codecs,
        variants=options.variants,
        seconds=options.plan_seconds,
        jobs=options.jobs,
        on_progress=say,
    )
    say(f"planned in {time.monotonic() - began:.0f} s; each figure: estimate, found, ratio, ! where too far")
    return int(not compare(plan, options.source, options))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224], help="(%(default)s)")
    parser.add_argument("--codecs", nargs="+", default=["raw", "dct-lz4", "dct-zstd"], help="(%(default)s)")
    parser.add_argument("--variants", type=int, nargs="+", default=[0, 2], help="(%(default)s)")
    parser.add_argument("--jobs", type=int, help="workers; all cores if not given")
    parser.add_argument("--plan-seconds", type=float, default=30.0, help="of the plan (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round of reading (%(default)s)")
    parser.add_argument("--work", type=Path, help="where caches are built; the folder of temporary files if not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
