"""The contact sheet as a part of a page: figures that fill the width they have."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt

from tpucache.report.draw import draw_record
from tpucache.report.page.markup import escape
from tpucache.report.preview import variant_name
from tpucache.report.records import Records
from tpucache.report.text import describe_label
from tpucache.store.fields import IMAGE, Field

Array = npt.NDArray[Any]

_DENSE: Final = 2  # pictures have so many times the pixels that a page shows them in, for dense screens
_SIDE: Final = 128 * _DENSE
_DRAWN_SIDE: Final = 176 * _DENSE  # of pictures with something drawn over them, which is to be read
_QUALITY: Final = 85
_SMALL: Final = 64


def frames(records: Records, samples: int, seed: int, variants: int) -> str:
    """Return the contact sheet of a page: at most `samples` and `variants`; nothing where there is no image."""
    image = records.image
    chosen = records.choose(samples, seed) if image is not None else []
    if image is None or not chosen:
        return ""
    shown = records.manifest.variants[: max(1, variants)]
    look = look_of(records, image)
    width = min(1080, 170 * len(shown)) if look == "drawn" else min(560, 72 + 88 * len(shown))
    figures = "".join(_figure(records, position, shown, look) for position in chosen)
    return (
        f'<div class="sheet"><h2>Samples</h2><p class="note">{_note(records, len(chosen), shown)}</p>'
        f'<div class="frames" style="--strip:{width}px">{figures}</div></div>'
    )


def _note(records: Records, count: int, shown: Sequence[int]) -> str:
    labels, manifest = records.table.labels, records.manifest
    note = f"All {count:,}" if count == manifest.samples else f"{count:,} of {manifest.samples:,}, at random"
    if count < manifest.samples and labels is not None and labels.ndim == 1 and manifest.classes:
        note += " from each class in turn"
    if len(manifest.variants) == 1:
        return f"{note}."
    more = len(manifest.variants) - len(shown)
    rest = f", and {more:,} more are in the cache" if more else ""
    return f"{note}. Variants: {', '.join(map(variant_name, shown))}{rest}."


def look_of(records: Records, image: Field) -> str:
    """Return how pictures are shown: `drawn` over, `small` as they are, their pixels as squares, or `plain`."""
    if len(records.manifest.fields) > 1:
        return "drawn"
    return "small" if max(image.shape[:2]) <= _SMALL else "plain"


def _figure(records: Records, position: int, variants: Sequence[int], look: str) -> str:
    classes = records.manifest.classes
    label = escape(describe_label(records.label(position), classes))
    path = escape(records.table.paths[position])
    pictures = "".join(
        f'<img {picture(records.read(position, variant), classes, look)} alt="{label}, {variant_name(variant)}">'
        for variant in variants
    )
    return (
        f'<figure><div class="strip {look}">{pictures}</div><figcaption>'
        f'<span class="label" title="{label}">{label}</span><span class="frame">'
        f'{int(records.table.numbers[position])}</span><span class="path" title="{path}">{path}</span>'
        "</figcaption></figure>"
    )


def picture(fields: Mapping[str, Array], classes: Sequence[str], look: str) -> str:
    """Return the attributes of an <img> with its picture inside: PNG where single pixels are shown, else JPEG."""
    side = {"drawn": _DRAWN_SIDE, "small": max(fields[IMAGE].shape[:2])}.get(look, _SIDE)
    drawn, target = draw_record(fields, classes, side, _DENSE), io.BytesIO()
    kind = "png" if look == "small" else "jpeg"
    drawn.save(target, kind, **({} if kind == "png" else {"quality": _QUALITY}))
    data = base64.b64encode(target.getvalue()).decode()
    return f'src="data:image/{kind};base64,{data}" width="{drawn.width}" height="{drawn.height}"'
