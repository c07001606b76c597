"""What tells about a cache and the machine under it."""

from __future__ import annotations

import argparse
from typing import Any

from tpucache.cli.options import add_cache, add_command, add_reading, in_memory, positive, staged
from tpucache.cli.terminal import show


def inspect(options: argparse.Namespace) -> int:
    """Tell what a cache holds, how big it is, how it was made."""
    from tpucache.report.inspect import describe, describe_lines
    from tpucache.store.manifest import Manifest

    manifest = Manifest.load(options.cache)
    show(options, describe(manifest), describe_lines(manifest))
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure how fast a cache reads here."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.report.bench import run_bench

    dataset = CachedDataset(staged(options), in_memory=in_memory(options))
    result = run_bench(
        dataset,
        batch_size=options.batch_size,
        threads=options.threads,
        device_rate=options.device_rate,
    )
    lines = [
        f"read    {result.images_per_second:>10,.0f} images/s, batches of {result.batch_size}, "
        f"{result.threads} threads, shuffled, {'kept in memory' if result.in_memory else 'from the page cache'}",
        f"limit   {result.limit_images_per_second:>10,.0f} images/s copied in memory by as many threads",
        f"ratio   {result.ratio:>10.2f}",
    ]
    if result.idle is not None:
        lines.append(f"idle    {result.idle:>10.1%} of an accelerator that takes {options.device_rate:,.0f} images/s")
    show(options, result.to_dict(), lines)
    return 0


def add(commands: Any) -> None:
    """Add inspect and bench."""
    command = add_command(commands, inspect, "cache/train --json")
    add_cache(command)
    command = add_command(commands, bench, "cache/train --device-rate 7500")
    add_cache(command)
    command.add_argument("--batch-size", type=positive, default=256, metavar="B", help="images a batch")
    add_reading(command)
    command.add_argument("--device-rate", type=float, metavar="N", help="images/s of an accelerator to simulate")
