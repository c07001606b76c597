"""What planning an epoch of 13 million samples takes of a process.

python -m scripts.bench scale
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Final

from scripts.bench.table import add_race_options, parse_options, show
from scripts.commands import make_parser
from tpucache.loading.order import EpochOrder, make_order

_CHUNK: Final = 341  # samples of 21.9 kB, as dct-lz4 has at quality 90 of 224x224, in a chunk of 7.5 MB
_WINDOWS: Final = {"window of 2,048": 2048, "window of 4,096, the default": 4096, 'shuffle="full"': 0}


def planning(order: EpochOrder, samples: int) -> list[str]:
    """Return the seconds that planning an epoch takes, the MB that it keeps, and those that it takes meanwhile."""
    start = time.process_time()
    kept = order.positions(samples, 0, 0).nbytes
    seconds = time.process_time() - start
    tracemalloc.start()
    order.positions(samples, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [f"{seconds:.2f}", f"{kept / 1e6:.0f}", f"{peak / 1e6:.0f}"]


def main() -> None:
    """Measure as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=13_000_000, help="of the cache (%(default)s)")
    add_race_options(parser)
    options = parse_options(parser)
    rows = [["planning an epoch", "seconds", "MB kept", "MB at most"]]
    for name, window in _WINDOWS.items():
        order = make_order("block" if window else "full", window, _CHUNK, changes_variants=False)
        rows.append([name, *planning(order, options.samples)])
    show(options, {"rows": rows}, [("", rows)])
