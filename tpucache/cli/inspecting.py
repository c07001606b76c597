"""The commands inspect, preview, report, bench and doctor: they show a cache, or what a machine can do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.cli.parser import (
    CACHE_OR_URL,
    KEEPING,
    Argument,
    Report,
    augmentation,
    augmentation_options,
    cache,
    cache_or_url,
    command,
    flag,
    keeping,
    local_path,
    natural,
    positive,
    rate,
    reading,
    section,
    value,
)
from tpucache.errors import UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.plugins import call
from tpucache.process import PROG, tell
from tpucache.progress import Progress

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


def _picture(path: str, text: str) -> tuple[Argument, Argument]:
    output = value("-o, --output", "FILE", text, local_path, Path(path))
    return output, value("--samples", "N", "samples to show, at most", positive, 12)


@command(
    "cache/train --json",
    CACHE_OR_URL,
    KEEPING,
    flag("--versions", "list the cache's versions: what changed, when, and by which command"),
)
def inspect(options: argparse.Namespace) -> Report:
    """Show what a cache contains, its size, and how it was made."""
    from tpucache.loading.find import open_cache
    from tpucache.report.inspect import describe, describe_lines, describe_versions, version_lines
    from tpucache.store.facts import findings

    opened = open_cache(options.cache, **keeping(options))
    if options.versions:
        versions = describe_versions(*opened.versions())
        return {"versions": versions}, version_lines(versions)
    found = findings(opened)
    lines = [*describe_lines(opened.manifest, lists_classes=True), *(f"look at      {line}" for line in found.lines())]
    return {**describe(opened.manifest), "findings": found.to_dict()}, lines


@command(
    "cache/train --device-rate 7500 --against photos/train",
    CACHE_OR_URL,
    KEEPING,
    value("--batch-size", "B", "images in a batch (256, or all of a smaller cache)", positive),
    reading,
    value(
        "--in-memory",
        None,
        "keep each record in memory once it is read; auto: as CachedDataset does without options",
        default="auto",
        choices=["auto", "yes", "no"],
    ),
    value(
        "--against",
        "SOURCE",
        "also read the same images from the cache's source by a DataLoader; takes about half a minute",
    ),
    value("--device-rate", "N", "images/s of an accelerator to simulate", rate),
    value(
        "--finish",
        None,
        "what decodes yuv420, dct-zstd and dct-lz4: the host or the device; device: batches stay packed",
        default="host",
        choices=["host", "device"],
    ),
)
def bench(options: argparse.Namespace) -> Report:
    """Measure how fast this machine reads a cache."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.report.bench import run_bench
    from tpucache.store.fields import IMAGE

    in_memory: Any = {"yes": True, "no": False}.get(options.in_memory, "auto")
    dataset = CachedDataset(options.cache, in_memory=in_memory, **keeping(options))
    samples, size = len(dataset), options.batch_size or min(256, len(dataset))
    if samples < size:
        raise UsageError(f"the cache has {samples} samples, less than a batch of {size}: give a smaller --batch-size")
    chosen = {
        "batch_size": size,
        "threads": options.threads,
        "device_rate": options.device_rate,
        "finish": options.finish,
    }
    if dataset.network is not None:
        return _bench_network(options, dataset, chosen)
    result = run_bench(dataset, **chosen)
    one, many = ("an image", "images") if dataset.manifest.fields[0].name == IMAGE else ("a sample", "samples")
    lines = [
        f"read    {result.images_per_second:>10,.0f} {many}/s, batches of {result.batch_size}, "
        f"{result.threads} threads, shuffled, {result.reading}",
        f"limit   {result.limit_images_per_second:>10,.0f} {many}/s copied in memory by as many threads",
        f"ratio   {result.ratio:>10.2f}",
        f"bytes   {result.bytes_per_image:>10,} {one} on disk, {result.batch_bytes_per_image:,} in a batch",
    ]
    if result.idle is not None:
        device = f"an accelerator that takes {options.device_rate:,.0f} {many}/s"
        lines.append(f"idle    {result.idle:>10.1%} of {device}, the upload not included")
    report = result._asdict()
    if options.against is not None:
        from tpucache.cli.comparing import measure_against

        found = report["against"] = measure_against(options.against, dataset, device_rate=options.device_rate)
        times = result.images_per_second / found["images_per_second"]
        lines += [
            f"against {found['images_per_second']:>10,.0f} images/s by a DataLoader with {found['workers']} workers: "
            f"{found['images']:,} images of {found['source']}, opened, resized and cropped by Pillow, as float tensors",
            f"times   {times:>10,.1f} as fast by the cache, whose batches are uint8",
        ]
        if found["idle"] is not None:
            lines.append(f"idle    {found['idle']:>10.1%} of that accelerator with the DataLoader")
    return report, lines


def _bench_network(options: argparse.Namespace, dataset: CachedDataset, chosen: dict[str, Any]) -> Report:
    from tpucache.report.bench import bench_network

    if options.against is not None:
        raise UsageError(f"--against is for a cache in a folder: run `{PROG} fetch` first")
    found = bench_network(dataset, **chosen)
    use = found.network
    lines = [
        f"read    {found.images_per_second:>10,.0f} samples/s in {found.seconds:,.1f} s, the first batch after "
        f"{found.first_seconds:.2f} s",
        f"link    {use.best_rate / 1e6:>10,.1f} MB/s at best, {use.bytes / found.seconds / 1e6:,.1f} MB/s on average",
        f"bytes   {use.bytes / 1e6:>10,.1f} MB read, {use.bytes / max(use.needed_bytes, 1):.2f} for each needed byte",
        f"asked   {use.requests:>10,} requests, of which {use.failures:,} failed",
        f"waited  {use.waited:>10,.1f} s for the network",
        f"kept    {use.kept_bytes / 1e6:>10,.1f} MB of {use.total_bytes / 1e6:,.1f} MB, in {dataset.directory}",
    ]
    if found.idle is not None:
        device = f"an accelerator that takes {options.device_rate:,.0f} samples/s"
        lines.append(f"idle    {found.idle:>10.1%} of the time of {device}, after the first batch")
    return {**found._asdict(), "network": use._asdict()}, lines


@command(
    "cache/train -o sheet.png --samples 16",
    CACHE_OR_URL,
    KEEPING,
    *_picture("sheet.png", "the picture to write; the file name's suffix gives the format"),
    value("--variants", "N", "variants of each sample, at most", positive, 6),
    value("--seed", "N", "seed of the choice of samples", natural, 0),
    value("--class", "NAME", "show samples of this class only", dest="class_name"),
    flag("--batch", "show the first batch as the model receives it in train, with mixed labels"),
    section("augmentation of a batch (as in train)", *augmentation_options()),
)
def preview(options: argparse.Namespace) -> Report:
    """Draw a contact sheet: a row for each sample, a column for each variant, with masks, boxes and keypoints."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.report.preview import preview_batch, preview_cache, save_picture

    augment, dataset = augmentation(options), CachedDataset(options.cache, in_memory=False, **keeping(options))
    if options.batch:
        shown = dataset.in_variant("epoch") if dataset.manifest.augmented else dataset  # as train does
        sheet = preview_batch(shown, augment, options.samples, seed=options.seed)
    elif augment != AugmentSettings():
        raise UsageError("options of augmentation change only a preview of a batch: give --batch, too")
    else:
        sheet = preview_cache(
            dataset,
            options.samples,
            seed=options.seed,
            class_name=options.class_name,
            variants=options.variants,
        )
    path = save_picture(sheet, options.output)
    report = {"path": str(path), "width": sheet.width, "height": sheet.height, "bytes": path.stat().st_size}
    return report, [f"{path}: {sheet.width} x {sheet.height} pixels, {report['bytes']:,} bytes"]


@command(
    "runs/first -o report.html",
    value(
        "cache",
        "CACHE|RUN",
        "the folder or URL of a cache that warmup built, or the folder of a run that train wrote",
        cache_or_url,
    ),
    value("--valid", "CACHE", "the cache that the run was validated on, if that cache has moved", cache),
    section(
        "findings (a page of pictures to look through and tick)",
        flag(
            "--findings",
            "write the page of pictures that look alike, labels that contradict each other, and extremes instead",
        ),
        value("--against", "CACHE", "show the pictures that are also in this cache: leaks", cache),
        value(
            "--predictions",
            "FILE|RUN",
            "show the samples with the least probable labels, according to out_of_fold.csv or the run that wrote it",
            local_path,
        ),
    ),
    *_picture("report.html", "the page to write"),
)
def report(options: argparse.Namespace) -> Report:
    """Write one HTML page about a cache (samples, classes, recipe), its findings, or a run (curves, mistakes)."""
    from tpucache.runs import is_run

    is_of_run = isinstance(options.cache, Path) and is_run(options.cache)
    if options.valid is not None and (options.findings or not is_of_run):
        raise UsageError(f"--valid is for a page about a run, such as {PROG} report RUN")
    if not options.findings and (options.against is not None or options.predictions is not None):
        raise UsageError("--against and --predictions are for a page of findings: give --findings, too")
    if options.findings:
        with Progress(None, "report") as stages:
            page = call(
                "report_findings",
                options.cache,
                against=options.against,
                predictions=options.predictions,
                on_progress=stages.show_stage,
            )
    elif is_of_run:
        page = call("report_run", options.cache, options.samples, cache=options.valid)
    else:
        page = call("report_cache", options.cache, options.samples)
    path = page.save(options.output)
    size = path.stat().st_size
    lines = [f"{path}: {size:,} bytes, open it in any browser"]
    if page.table is not None:
        lines.append(f"{path.with_suffix('.csv')}: correct its labels, then `{PROG} relabel CACHE` with this file")
    return {"path": str(path), "bytes": size}, lines


@command("--json", flag("--no-xla", "do not start processes that ask XLA and torch"))
def doctor(options: argparse.Namespace) -> Report:
    """Show this machine's cores, memory, devices, library versions and mounted folders, and what to fix."""
    from tpucache.report.doctor import diagnose

    if not options.no_xla:
        tell("asking XLA and torch which devices they find, for at most 90 s each; --no-xla skips this")
    found = diagnose(xla=not options.no_xla)
    return found.to_dict(), found.lines()
