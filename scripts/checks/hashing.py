"""What hashes of pictures cost, next to the warmup: processor seconds, for each codec.

It builds a cache of photographs in each codec and hashes it, both in one thread of work, and prints the seconds of the
processor that each took. It ends in status 1 where the hashes took more than a fifth of the warmup (`--most`). Large
photographs take a warmup longer, and hashes not.

    python -m scripts.checks hashing PHOTOGRAPHS [--size 224] [--most 0.2]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from scripts.commands import say
from tpucache import Recipe, build_cache
from tpucache.insight import hashes

_CODECS: Final = ("raw", "yuv420", "jpeg", "dct-zstd", "dct-lz4", "png")


def main() -> int:
    """Print a row for each codec, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of photographs")
    parser.add_argument("--size", type=int, default=224, help="pixels (%(default)s)")
    parser.add_argument("--codecs", nargs="+", default=[*_CODECS], help="%(default)s")
    parser.add_argument("--most", type=float, default=0.2, help="of the warmup's seconds (%(default)s)")
    options = parser.parse_args()
    is_cheap, first = True, None
    say("| codec | warmup, s | hashes, s | ms each | share | bits apart from the first |")
    say("|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as work:
        for codec in options.codecs:
            cache, recipe = Path(work, codec), Recipe(size=options.size, codec=codec)
            before = spent()
            build_cache(options.folder, cache, recipe, jobs=1)
            between = spent()
            found = hashes(cache, threads=1, keep=False)
            warmup, taken = between - before, spent() - between
            first = first or found
            apart = np.unpackbits((found.words ^ first.words).view(np.uint8), axis=1).sum(1).max(initial=0)
            is_cheap &= taken <= options.most * warmup
            each, share = 1000 * taken / max(1, len(found)), taken / warmup
            say(f"| {codec} | {warmup:.1f} | {taken:.2f} | {each:.2f} | {share:.1%} | at most {apart} |")
    return int(not is_cheap)


def spent() -> float:
    """Return the processor's seconds of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    raise SystemExit(main())
