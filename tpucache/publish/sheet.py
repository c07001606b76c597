"""The sheet of samples that a card shows."""

from __future__ import annotations

import io
from pathlib import Path

from tpucache.report.preview import preview_cache
from tpucache.report.records import Records


def contact_sheet(cache: str | Path) -> bytes | None:
    """Return some samples of a cache, variants across, as a PNG; None where records hold no images.

    Raises DependencyError without Pillow, and what `preview_cache` raises for a damaged cache.
    """
    if Records(cache).image is None:
        return None
    target = io.BytesIO()
    preview_cache(cache, side=128).save(target, "PNG")
    return target.getvalue()
