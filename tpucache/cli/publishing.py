"""The commands publish, push, fetch and cached: copy finished caches, and manage local copies."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tpucache.cli.parser import CACHE, Report, command, fields_of, flag, from_options, local_path, value
from tpucache.errors import UsageError
from tpucache.progress import Progress
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.text import shown, size_text

if TYPE_CHECKING:
    from tpucache.store.manifest import Manifest


@command(
    'cache/train --id ann/birds-at-224 --title "Birds at 224" --license CC-BY-4.0 --dry-run',
    CACHE,
    fields_of(Metadata),
    fields_of(PublishOptions),
)
def publish(options: argparse.Namespace) -> Report:
    """Publish a cache as a Kaggle Dataset."""
    from tpucache.publish.publish import prepare, send
    from tpucache.store.cache import Cache

    metadata, settings = from_options(Metadata, options), from_options(PublishOptions, options)
    manifest = Cache.open(options.cache).manifest
    with Progress(sum(entry.bytes for entry in manifest.shards), "verify", "bytes") as verifying:
        bundle = prepare(
            options.cache, metadata, settings.out, lambda entry: verifying.advance(entry.bytes), hashes=settings.hashes
        )
    total = sum(bundle.files.values())
    words = ["kaggle", "datasets", "create", "-p", str(bundle.folder), *["--public"] * settings.public]
    report = {"folder": str(bundle.folder), "files": bundle.files, "bytes": total, "command": shlex.join(words)}
    lines = [
        *(f"{size:>15,}  {name}" for name, size in bundle.files.items()),
        f"{total:>15,}  bytes in {len(bundle.files)} files, for {metadata.dataset_id}, "
        f"{'public' if settings.public else 'private'} if it is new",
        f"folder   {bundle.folder}",
        f"command  {report['command']}",
    ]
    with Progress(total, "publish", "bytes") as progress:
        report["uploaded"] = send(bundle, settings, progress.advance_to)
    if report["uploaded"]:
        lines.append(f"uploaded, and all {len(bundle.files)} files arrived")
    elif settings.dry_run:
        lines.append("nothing was uploaded: this was a dry run")
    else:
        lines.append(
            "nothing was uploaded: kagglesdk is not installed here. Install it and run this again, or upload the "
            "folder by the command above, or by `kaggle datasets version -p FOLDER -m TEXT` if the dataset exists"
        )
    return report, lines


@command(
    "gs://bucket/train cache/train",
    value("url", "URL", "gs://, s3://, hf:// or https:// of a cache's folder, or a path"),
    value("directory", "DIR", "the folder to write, new or empty; run again to continue"),
)
def fetch(options: argparse.Namespace) -> Report:
    """Copy a cache from a URL into a folder."""
    from tpucache.publish.transfer import fetch_cache

    with Progress(None, "fetch", "bytes") as transfer:
        manifest = fetch_cache(options.url, options.directory, partial(transfer.show_stage, "fetch"))
    return _copy_report(options.directory, manifest)


@command(
    "cache/train gs://bucket/train",
    CACHE,
    value("url", "URL", "gs://, s3:// or hf:// of a folder, or a path; no other files may be in the folder"),
    flag("--hashes", "also send the hashes of all pictures, by which `compare` finds copies"),
)
def push(options: argparse.Namespace) -> Report:
    """Copy a cache to a URL."""
    from tpucache.publish.transfer import push_cache

    with Progress(None, "push", "bytes") as transfer:
        manifest = push_cache(options.cache, options.url, partial(transfer.show_stage, "push"), hashes=options.hashes)
    return _copy_report(shown(options.url), manifest)


def _copy_report(place: str, manifest: Manifest) -> Report:
    report = {
        "place": place,
        "samples": manifest.samples,
        "records": manifest.records,
        "fingerprint": manifest.fingerprint,
        "bytes": manifest.total_bytes,
    }
    line = f"{place}: {manifest.records:,} records, {manifest.total_bytes / 1e6:,.1f} MB, all checked"
    return report, [line]


@command(
    "--json",
    value("--cache-dir", "DIR", "the --cache-dir or cache= with which the caches were read", local_path),
    value("--clear", "NAME|all", "remove what has this URL, name or folder, or all; a cache can be built again"),
)
def cached(options: argparse.Namespace) -> Report:
    """List or remove the kept caches: copies of caches at URLs, and what ImageFolder, cached and from_hf have built."""
    from tpucache.adopt.kept import clear_folder, list_folders
    from tpucache.store.remote.cache import clear_kept, list_kept

    chosen, verb = options.clear, "" if options.clear is None else "removed, "

    def is_chosen(name: str, folder: Path) -> bool:
        return chosen in (None, "all", name, folder.name, str(folder))

    copies = [each for each in list_kept(options.cache_dir) if is_chosen(each.url, each.directory)]
    sets = [each for each in list_folders(options.cache_dir) if is_chosen(each.name, each.directory)]
    if chosen is not None:
        if not copies and not sets:
            raise UsageError(f"nothing is kept of {chosen}: give a URL, a name or a folder that `cached` lists, or all")
        for copy in copies:
            clear_kept(copy)
        for folder in sets:
            clear_folder(folder)
    lines = [
        f"{each.url}: {verb}{size_text(each.bytes)} of {size_text(each.total_bytes)}, in {each.directory}"
        for each in copies
    ]
    lines += [
        f"{each.name}: {verb}{size_text(each.bytes)}{each.problem and f', {each.problem}'}, in {each.directory}"
        for each in sets
    ]
    report = {"kept": [each.to_dict() for each in copies], "datasets": [each.to_dict() for each in sets]}
    return report, lines or ["nothing is kept, of caches at URLs or of data sets"]
