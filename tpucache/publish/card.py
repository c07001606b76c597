"""The card of a published cache, in Markdown: what it is, how to read it, how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.publish.rules import METADATA_NAME
from tpucache.publish.wheels import PackageWheel, needed_packages, wheel_name
from tpucache.store.manifest import Manifest

CARD_NAME: Final = "README.md"
SHEET_NAME: Final = "sheet.png"
_CLASSES: Final = 200
_SKIPPED: Final = 20
_ESCAPES: Final = {
    **{ord(letter): f"\\{letter}" for letter in "\\`*_[]"},
    **{ord(letter): f"&#{ord(letter)};" for letter in "<>|&"},
}


def write_card(
    manifest: Manifest,
    title: str,
    dataset_id: str,
    license_name: str,
    wheels: Sequence[PackageWheel] = (),
    *,
    sheet: bool,
) -> str:
    """Return a cache's card: what it is, how to read it, how it was made.

    `wheels` are those of other packages beside it. `sheet` shows the sheet of samples, too.
    """
    parts = [
        f"# {_text(title)}",
        _summary(manifest),
        f"![Samples down, variants across]({SHEET_NAME})" if sheet else "",
        _reading(manifest, dataset_id, wheels),
        _contents(manifest),
        _classes(manifest),
        _making(manifest, license_name),
        _wheels(wheels),
        _skipped(manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(manifest: Manifest) -> str:
    augmented = f", each in {manifest.augmented} augmented variants beside the clean one" if manifest.augmented else ""
    return (
        f"{manifest.samples:,} samples{augmented}: decoded, resized and augmented once by tpucache "
        f"{_text(manifest.created_by.get('tpucache', ''))}, to be read at memory speed for training on a TPU or "
        f"anything else. {manifest.total_bytes / 1e6:,.1f} MB in {len(manifest.shards)} shards."
    )


def _reading(manifest: Manifest, dataset_id: str, wheels: Sequence[PackageWheel]) -> str:
    variant = '"epoch"' if manifest.augmented else str(manifest.variants[0])
    packages = needed_packages(manifest)
    inside = [wheel.package for wheel in wheels]
    needs = ", ".join(("numpy", *packages)) + " and torch"
    bundled = " and ".join(("tpucache itself", *inside)) + (" are" if inside else " is")
    own = f"$(find /kaggle/input -name '{wheel_name()}' | head -n 1)"
    install = f"--find-links $(dirname {own}) tpucache {' '.join(inside)}" if wheels else own
    return f"""## How to read it

Add this dataset to a notebook. Reading needs {needs}; {bundled} in here, for notebooks
without a network:

```sh
pip install --no-deps --no-index {install}
```

```python
from tpucache import CachedDataset, CachedLoader

data = CachedDataset("kaggle:{dataset_id}", variant={variant})
for batch in CachedLoader(data, 256, shuffle=True, drop_last=True):
    ...
```

Elsewhere, give the folder instead of the name."""


def _contents(manifest: Manifest) -> str:
    rows = [
        (field.name, " x ".join(map(str, field.shape)) or "varies", np.dtype(field.dtype).name, field.codec)
        for field in manifest.fields
    ]
    table = _table(("field", "shape", "type", "stored as"), rows)
    numbers = (manifest.statistics.mean, manifest.statistics.std)
    mean, std = (" ".join(f"{value:.2f}" for value in values) for values in numbers)
    statistics = (
        f"\n\nMean {mean} and standard deviation {std} a channel of the clean images, from 0 to 255." if mean else ""
    )
    return f"## What is in it\n\n{table}{statistics}\n\nFingerprint `{manifest.fingerprint}`."


def _classes(manifest: Manifest) -> str:
    if not manifest.classes:
        return ""
    counts = manifest.statistics.class_counts or ("",) * len(manifest.classes)
    rows = [(name, f"{count:,}" if count != "" else "") for name, count in zip(manifest.classes, counts, strict=True)]
    more = f"\n\n{len(rows) - _CLASSES:,} more are in the manifest." if len(rows) > _CLASSES else ""
    return f"## Classes\n\n{_table(('class', 'samples'), rows[:_CLASSES])}{more}"


def _making(manifest: Manifest, license_name: str) -> str:
    recipe = _settings({name: value for name, value in manifest.recipe.items() if name != "augmentation"})
    return (
        f"## How it was made\n\n{recipe}\n\nWith {_inline(manifest.created_by)}.\n\nLicence: {license_name}. It is "
        f"that of the images it was made from. The bundled tpucache is under Apache-2.0. `manifest.json` has all "
        f"details, `{METADATA_NAME}` those that Kaggle was given."
    )


def _wheels(wheels: Sequence[PackageWheel]) -> str:
    if not wheels:
        return ""
    rows = [tuple(wheel.to_dict().values()) for wheel in wheels]
    return f"## Wheels of other packages\n\n{_table(('file', 'licence', 'SHA-256'), rows)}"


def _skipped(manifest: Manifest) -> str:
    if not manifest.skipped:
        return ""
    rows = [(skipped.path, skipped.reason) for skipped in manifest.skipped[:_SKIPPED]]
    more = (
        f"\n\n{len(manifest.skipped) - _SKIPPED:,} more are in the manifest."
        if len(manifest.skipped) > _SKIPPED
        else ""
    )
    return f"## Left out\n\n{_table(('file', 'reason'), rows)}{more}"


def _settings(values: Mapping[str, Any]) -> str:
    return _table(("setting", "value"), [(name, _plain(value)) for name, value in values.items()])


def _inline(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_text(name)} {_text(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else "not given" if value is None else str(value)


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = [header, ("---",) * len(header), *(tuple(map(_text, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    """Return a value as text that Markdown shows as it is: names of files and classes may hold anything."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    return text.translate(_ESCAPES)
