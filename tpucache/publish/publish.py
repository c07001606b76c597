"""Publish a cache as a Kaggle dataset: verify the cache, make the folder, upload its files, and check what arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tpucache.errors import DamageError
from tpucache.kaggle import check_id
from tpucache.publish.bundle import Bundle, make_bundle
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.remote.kaggle import Content, Draft, KaggleDataset
from tpucache.store.verify import verify_cache

_MOST_NAMED: Final = 10


def prepare(
    cache: str | Path,
    metadata: Metadata,
    out: str | Path | None = None,
    on_progress: Callable[[ShardEntry], None] = lambda entry: None,
    *,
    hashes: bool = False,
) -> Bundle:
    """Verify a cache and make the folder to upload (see `make_bundle`). `on_progress` is called after each shard.

    Raises DamageError for a damaged cache, and the errors of `make_bundle`.
    """
    damages = verify_cache(cache, on_progress)
    if damages:
        names = ", ".join(sorted({damage.name for damage in damages})[:_MOST_NAMED])
        raise DamageError(f"{cache} is damaged: {names}. Run `tpucache verify {cache}`, and build the cache again")
    return make_bundle(cache, metadata, out, hashes=hashes)


def send(
    bundle: Bundle, options: PublishOptions | None = None, advance: Callable[[int], None] = lambda done: None
) -> bool:
    """Upload a folder as a new dataset, or as the dataset's next version (see `upload`).

    Returns False without uploading on a dry run, or if kagglesdk is not installed.
    """
    options = options or PublishOptions()
    if options.dry_run or find_spec("kagglesdk") is None:
        return False
    manifest = Manifest.load(bundle.folder)
    message = f"{manifest.samples:,} samples, {manifest.records:,} records, {manifest.fingerprint[:12]}"
    notes = options.message or message
    upload(bundle.metadata, bundle.folder, bundle.contents, options, advance, description=bundle.card, notes=notes)
    return True


def upload(
    metadata: Metadata,
    folder: Path,
    contents: Mapping[str, Content],
    options: PublishOptions,
    advance: Callable[[int], None],
    *,
    description: str,
    notes: str,
) -> None:
    """Upload files as a new dataset with a description, or as a dataset's next version with notes.

    Returns when Kaggle lists all files. A journal beside `folder` records what was sent, so that the next call
    continues after a kill. `advance` is called with the number of bytes done. Raises PublishError, UnfinishedError,
    BuildError for a journal that cannot be used, and DependencyError without kagglesdk.
    """
    place = folder.resolve()
    journal = place.with_name(f"{place.name}.{check_id(metadata.dataset_id).replace('/', '.')}.json")
    with closing(KaggleDataset(metadata.dataset_id)) as dataset:
        draft, done = Draft(dataset, journal), 0

        def show(arrived: int) -> None:
            advance(done + arrived)

        if draft.asked_after is None:
            draft.forget_expired()
        contents = {name: draft.as_asked_for(name, content) for name, content in contents.items()}
        for name, content in sorted(contents.items()):
            draft.send(name, content, show)
            done += content.bytes
            advance(done)
        text = description if dataset.version() is None else notes
        public, license_name = options.public, metadata.license_name
        draft.commit(contents, metadata.title, text, options.patience, license_name, is_private=not public)
        journal.unlink(missing_ok=True)
