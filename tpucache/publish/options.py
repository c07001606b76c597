"""What a dataset on Kaggle is called, and how a cache is published as one."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from tpucache.options import option
from tpucache.publish import rules


@dataclass(frozen=True)
class Metadata:
    """What Kaggle needs to know about a dataset. Raises UsageError for what Kaggle does not accept."""

    dataset_id: str = option(MISSING, "owner and name of the Kaggle dataset", metavar="OWNER/SLUG", flag="id")
    title: str = option(MISSING, "title, 6 to 50 characters")
    license_name: str = option(
        None, "a license as Kaggle names it; leave it out to see the names", metavar="NAME", flag="license"
    )

    def __post_init__(self) -> None:
        rules.check_id(self.dataset_id)
        object.__setattr__(self, "title", rules.check_title(self.title))
        rules.check_license(self.license_name)

    def to_dict(self, description: str) -> dict[str, Any]:
        """Return the content of dataset-metadata.json."""
        names = {"title": self.title, "id": self.dataset_id, "description": description}
        return {**names, "licenses": [{"name": self.license_name}]}


@dataclass(frozen=True)
class PublishOptions:
    """How a cache is published: `out` is the folder to upload, `patience` the seconds that Kaggle may take for it.

    `wheels` is the tag of a Python. Raises UsageError for one that is none.
    """

    message: str | None = option(None, "message of a new version; default: what the cache contains", metavar="TEXT")
    public: bool = option(False, "make a new dataset public")
    out: str | Path | None = option(None, "the folder to upload; CACHE.publish if not given", metavar="DIR")
    dry_run: bool = option(False, "make the folder and check it, upload nothing")
    wheels: str | None = option(
        None,
        "add wheels of the packages that the codec may need (zstandard, lz4), for this Python on Linux x86-64",
        metavar="cp312",
    )
    patience: float = option(600.0, "time for Kaggle to process it", metavar="10m")

    def __post_init__(self) -> None:
        if self.wheels is not None:
            rules.check_tag(self.wheels)
