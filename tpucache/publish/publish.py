"""Publish a cache as a Kaggle dataset: verify the cache, make the folder, upload its files, and check what arrived."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tpucache.errors import DamageError
from tpucache.publish.bundle import Bundle, make_bundle
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.remote.kaggle import Draft, KaggleDataset, version_notes
from tpucache.store.verify import verify_cache
from tpucache.text import named


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
        names = {damage.name for damage in damages}
        raise DamageError(
            f"{cache} is damaged: {named(sorted(names))}. Run `tpucache verify {cache}`, and build the cache again"
        )
    return make_bundle(cache, metadata, out, hashes=hashes)


def send(
    bundle: Bundle,
    options: PublishOptions | None = None,
    advance: Callable[[int], None] = lambda done: None,
    patience: float = 600.0,
) -> bool:
    """Upload a folder as a new dataset, or as the dataset's next version, and return once Kaggle lists all files.

    A journal beside the folder records what was sent, so that the next call continues after a kill. `advance` is
    called with the number of bytes done. Kaggle has `patience` seconds to process the dataset. Returns False on a dry
    run, or without kagglesdk. Raises PublishError, UnfinishedError, and BuildError for a journal that cannot be used.
    """
    options, metadata = options or PublishOptions(), bundle.metadata
    if options.dry_run or find_spec("kagglesdk") is None:
        return False
    place = bundle.folder.resolve()
    journal = place.with_name(f"{place.name}.{metadata.dataset_id.replace('/', '.')}.json")
    with closing(KaggleDataset(metadata.dataset_id)) as dataset:
        draft, done = Draft(dataset, journal), 0

        def show(arrived: int) -> None:
            advance(done + arrived)

        for name, content in sorted(bundle.contents.items()):
            draft.send(name, content, show)
            done += content.bytes
            advance(done)
        create = partial(
            dataset.create,
            title=metadata.title,
            description=bundle.card,
            license_name=metadata.license_name,
            is_private=not options.public,
        )
        notes = options.message or version_notes(Manifest.load(bundle.folder))
        draft.commit(bundle.contents, create, notes, patience)
        journal.unlink(missing_ok=True)
    return True
