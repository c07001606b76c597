"""The commands publish, push, fetch and cached: copy finished caches, and manage local copies."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tpucache.cli.arguments import CACHE, JSON, fields_of, flag, from_options, local_path, value
from tpucache.cli.parser import command, say, show
from tpucache.errors import UsageError
from tpucache.process import tell
from tpucache.progress import Progress
from tpucache.publish.rules import Metadata, PublishOptions

if TYPE_CHECKING:
    from tpucache.store.manifest import Manifest


@command(
    'cache/train --id ann/birds-at-224 --title "Birds at 224" --license CC-BY-4.0 --dry-run',
    CACHE,
    JSON,
    fields_of(Metadata),
    fields_of(PublishOptions, without=["patience"]),
)
def publish(options: argparse.Namespace) -> int:
    """Publish a cache as a Kaggle Dataset."""
    from tpucache.publish.publish import prepare, send
    from tpucache.store.cache import Cache

    metadata, settings = from_options(Metadata, options), from_options(PublishOptions, options)
    manifest = Cache.open(options.cache).manifest
    with Progress(sum(entry.bytes for entry in manifest.shards), "verify", "bytes") as progress:
        bundle = prepare(
            options.cache,
            metadata,
            settings.out,
            lambda entry: progress.advance(entry.bytes),
            hashes=settings.hashes,
        )

    target = f"{metadata.dataset_id}, {'public' if options.public else 'private'} if it is new"
    words = ["kaggle", "datasets", "create", "-p", str(bundle.folder), *(["--public"] if settings.public else [])]
    total, command = sum(bundle.files.values()), shlex.join(words)
    report = {"folder": str(bundle.folder), "files": bundle.files, "bytes": total, "command": command}
    for line in (
        *(f"{size:>15,}  {name}" for name, size in bundle.files.items()),
        f"{total:>15,}  bytes in {len(bundle.files)} files, for {target}",
        f"folder   {bundle.folder}",
        f"command  {command}",
    ):
        (tell if options.json else say)(line)
    with Progress(total, "publish", "bytes") as progress:
        report["uploaded"] = send(bundle, settings, progress.advance_to)
    line = f"uploaded, and all {len(bundle.files)} files arrived"
    if not report["uploaded"]:
        line = "nothing was uploaded: this was a dry run"
        if not options.dry_run:
            line = (
                "nothing was uploaded: kagglesdk is not installed here. Install it and run this again, or upload the "
                "folder by the command above, or by `kaggle datasets version -p FOLDER -m TEXT` if the dataset exists"
            )
    show(options, report, [line])
    return 0


@command(
    "gs://bucket/train cache/train",
    value("url", "URL", "gs://, s3://, hf:// or https:// of a cache's folder, or a path"),
    value("directory", "DIR", "the folder to write, new or empty; run again to continue"),
    JSON,
)
def fetch(options: argparse.Namespace) -> int:
    """Copy a cache from a URL into a folder."""
    from tpucache.publish.transfer import fetch_cache

    with Progress(None, "fetch", "bytes") as transfer:
        manifest = fetch_cache(options.url, options.directory, partial(transfer.show_stage, "fetch"))
    _show_copy(options, str(options.directory), manifest)
    return 0


@command(
    "cache/train gs://bucket/train",
    CACHE,
    JSON,
    value("url", "URL", "gs://, s3:// or hf:// of a folder, or a path; no other files may be in the folder"),
    flag("--hashes", "also send the hashes of all pictures, by which `compare` finds copies"),
)
def push(options: argparse.Namespace) -> int:
    """Copy a cache to a URL."""
    from tpucache.publish.transfer import push_cache
    from tpucache.text import shown

    with Progress(None, "push", "bytes") as transfer:
        manifest = push_cache(options.cache, options.url, partial(transfer.show_stage, "push"), hashes=options.hashes)
    _show_copy(options, shown(options.url), manifest)
    return 0


@command(
    "--json",
    JSON,
    value("--cache-dir", "DIR", "the --cache-dir or cache= with which the caches were read", local_path),
    value("--clear", "NAME|all", "remove what has this URL, name or folder, or all; a cache can be built again"),
)
def cached(options: argparse.Namespace) -> int:
    """List or remove the kept caches: copies of caches at URLs, and what ImageFolder, cached and from_hf have built."""
    from tpucache.adopt.kept import clear_folder, list_folders
    from tpucache.store.remote.cache import clear_kept, list_kept
    from tpucache.text import size_text

    chosen = options.clear

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
    verb = "removed, " if chosen is not None else ""
    lines = [
        f"{each.url}: {verb}{size_text(each.bytes)} of {size_text(each.total_bytes)}, in {each.directory}"
        for each in copies
    ]
    lines += [
        f"{each.name}: {verb}{size_text(each.bytes)}{each.problem and f', {each.problem}'}, in {each.directory}"
        for each in sets
    ]
    report = {"kept": [each.to_dict() for each in copies], "datasets": [each.to_dict() for each in sets]}
    show(options, report, lines or ["nothing is kept, of caches at URLs or of data sets"])
    return 0


def _show_copy(options: argparse.Namespace, place: str, manifest: Manifest) -> None:
    report = {
        "place": place,
        "samples": manifest.samples,
        "records": manifest.records,
        "bytes": manifest.total_bytes,
        "fingerprint": manifest.fingerprint,
    }
    line = f"{place}: {manifest.records:,} records, {manifest.total_bytes / 1e6:,.1f} MB, all checked"
    show(options, report, [line])
