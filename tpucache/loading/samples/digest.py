"""The digest of a dataset: two that share it give the same samples in the same order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.store.manifest import Manifest, ShardEntry


def digest_of(
    manifest: Manifest,
    variant: int | str,
    shards: Iterable[ShardEntry],
    labels: npt.NDArray[Any] | None,
    positions: npt.NDArray[np.int64],
) -> str:
    """Return a SHA-256, in hexadecimal, of the records in these shards, the labels, and the positions in their order.

    Records count by their own hash, so that the page size of the machine that wrote a shard does not matter.
    """
    facts = {
        "variant": variant,
        "fields": [field.to_dict() for field in manifest.fields],
        "classes": manifest.classes,
        "shards": [(entry.name, entry.first, entry.records, entry.records_sha256) for entry in shards],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in (np.empty(0) if labels is None else labels, positions):
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
