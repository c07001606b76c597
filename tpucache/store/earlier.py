"""What the commits e3a34f9 and 8782811 wrote becomes what this version writes. This file goes in version 0.3.

No version was released before 0.2, but people have caches and runs of these two commits. Version 0.2 reads them, adds
to them and continues them; what it writes is of its own version, and has to be read without this file.

Each function takes plain values out of a file, and returns what this version would have written in their place; its own
it returns as they are. It is called where the file is read, so that nothing else depends on what wrote it.
docs/format.md, "Versions", says what people can do before 0.3.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: The version of tpucache that no longer has this file.
END: Final = "0.3"
#: The versions of manifests that the two commits wrote beside today's. Only their number is another: it was the lowest
#: that had the codecs of a cache.
VERSIONS: Final = (2, 3, 4, 5)

_CHUNK_BYTES: Final = 8 << 20

_log: Final = logging.getLogger("tpucache")


def plan(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of an interrupted warmup: e3a34f9 had no options that choose samples, labels or what to retry."""
    return {"labels": {"asked": "auto"}, "asked": {}, "retry": False, **content}


def code_definition(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of an augmentation in Python code, given today's of the same code.

    e3a34f9 did not look for the modules that the code imports: they are taken to be the same.
    """
    return {**({"helpers": now["helpers"]} if "helpers" in now else {}), **before}


def loader_state(state: Mapping[str, Any], own: Mapping[str, Any], record_bytes: int) -> Mapping[str, Any]:
    """Return a loader's state, given that of the loader that is to continue there, and the mean bytes of its records.

    e3a34f9 recorded the cache's fingerprint, but neither the selection of samples, of which it is warned, nor the size
    of chunks, which followed from the records of all variants.
    """
    if "digest" in state:
        return state
    _log.warning(
        "the loader's state was written before version 0.2: cache, number of samples and order are compared, but "
        "variant, labels, selection and added variants could not be compared"
    )
    fingerprint = state.get("fingerprint")
    digest = own["digest"] if fingerprint == own["fingerprint"] else f"of the fingerprint {fingerprint}"
    chunk = max(1, _CHUNK_BYTES // max(1, record_bytes)) if own["chunk"] else 0
    return {**state, "digest": digest, "chunk": chunk, "drawn": ""}


def renamed(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a `last.pt` or a `best.pt` holds, not checked yet: both commits called the setting `ramp` warmup."""
    settings = content.get("settings")
    if not isinstance(settings, dict) or "warmup" not in settings:
        return content
    return {**content, "settings": {"ramp" if name == "warmup" else name: value for name, value in settings.items()}}


def checkpoint(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a `last.pt` or a `best.pt` holds.

    Both commits computed in float32 or bfloat16 and recorded the latter as `bf16`. e3a34f9 recorded no digests of the
    data, and took NaN for the best value.
    """
    settings, stand = content["settings"], content.get("stand")
    precision = "bf16" if settings.get("bf16") else "float32"
    found = {"digests": {}, **content, "settings": {"precision": precision, **settings}}
    if isinstance(stand, dict) and isinstance(best := stand.get("best"), float) and math.isnan(best):
        found["stand"] = {**stand, "best": None}
    return found


def decays_all(state: Mapping[str, Any], groups: Sequence[int]) -> bool:
    """Return whether an optimizer's state is that of one in which all weights decay, given the sizes of today's groups.

    e3a34f9 let weights decay that the model excepts from it: a run is continued as it began.
    """
    return [len(group["params"]) for group in state["param_groups"]] != [*groups]


def report(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's `report.json` holds."""
    return {**values, "backend": backend(values["backend"])}


def backend(name: str) -> str:
    """Return the name of a backend: plain torch was called eager."""
    return {"eager": "torch"}.get(name, name)
