"""Every flipped bit of every file of a cache is found by verify: all bits of small files, and 10,000 of each large one.

    python -m scripts.checks bits [--bits 10000] [--seed 0]

It builds a small cache of each kind, one of two versions among them, and keeps perceptual hashes in each. It flips one
bit, verifies, and flips it back. It prints how many bits of each file were flipped and how many verify did not find,
and ends with status 1 where there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
from pathlib import Path
from typing import Final

from scripts.bench.photos import Pictures
from scripts.commands import say
from tpucache import Recipe, StoreError, build_cache, verify_cache
from tpucache.insight.hashing import hashes

#: Files of up to this many bytes have every bit flipped.
_SMALL: Final = 8 << 10
_VERSIONS: Final = "raw, two versions"
KINDS: Final = {
    "raw": Recipe(size=8),
    "dct-lz4": Recipe(size=16, codec="dct-lz4", variants=1),
    _VERSIONS: Recipe(size=8),
}


def is_found(cache: Path) -> bool:
    """Return whether verify finds damage."""
    try:
        return bool(verify_cache(cache))
    except StoreError:
        return True


def main() -> int:
    """Flip bits of each file of each kind of cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=10_000, help="bits of each large file (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the bits of large files (%(default)s)")
    options = parser.parse_args()
    chance, missed = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as work:
        for name, recipe in KINDS.items():
            cache = Path(work, name)
            build_cache(Pictures(4, 16), cache, recipe, jobs=1)
            if name == _VERSIONS:
                build_cache(Pictures(4, 16), cache, dataclasses.replace(recipe, variants=1), jobs=1)
            hashes(cache)
            if is_found(cache):
                raise SystemExit(f"{name}: verify finds damage where there is none")
            for path in sorted(path for path in cache.rglob("*") if path.is_file()):
                whole = bytearray(path.read_bytes())
                bits = range(8 * len(whole))
                chosen = bits if len(whole) <= _SMALL else chance.sample(bits, min(options.bits, len(bits)))
                unseen = 0
                with path.open("r+b", buffering=0) as file:
                    for bit in chosen:
                        for mask in (1 << bit % 8, 0):
                            file.seek(bit // 8)
                            file.write(bytes([whole[bit // 8] ^ mask]))
                            unseen += bool(mask) and not is_found(cache)
                missed += unseen
                say(f"{name}: {path.name}, {len(whole):,} bytes: {len(chosen):,} bits flipped, {unseen} not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
