"""Names and options of a published dataset, and Kaggle's rules for it.

The rules come from version 2.2.5 of Kaggle's client and from Kaggle's documentation of dataset-metadata.json.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import UsageError
from tpucache.kaggle import check_id
from tpucache.options import option

METADATA_NAME: Final = "dataset-metadata.json"

#: Kaggle's names of licences.
LICENSES: Final = (
    "CC0-1.0",
    "CC-BY-3.0",
    "CC-BY-3.0-IGO",
    "CC-BY-4.0",
    "CC-BY-SA-3.0",
    "CC-BY-SA-4.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-SA-3.0-IGO",
    "CC-BY-NC-SA-4.0",
    "CC-BY-ND-4.0",
    "CC-BY-NC-ND-4.0",
    "CDLA-Permissive-1.0",
    "CDLA-Sharing-1.0",
    "DbCL-1.0",
    "ODC-BY-1.0",
    "ODbL-1.0",
    "PDDL",
    "apache-2.0",
    "AGPL-3.0",
    "FDL-1.3",
    "GPL-2.0",
    "GPL-3.0",
    "LGPL-3.0",
    "EU-ODP-Legal-Notice",
    "US-Government-Works",
    "copyright-authors",
    "other",
    "unknown",
)


@dataclass(frozen=True)
class Metadata:
    """The id, title and licence of a dataset. Raises UsageError for values that Kaggle does not accept."""

    dataset_id: str = option(MISSING, "owner and name of the Kaggle dataset", metavar="OWNER/SLUG", flag="id")
    title: str = option(MISSING, "title of the dataset, 6 to 50 characters", metavar="TITLE")
    license_name: str = option(
        None, "a license as Kaggle names it; without this option, all names are shown", metavar="NAME", flag="license"
    )

    def __post_init__(self) -> None:
        check_id(self.dataset_id)
        title, name = self.title.strip(), self.license_name
        object.__setattr__(self, "title", title)
        if not 6 <= len(title) <= 50 or not title.isprintable():
            raise UsageError(f"--title is 6 to 50 printable characters, not {title!r} ({len(title)})")
        if name not in LICENSES:
            given = f"{name!r} is not" if name else "there is no default: derived images keep their source's licence"
            raise UsageError(f"--license is one of {', '.join(LICENSES)}; {given}")


@dataclass(frozen=True)
class PublishOptions:
    """The options of the command `publish`, each with its help text."""

    message: str | None = option(None, "message of a new version; default: what the cache contains", metavar="TEXT")
    public: bool = option(False, "make a new dataset public")
    out: str | Path | None = option(None, "the folder to upload; CACHE.publish if not given", metavar="DIR")
    dry_run: bool = option(False, "make and check the folder, but upload nothing")
    hashes: bool = option(False, "add the hashes of all pictures, which are used to find copies")
