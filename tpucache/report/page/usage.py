"""How to read a cache, as Python code that can be copied and run."""

from __future__ import annotations

import json
from typing import Final

from tpucache.report.records import Records
from tpucache.store.fields import IMAGE, LABEL

_BATCH: Final = 256


def usage(records: Records) -> str:
    """Return Python that reads a cache in batches, from the folder that holds it.

    The name is written as JSON, which is also a Python string, in double quotes.
    """
    manifest = records.manifest
    batch = min(_BATCH, manifest.samples)
    variant = ', variant="epoch"' if manifest.augmented else ""
    labelled = "labels" if LABEL in records.table else "_"
    if [field.name for field in manifest.fields] == [IMAGE]:
        height, width, channels = manifest.fields[0].shape
        loop, comment = f"images, {labelled}", f"uint8 ({batch}, {channels}, {height}, {width}), channels last"
    else:
        names = [*(field.name for field in manifest.fields), LABEL]
        loop, comment = "batch", f"a dictionary of tensors: {', '.join(names)}"
    note = "  # another augmented variant every epoch" if variant else ""
    return (
        "from tpucache import CachedDataset, CachedLoader\n\n"
        f"dataset = CachedDataset({json.dumps(records.name, ensure_ascii=False)}{variant}){note}\n"
        f"for {loop} in CachedLoader(dataset, {batch}, shuffle=True, drop_last=True):\n"
        f"    ...  # {comment}\n"
    )
