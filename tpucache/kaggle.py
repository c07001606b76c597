"""Kaggle's rules for building and publishing: the size of `/kaggle/working`, the limits and names of datasets."""

from __future__ import annotations

import re
from typing import Final

from tpucache.errors import UsageError

#: The size of /kaggle/working, in bytes.
WORKING_BYTES: Final = 20_000_000_000
#: The largest size of a dataset, in bytes.
MAX_BYTES: Final = 200_000_000_000
#: The most files of a dataset. With more, kagglehub and the web page zip all of them. The metadata file is not
#: uploaded, and does not count.
MAX_FILES: Final = 50
#: The files of a published cache other than shards: manifest, index, samples, card, and sheet of samples.
COMPANIONS: Final = 5
#: The most shards that can be published.
MAX_SHARDS: Final = MAX_FILES - COMPANIONS
#: The most shards that `--target kaggle` makes, which leaves room for the hashes of pictures.
TARGET_SHARDS: Final = MAX_SHARDS - 1

SLUG_LENGTH: Final = range(6, 51)
_ID: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)/([a-z0-9]+(?:-[a-z0-9]+)*)")


def check_id(dataset_id: str, what: str = "--id") -> str:
    """Return `dataset_id` unchanged if it is an owner/slug that Kaggle accepts; raise UsageError otherwise.

    `what` names the option or argument in the message.
    """
    found = _ID.fullmatch(dataset_id)
    if not found or len(found[2]) not in SLUG_LENGTH:
        raise UsageError(
            f"{what} is owner/slug, where the slug has {SLUG_LENGTH[0]} to {SLUG_LENGTH[-1]} lower-case letters and "
            f"digits, with single hyphens between them, not {dataset_id!r}"
        )
    return dataset_id
