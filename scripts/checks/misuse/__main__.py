"""Tries many kinds of misuse and damage on small generated data, and prints a table of what became of each.

    python -m scripts.checks.misuse [--only PATTERN] [--list]

Every row is "correct", compared with what was known beforehand; or "refused", with the documented exit status or error
and a message of one line; or WRONG. The exit status is 1 where a row is WRONG. Rows use the public names and the
command line alone. Each has a process and a folder of its own; nothing is left behind.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # rows are forked

import argparse
import importlib
import pkgutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from scripts.checks import misuse
from scripts.checks.misuse.lab import Shared
from scripts.checks.misuse.rows import ROWS, Row, run_rows
from scripts.checks.misuse.table import print_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="rows whose area or name holds this expression")
    parser.add_argument("--list", action="store_true", help="print the rows' names, try nothing")
    parser.add_argument("--jobs", type=int, default=2, help="rows at once")
    options = parser.parse_args()
    rows = [one for one in load_rows() if one.matches(options.only)]
    if options.list or not rows:
        print("\n".join(f"{one.area}: {one.name}" for one in rows) or f"no row matches {options.only!r}")
        return int(not rows)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="misuse-") as work:
        shared = Shared(Path(work).resolve() / "shared")
        shared.make_all()
        folder = Path(work).resolve() / "rows"
        folder.mkdir()
        results = {}
        for one, outcome, seconds in run_rows(rows, folder, shared, options.jobs):
            results[one] = outcome
            print(f"{len(results)}/{len(rows)} {outcome.kind} {seconds:.1f} s {one.name}", file=sys.stderr)
    print_table([(one, results[one]) for one in rows])
    kinds = Counter(outcome.kind for outcome in results.values())
    seconds = time.monotonic() - began
    print(f"\n{len(rows)} rows in {seconds:.0f} s: " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)))
    return int(kinds["WRONG"] > 0)


def load_rows() -> list[Row]:
    """Import the modules of rows, and return all rows, area by area."""
    for module in sorted(pkgutil.iter_modules(misuse.__path__), key=lambda module: module.name):
        if module.name.startswith("try_"):
            importlib.import_module(f"{misuse.__name__}.{module.name}")
    return sorted(ROWS, key=lambda one: one.area)  # stable: in an area as they are written


if __name__ == "__main__":
    sys.exit(main())
