"""The card of a published cache, a page in Markdown: what the cache is, how to read it, how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.publish.rules import METADATA_NAME
from tpucache.publish.wheels import PackageWheel, needed_packages, wheel_name
from tpucache.report.inspect import recipe_texts, version_texts
from tpucache.report.page import fill
from tpucache.store.manifest import Manifest

CARD_NAME: Final = "README.md"
SHEET_NAME: Final = "sheet.png"
_CLASSES: Final = 200
_SKIPPED: Final = 20
_ESCAPES: Final = {
    **{ord(letter): f"\\{letter}" for letter in "\\`*_[]"},
    **{ord(letter): f"&#{ord(letter)};" for letter in "<>|&"},
}


def make_card(
    manifest: Manifest,
    title: str,
    dataset_id: str,
    license_name: str | None,
    wheels: Sequence[PackageWheel] = (),
    *,
    sheet: bool,
    history: Sequence[Mapping[str, Any]] = (),
    attach: Sequence[str] = (),
    notes: str = "",
) -> str:
    """Return a cache's card as Markdown text.

    Without a licence, the card says "not stated yet". `wheels` are the wheels of other packages that are published with
    the cache. With `sheet`, the card shows the picture `SHEET_NAME`, a sheet of samples. `history` is the result of
    `describe_versions`. For an add-on dataset, `attach` names the datasets that hold the cache's other files, and
    `notes` is a text by the dataset's owner. Raises DependencyError without jinja2.
    """
    inside = [wheel.package for wheel in wheels]
    statistics = manifest.statistics
    mean, std = (" ".join(f"{value:.2f}" for value in values) for values in (statistics.mean, statistics.std))
    values = {
        "title": title,
        "samples": f"{manifest.samples:,}",
        "augmented": manifest.augmented,
        "version": manifest.created_by.get("tpucache", ""),
        "megabytes": f"{manifest.total_bytes / 1e6:,.1f}",
        "shards": len(manifest.shards),
        "sheet": SHEET_NAME if sheet else "",
        "needs": ", ".join(("numpy", *needed_packages(manifest))) + " and torch",
        "bundled": " and ".join(("tpucache itself", *inside)) + (" are" if inside else " is"),
        "wheel": wheel_name(),
        "packages": " ".join(inside),
        "dataset_id": dataset_id,
        "variant": '"epoch"' if manifest.augmented else manifest.variants[0],
        "fields": [
            (field.name, " x ".join(map(str, field.shape)) or "varies", np.dtype(field.dtype).name, field.codec)
            for field in manifest.fields
        ],
        "mean": mean,
        "std": std,
        "fingerprint": manifest.fingerprint,
        "classes": _classes(manifest)[:_CLASSES],
        "more_classes": _more(len(manifest.classes), _CLASSES),
        "recipe": list(recipe_texts(manifest).items()),
        "made_by": ", ".join(map(" ".join, version_texts(manifest).items())),
        "license": license_name or "not stated yet",
        "metadata": METADATA_NAME,
        "wheels": [tuple(wheel.to_dict().values()) for wheel in wheels],
        "notes": notes,
        "attach": attach,
        "number": manifest.number,
        "history": [
            (each["version"], each["time"] or "", f"{each['samples']:,}", each["command"], ", ".join(each["changes"]))
            for each in history
        ],
        "skipped": [(skipped.path, skipped.reason) for skipped in manifest.skipped[:_SKIPPED]],
        "more_skipped": _more(len(manifest.skipped), _SKIPPED),
    }
    return fill("tpucache.publish", "card.md.jinja", values, to_markdown)


def to_markdown(value: object) -> str:
    """Return a value as text that Markdown shows unchanged. Names of files and classes may hold any character."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    return text.translate(_ESCAPES)


def _classes(manifest: Manifest) -> list[tuple[str, str]]:
    """Return each class's name and its number of samples as text, "" if the number is unknown."""
    counts = [f"{count:,}" for count in manifest.statistics.class_counts] or [""] * len(manifest.classes)
    return list(zip(manifest.classes, counts, strict=True))


def _more(count: int, shown: int) -> str:
    return f"{count - shown:,}" if count > shown else ""
