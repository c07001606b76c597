"""An add-on dataset, `owner/slug-v2`: the files of a cache's version 2 that no dataset at Kaggle has yet.

A new version of a Kaggle dataset needs an upload of all its files. An add-on holds only the new shards, the tables and
the manifest. Where both datasets are mounted, `kaggle:owner/slug@2` joins them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DamageError, FormatError, PublishError
from tpucache.kaggle import check_id
from tpucache.loading.find import PARENTS_NAME, to_parents
from tpucache.publish.bundle import CARD_NAME, make_card
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.report.inspect import describe_versions
from tpucache.store.cache import Cache
from tpucache.store.copying import folder_path
from tpucache.store.files import read_file
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, TIMES_NAME
from tpucache.store.history import version_files
from tpucache.store.manifest import Manifest
from tpucache.store.remote.draft import Content, Draft, in_memory, of_file
from tpucache.store.remote.kaggle import KaggleDataset
from tpucache.store.verify import is_whole

_SHEET_BYTES: Final = 1_000_000  # a new version of the whole dataset would include a sheet of samples


@dataclass(frozen=True)
class Addition:
    """An add-on that is ready to send: `contents` are its files by name.

    `attach` has the datasets that hold the cache's other files, and `whole_bytes` is the size of a new version of the
    whole dataset. `is_there` is whether Kaggle has this version of the cache already.
    """

    dataset_id: str
    cache: Path
    manifest: Manifest
    contents: Mapping[str, Content] = field(repr=False)
    attach: tuple[str, ...]
    whole_bytes: int
    is_there: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(content.bytes for content in self.contents.values())

    @property
    def is_cheaper(self) -> bool:
        return bool(self.attach) and self.total_bytes < self.whole_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return what will be sent, as JSON values."""
        return {
            "dataset": self.dataset_id,
            "version": self.manifest.number,
            "files": {name: content.bytes for name, content in self.contents.items()},
            "bytes": self.total_bytes,
            "whole_bytes": self.whole_bytes,
            "attach": list(self.attach),
            "uploaded": False,
        }


def plan_addition(cache: str | Path, metadata: Metadata, notes: str) -> Addition:
    """Ask Kaggle which files of a cache are already published, and return an add-on with all other files of the cache.

    `notes` is the text about the version in the card. Raises PublishError if the cache is not published yet, if the
    add-on's name is taken, or if Kaggle does not answer; DependencyError without kagglesdk.
    """
    opened = Cache.open(folder_path(cache))
    folder, manifest = opened.directory, opened.manifest
    known = {identity: number for number, identity in enumerate(manifest.parents, 1)} | {
        manifest.identity: manifest.number
    }
    files = {entry.name: entry for entry in version_files(folder, manifest)}
    addition_id, where = f"{metadata.dataset_id}-v{manifest.number}", dict[str, str]()
    is_there, has_base = False, False
    names = [metadata.dataset_id, *(f"{metadata.dataset_id}-v{number}" for number in range(2, manifest.number + 1))]
    for name in names:
        dataset = KaggleDataset(name)
        try:
            found = _manifest_of(dataset)
            has_base |= name == metadata.dataset_id and found is not None
            number = known.get(found.identity) if found else None
            if number is None:
                if found and name == addition_id:
                    raise PublishError(
                        f"the dataset {name} holds another cache or version already: give another --id, or remove "
                        "that dataset"
                    )
                continue
            if name == addition_id and number == manifest.number:
                is_there = True
                continue  # this add-on has been sent already
            is_there |= number == manifest.number
            listed = dataset.files()
            for entry in files.values():
                if listed.get(entry.name) == entry.bytes:
                    where.setdefault(entry.name, name)
        finally:
            dataset.close()
    if not has_base:
        raise PublishError(
            f"{metadata.dataset_id} is not a dataset with a cache: publish the cache without --version-notes first"
        )
    new = [entry for entry in files.values() if entry.name not in where]
    attach = tuple(dict.fromkeys(where[entry.name] for entry in manifest.files if entry.name in where))
    versions, times = opened.versions()
    card = make_card(
        manifest,
        f"{metadata.title}, version {manifest.number}",
        metadata.dataset_id,
        metadata.license_name,
        history=describe_versions(versions, times),
        attach=attach,
        notes=notes,
    )
    others = {MANIFEST_NAME: manifest.text.encode(), CARD_NAME: card.encode()}
    others[PARENTS_NAME] = (json.dumps(to_parents(where), indent=1) + "\n").encode()
    if (folder / TIMES_NAME).exists():
        others[TIMES_NAME] = read_file(folder / TIMES_NAME)
    contents = {entry.name: of_file(folder, entry) for entry in new}
    contents |= {name: in_memory(data) for name, data in others.items()}
    whole = manifest.total_bytes + sum(map(len, others.values())) + _SHEET_BYTES
    return Addition(addition_id, folder, manifest, contents, attach, whole, is_there)


def send_addition(
    addition: Addition,
    metadata: Metadata,
    options: PublishOptions,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """Upload an add-on, and wait until Kaggle lists its files. `advance` is called with the bytes done so far.

    A journal next to the cache records what was sent, so that the next call continues after a kill. Raises
    PublishError, UnfinishedError, BuildError for a journal that cannot be used, and DamageError for a damaged file.
    """
    dataset = KaggleDataset(check_id(addition.dataset_id, "the add-on's name"))
    owner, _, slug = addition.dataset_id.partition("/")
    real, entries = addition.cache.resolve(), {entry.name: entry for entry in addition.manifest.files}
    journal = real.with_name(f"{real.name}.{owner}.{slug}.json")
    try:
        draft, done = Draft(dataset, journal), 0
        if draft.asked_after is None:
            draft.forget_expired()
        contents = {name: draft.as_asked_for(name, content) for name, content in addition.contents.items()}
        for name, content in sorted(contents.items()):
            if name in entries and not is_whole(addition.cache, entries[name]):
                raise DamageError(f"{addition.cache / name} is damaged: run `tpucache verify {addition.cache}`")
            draft.send(name, content, partial(_advance_from, advance, done))
            done += content.bytes
            advance(done)
        notes = options.version_notes or ""
        draft.commit(contents, slug, notes, options.patience, metadata.license_name, is_private=not options.public)
        journal.unlink(missing_ok=True)
    finally:
        dataset.close()


def _advance_from(advance: Callable[[int], None], before: int, arrived: int) -> None:
    advance(before + arrived)


def _manifest_of(dataset: KaggleDataset) -> Manifest | None:
    data = dataset.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    try:
        return None if data is None else Manifest.from_json(data)
    except FormatError:
        return None
