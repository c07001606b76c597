"""The command line: one short function a command, which imports what it runs inside itself."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache import __version__
from tpucache.errors import TpucacheError, UsageError

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset, InMemory

_PROG = "python -m tpucache"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for an expected failure told in one line, or 2 for a wrong usage."""
    options = _parser().parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers are stopped as after Ctrl-C
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UsageError as error:
        return _complain(error, 2)
    except TpucacheError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted: run the same command again to go on", 1)
    except BrokenPipeError:  # the reader of a pipe went away: nobody is left to tell
        sys.stderr.close()
        return 1


def warmup(options: argparse.Namespace) -> int:
    """Build a cache, or finish one that was interrupted."""
    from tpucache.errors import UnfinishedError
    from tpucache.progress import Progress
    from tpucache.recipe import Recipe
    from tpucache.warmup.engine import Engine
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.run import Standing, build_cache
    from tpucache.warmup.sources import TableOptions, open_source

    began = time.monotonic()
    recipe = Recipe(
        size=options.size,
        fit=options.fit,
        variants=options.variants,
        augment=options.augment,
        seed=options.seed,
        codec=options.codec,
        quality=options.quality,
        shard_mb=options.shard_mb,
        exact=options.exact,
        max_boxes=options.max_boxes,
    )
    table = TableOptions(
        path_col=options.path_col,
        label_cols=tuple(options.label_col),
        label_sep=options.label_sep,
        suffix=options.suffix,
        root=options.root,
        mask_col=options.mask_col,
        fold_col=options.fold_col,
    )
    engine = Engine(options.backend, options.jobs, options.scheduler)
    progress: list[Progress] = []

    def report(standing: Standing) -> None:
        if not progress:
            progress.append(Progress(standing.total, "warmup", "samples", initial=standing.samples))
        skipped = f", {standing.skipped:,} skipped" if standing.skipped else ""
        progress[0].advance_to(standing.samples, f"{standing.bytes / 1e6:,.0f} MB{skipped}")

    def announce(expected: Estimate) -> None:
        print(
            f"to do: {expected.records:,} records, about {expected.bytes / 1e6:,.0f} MB, and "
            f"{expected.free / 1e6:,.0f} MB are free; {expected.process_seconds:,.0f} s of one process",
            file=sys.stderr,
        )

    try:
        manifest = build_cache(
            open_source(options.source, table),
            options.cache,
            recipe,
            on_error=options.on_error,
            time_limit=options.time_limit,
            target=options.target,
            engine=engine,
            report=report,
            announce=announce,
        )
    except UnfinishedError as error:
        _say(f"{_PROG}: {error}")
        return 0
    finally:
        for shown in progress:
            shown.close()
    _say(
        f"{options.cache}: {manifest.samples:,} samples x {len(manifest.variants)} variants = "
        f"{manifest.records:,} records, {manifest.total_bytes / 1e6:,.1f} MB, {len(manifest.skipped):,} skipped, "
        f"{time.monotonic() - began:,.0f} s"
    )
    for skipped in manifest.skipped:
        _say(f"  skipped {skipped.path!r}: {skipped.reason}")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Hold every byte of a cache against its manifest."""
    from tpucache.progress import Progress
    from tpucache.store.manifest import Manifest
    from tpucache.store.verify import verify_cache

    manifest = Manifest.load(options.cache)
    with Progress(sum(entry.bytes for entry in manifest.shards), "verify", "bytes") as progress:
        damages = verify_cache(options.cache, lambda entry: progress.advance(entry.bytes))
    report = {
        "ok": not damages,
        "files": len(manifest.shards) + len(manifest.tables),
        "records": manifest.records,
        "bytes": manifest.total_bytes,
        "damages": [damage.to_dict() for damage in damages],
    }
    lines = [f"{damage.name} {damage.reason}" for damage in damages]
    _show(
        options,
        report,
        lines or [f"{options.cache}: {manifest.records:,} records in {report['files']} files, all sound"],
    )
    if damages:
        names = sorted({damage.name for damage in damages})
        return _complain(f"{options.cache} is damaged: {', '.join(names)}. Copy it again or warm it up again", 1)
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Tell what a cache holds, how big it is, how it was made."""
    from tpucache.report.inspect import describe, describe_lines
    from tpucache.store.manifest import Manifest

    manifest = Manifest.load(options.cache)
    _show(options, describe(manifest), describe_lines(manifest))
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure how fast a cache reads here."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.report.bench import run_bench

    dataset = CachedDataset(_staged(options), in_memory=_in_memory(options))
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
    _show(options, result.to_dict(), lines)
    return 0


def train(options: argparse.Namespace) -> int:
    """Train a model on a cache."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.training.device import open_device
    from tpucache.training.loop import TrainSettings
    from tpucache.training.loop import train as run_training

    settings = TrainSettings(
        model=options.model,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        weight_decay=options.weight_decay,
        bf16=options.bf16,
        seed=options.seed,
        threads=options.threads,
    )
    in_memory = _in_memory(options)
    data = CachedDataset(_staged(options), in_memory=in_memory)
    train_set, valid_set = _split(data, options.valid, options.seed, in_memory)
    device = open_device(options.backend, options.cores)
    report = run_training(options.run, settings, train_set, valid_set, device)
    _show(options, report.to_dict(), report.lines())
    return 0


def _staged(options: argparse.Namespace) -> Path:
    """Return the cache to read: a copy at --stage, made now or before, or the cache itself."""
    cache: Path = options.cache
    if options.stage is None:
        return cache
    from tpucache.progress import Progress
    from tpucache.store.manifest import Manifest
    from tpucache.store.stage import stage_cache

    with Progress(Manifest.load(cache).total_bytes, "stage", "bytes") as progress:
        return stage_cache(cache, options.stage, lambda done, _: progress.advance_to(done))


def _in_memory(options: argparse.Namespace) -> InMemory:
    answers: dict[str, InMemory] = {"auto": "auto", "yes": True, "no": False}
    return answers[options.in_memory]


def _split(
    data: CachedDataset, valid: str | None, seed: int, in_memory: InMemory
) -> tuple[CachedDataset, CachedDataset | None]:
    """Return what trains (every epoch another variant, where there are any) and what validates (the clean one)."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.split import fold_split, stratified_split

    augmented = CachedDataset(data.directory, "epoch", in_memory=in_memory) if data.manifest.augmented else data
    if valid is None:
        return augmented, None
    if valid.startswith("fold="):
        fold = fold_split(data.table, valid.removeprefix("fold="))
        return augmented.select(fold.train), data.select(fold.valid)
    try:
        fraction = float(valid)
    except ValueError:
        return augmented, CachedDataset(valid, in_memory=in_memory)
    split = stratified_split(data.labels.numpy(), fraction, seed)
    return augmented.select(split.train), data.select(split.valid)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG, description="Decode, resize and augment once; then read batches at memory speed."
    )
    parser.add_argument("--version", action="version", version=f"tpucache {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_warmup(commands)
    _add_reports(commands)
    _add_train(commands)
    return parser


def _add(commands: Any, run: Callable[[argparse.Namespace], int], example: str) -> argparse.ArgumentParser:
    text = (run.__doc__ or "").strip()
    command: argparse.ArgumentParser = commands.add_parser(
        run.__name__,
        help=text,
        description=text,
        epilog=f"example: {_PROG} {run.__name__} {example}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(command=run)
    return command


def _add_warmup(commands: Any) -> None:
    command = _add(commands, warmup, "photos/train cache/train --size 224 --variants 2")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images (a subfolder a class, or flat), a .csv, a pattern of .tfrec files, module:callable",
    )
    command.add_argument("cache", metavar="CACHE", type=Path, help="the folder to write; run again to resume")
    command.add_argument("--size", type=_size, default=224, metavar="N|HxW", help="pixels of every cached image")
    command.add_argument("--fit", choices=["crop", "pad", "stretch"], default="crop", help="how others come to it")
    command.add_argument("--variants", type=int, default=0, metavar="K", help="augmented variants beside the clean one")
    command.add_argument(
        "--augment",
        default="standard",
        metavar="PRESET|FILE|module:name",
        help="flip, affine, standard or strong; a YAML or JSON file of albumentations.to_dict; or a callable",
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the augmentation")
    command.add_argument("--codec", choices=["raw", "jpeg", "png", "zstd"], default="raw", help="how images are stored")
    command.add_argument("--quality", type=int, metavar="Q", help="of jpeg (1-100), or level of png or zstd")
    command.add_argument("--shard-mb", type=int, default=128, metavar="N", help="MiB a shard aims at")
    command.add_argument("--exact", action="store_true", help="decode whole images, never at a smaller scale")
    command.add_argument("--jobs", type=_positive, metavar="N", help="worker processes; all cores if not given")
    table = command.add_argument_group("a .csv", "what its columns mean; all others are kept with the samples")
    table.add_argument("--path-col", metavar="NAME", help="paths of the images; path, file, image, id … if not given")
    table.add_argument(
        "--label-col", action="append", default=[], metavar="NAME", help="labels; more than once for several a sample"
    )
    table.add_argument("--label-sep", metavar="TEXT", help="between several names in the one label column")
    table.add_argument("--suffix", default="", metavar=".jpg", help="put after each path")
    table.add_argument(
        "--root", type=Path, metavar="DIR", help="where the paths begin; the table's folder if not given"
    )
    table.add_argument("--mask-col", metavar="NAME", help="paths of masks")
    table.add_argument("--fold-col", metavar="NAME", help="fold numbers, for train --valid fold=N")
    command.add_argument("--max-boxes", type=_positive, default=100, metavar="N", help="boxes a record has room for")
    command.add_argument("--time-limit", type=_seconds, metavar="8h", help="stop cleanly before; run again to continue")
    command.add_argument("--target", choices=["kaggle"], help="keep within 20 GB and 48 files")
    command.add_argument(
        "--backend", choices=["loky", "dask", "ray", "spark"], default="loky", help="who runs the work"
    )
    command.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask scheduler or a Ray cluster")
    command.add_argument(
        "--on-error", choices=["fail", "skip"], default="fail", help="stop at a bad sample, or list it and go on"
    )


def _add_reports(commands: Any) -> None:
    command = _add(commands, verify, "cache/train")
    _add_cache(command)
    command = _add(commands, inspect, "cache/train --json")
    _add_cache(command)
    command = _add(commands, bench, "cache/train --device-rate 7500")
    _add_cache(command)
    command.add_argument("--batch-size", type=_positive, default=256, metavar="B", help="images a batch")
    _add_reading(command)
    command.add_argument("--device-rate", type=float, metavar="N", help="images/s of an accelerator to simulate")


def _add_train(commands: Any) -> None:
    command = _add(commands, train, "cache/train --run runs/first --valid 0.2 --backend xla --cores 8")
    _add_cache(command)
    command.add_argument("--run", type=Path, required=True, metavar="RUN", help="the folder for what the run leaves")
    command.add_argument("--valid", metavar="CACHE|FRACTION|fold=N", help="what to validate on after each epoch")
    command.add_argument("--backend", choices=["eager", "xla"], default="xla", help="eager is torch on the CPU")
    command.add_argument("--cores", type=_positive, default=1, metavar="N", help="1, or all")
    command.add_argument(
        "--model", default="resnet18", metavar="NAME", help="cnn, resnet18, or module:callable taking a class count"
    )
    command.add_argument("--epochs", type=_positive, default=5, metavar="N", help="times through the data")
    command.add_argument("--batch-size", type=_positive, default=128, metavar="B", help="images a step, all cores'")
    command.add_argument("--lr", type=float, default=0.1, metavar="X", help="the one-cycle's peak learning rate")
    command.add_argument("--weight-decay", type=float, default=5e-4, metavar="X", help="of SGD")
    command.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, order and split")
    _add_reading(command)


def _add_cache(command: argparse.ArgumentParser) -> None:
    command.add_argument("cache", metavar="CACHE", type=Path, help="a cache that warmup built")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=_positive, default=2, metavar="N", help="threads that read")
    command.add_argument(
        "--in-memory",
        choices=["auto", "yes", "no"],
        default="auto",
        help="keep each record in memory once it is read; auto: where all take at most a third of what is free",
    )
    command.add_argument("--stage", type=Path, metavar="DIR", help="copy the cache there first, such as to /dev/shm")


def _size(text: str) -> int | tuple[int, int]:
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"a size is N or HxW, not {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _seconds(text: str) -> float:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip().lower())
    if not text or parts is None or not any(parts.groups()):
        raise argparse.ArgumentTypeError(f"a time is such as 8h, 1h30m, 90m or 5400, not {text!r}")
    hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(3600 * hours + 60 * minutes + seconds)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _show(options: argparse.Namespace, report: dict[str, Any], lines: Sequence[str]) -> None:
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for line in lines:
            _say(line)


def _say(line: str) -> None:
    print(line.encode("utf-8", "backslashreplace").decode())


def _complain(error: object, status: int) -> int:
    message = " ".join(str(error).split())
    print(f"{_PROG}: {message}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return status
