"""What several commands' options have in common."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.cli.terminal import PROG
from tpucache.errors import UsageError

if TYPE_CHECKING:
    from tpucache.loading.records.reader import InMemory


def add_command(commands: Any, run: Callable[[argparse.Namespace], int], example: str) -> argparse.ArgumentParser:
    """Add a command named and described by the function that runs it, with an example of its use."""
    text = (run.__doc__ or "").strip()
    command: argparse.ArgumentParser = commands.add_parser(
        run.__name__,
        help=text,
        description=text,
        epilog=f"example: {PROG} {run.__name__} {example}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(command=run)
    command.add_argument("--traceback", action="store_true", help="where an error comes from in the code, too")
    return command


def add_cache(command: argparse.ArgumentParser) -> None:
    """Add the cache a command reads, and --json."""
    command.add_argument(
        "cache", metavar="CACHE", type=cache, help="a cache that warmup built; kaggle:slug is looked for"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def add_device(command: argparse.ArgumentParser) -> None:
    """Add where it is computed: --backend, --cores."""
    command.add_argument("--backend", choices=["eager", "xla"], default="xla", help="eager is torch on the CPU")
    command.add_argument("--cores", type=positive, default=1, metavar="N", help="1, or all")


def add_reading(command: argparse.ArgumentParser) -> None:
    """Add how a cache is read: --threads, --in-memory, --stage."""
    command.add_argument("--threads", type=positive, default=2, metavar="N", help="threads that read")
    command.add_argument(
        "--in-memory",
        choices=["auto", "yes", "no"],
        default="auto",
        help="keep each record in memory once it is read; auto: where all take at most a third of what is free",
    )
    command.add_argument("--stage", metavar="DIR", help="copy the cache there first, such as to /dev/shm")


def staged(options: argparse.Namespace, check: Callable[[], None] = lambda: None) -> Path:
    """Return the cache to read: a copy at --stage, made now or before, or the cache itself.

    `check` is called while it is copied; what it raises leaves what is copied to be continued.
    """
    cache: Path = options.cache
    if options.stage is None:
        return cache
    from tpucache.progress import Progress
    from tpucache.store.copying.stage import stage_cache
    from tpucache.store.manifest import Manifest

    with Progress(Manifest.load(cache).total_bytes, "stage", "bytes") as progress:

        def report(done: int, _: int) -> None:
            progress.advance_to(done)
            check()

        return stage_cache(cache, options.stage, report)


def in_memory(options: argparse.Namespace) -> InMemory:
    """Return the answer to --in-memory as CachedDataset takes it."""
    answers: dict[str, InMemory] = {"auto": "auto", "yes": True, "no": False}
    return answers[options.in_memory]


def cache(text: str) -> Path:
    """Read a cache: its folder, or kaggle:slug, which is looked for where such datasets are mounted."""
    from tpucache.loading.find import locate

    try:
        return locate(text)
    except UsageError as error:  # as a ValueError, argparse would drop what it says
        raise argparse.ArgumentTypeError(str(error)) from error


def size(text: str) -> int | tuple[int, int]:
    """Read "N" or "HxW"."""
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"a size is N or HxW, not {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def seconds(text: str) -> float:
    """Read a time such as 8h, 1h30m, 90m or 5400, in seconds."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip().lower())
    if not text or parts is None or not any(parts.groups()):
        raise argparse.ArgumentTypeError(f"a time is such as 8h, 1h30m, 90m or 5400, not {text!r}")
    hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return float(3600 * hours + 60 * minutes + rest)


def positive(text: str) -> int:
    """Read a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def rate(text: str) -> float:
    """Read a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def natural(text: str) -> int:
    """Read a number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value
