"""An add-on dataset, `owner/slug-v2`: the files of a cache's version 2 that no dataset at Kaggle has yet.

A new version of a Kaggle dataset needs an upload of all its files. An add-on holds only the new shards, the tables and
the manifest. Where both datasets are mounted, `kaggle:owner/slug@2` joins them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DamageError, FormatError, PublishError
from tpucache.loading.find import PARENTS_NAME, to_parents
from tpucache.publish.bundle import CARD_NAME, make_card
from tpucache.publish.publish import upload
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.report.inspect import describe_versions
from tpucache.store.cache import Cache
from tpucache.store.copying import folder_path
from tpucache.store.files import read_file
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, TIMES_NAME
from tpucache.store.history import version_files
from tpucache.store.manifest import Manifest
from tpucache.store.remote.kaggle import Content, KaggleDataset, in_memory, of_file
from tpucache.store.verify import is_whole

_SHEET_BYTES: Final = 1_000_000  # a new version of the whole dataset would include a sheet of samples


@dataclass(frozen=True)
class Addition:
    """An add-on that is ready to send: `contents` are its files by name.

    `attach` has the datasets that hold the cache's other files, and `whole_bytes` is the size of a new version of the
    whole dataset. `is_there` is whether Kaggle has this version of the cache already.
    """

    metadata: Metadata
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
            "dataset": self.metadata.dataset_id,
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
    known = dict(zip([*manifest.parents, manifest.identity], range(1, manifest.number + 1), strict=True))
    files, base = version_files(folder, manifest), metadata.dataset_id
    addition_id = f"{base}-v{manifest.number}"
    addition = replace(metadata, dataset_id=addition_id, title=addition_id.partition("/")[2])
    where, has_base, is_there = dict[str, str](), False, False
    for name in (base, *(f"{base}-v{number}" for number in range(2, manifest.number + 1))):
        with closing(KaggleDataset(name)) as dataset:
            found = _manifest_of(dataset)
            if found is None:
                continue
            has_base |= name == base
            number = known.get(found.identity)
            if number is None and name == addition_id:
                raise PublishError(
                    f"the dataset {name} holds another cache or version already: give another --id, or remove that "
                    "dataset"
                )
            is_there |= number == manifest.number
            if number is None or (is_there and name == addition_id):  # the latter is what this call would send
                continue
            listed = dataset.files()
            for entry in files:
                if listed.get(entry.name) == entry.bytes:
                    where.setdefault(entry.name, name)
    if not has_base:
        raise PublishError(f"{base} is not a dataset with a cache: publish the cache without --version-notes first")
    attach = tuple(dict.fromkeys(where[entry.name] for entry in manifest.files if entry.name in where))
    card = make_card(
        manifest,
        f"{metadata.title}, version {manifest.number}",
        base,
        metadata.license_name,
        history=describe_versions(*opened.versions()),
        attach=attach,
        notes=notes,
    )
    parents = json.dumps(to_parents(where), indent=1) + "\n"
    others = {MANIFEST_NAME: manifest.text.encode(), CARD_NAME: card.encode(), PARENTS_NAME: parents.encode()}
    if (folder / TIMES_NAME).exists():
        others[TIMES_NAME] = read_file(folder / TIMES_NAME)
    new = tuple(entry for entry in files if entry.name not in where)
    contents = {entry.name: of_file(folder, entry) for entry in new}
    contents |= {name: in_memory(data) for name, data in others.items()}
    whole = manifest.total_bytes + sum(map(len, others.values())) + _SHEET_BYTES
    return Addition(addition, folder, manifest, contents, attach, whole, is_there)


def send_addition(
    addition: Addition, options: PublishOptions, advance: Callable[[int], None] = lambda done: None
) -> None:
    """Upload an add-on (see `upload`). Raises DamageError for a damaged file, too."""
    for entry in addition.manifest.files:
        if entry.name in addition.contents and not is_whole(addition.cache, entry):
            raise DamageError(f"{addition.cache / entry.name} is damaged: run `tpucache verify {addition.cache}`")
    notes = options.version_notes or ""
    upload(addition.metadata, addition.cache, addition.contents, options, advance, description=notes, notes=notes)


def _manifest_of(dataset: KaggleDataset) -> Manifest | None:
    data = dataset.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    try:
        return None if data is None else Manifest.from_json(data)
    except FormatError:
        return None
