"""Caches of any content, written record by record, without warmup, and pages as a browser takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import written

from scripts.browser import open_browser
from scripts.commands import CommandError
from tpucache.store.codecs import encode
from tpucache.store.fields import Field, RecordLayout
from tpucache.store.manifest import Skipped, Statistics
from tpucache.store.samples import Strings

Array = npt.NDArray[Any]

#: What a cache must not be able to put into a page or a terminal: markup, a quote, a line end, no UTF-8, a reversal.
HOSTILE = "<script>alert('x')</script>\"'&\n\udcff\u202e"
CLASSES = ("ant", HOSTILE, "a class with a name that is far too long to fit under any picture of any sheet" * 3, "日本")


def image_field(side: int = 20) -> Field:
    return Field("image", "raw", "|u1", (side, side + 4, 3))


def write_cache(
    directory: Path,
    fields: Sequence[Field],
    variants: Sequence[Sequence[Mapping[str, Array]]],
    *,
    labels: Array | None = None,
    classes: Sequence[str] = (),
    paths: Sequence[str] | None = None,
    skipped: Sequence[tuple[str, str]] = (),
    source_bytes: Sequence[int] | None = None,
    **facts: Any,
) -> Path:
    """Write a whole cache: `variants[v][i]` are the fields of sample i by name."""
    directory.mkdir(parents=True)
    samples, layout = len(variants[0]), RecordLayout(tuple(fields))
    found = {
        "path": Strings.pack(paths or [f"folder/{number:04d}.png" for number in range(samples)]),
        "source_bytes": None if source_bytes is None else np.array(source_bytes, np.uint64),
        "label": labels,
    }
    counts: Array = np.zeros(0, np.int64)
    if labels is not None and classes:
        counts = (labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(len(classes))).sum(axis=0)
    default = {"recipe": {"size": [20, 24], "augmentation": {"transform": HOSTILE}}}
    written.write_cache(
        directory,
        fields,
        [
            [layout.join([encode(field, record[field.name]) for field in fields]) for record in each]
            for each in variants
        ],
        block=samples,
        columns={name: column for name, column in found.items() if column is not None},
        classes=tuple(classes),
        skipped=tuple(Skipped(number, path, reason) for number, (path, reason) in enumerate(skipped)),
        statistics=Statistics((10.0, 20.0, 30.0), (1.0, 2.0, 3.0), class_counts=tuple(counts.tolist())),
        created_by={"tpucache": "0", "numpy": HOSTILE},
        **{**default, **facts},
    )
    return directory


def patches(seed: int, field: Field) -> Array:
    """Return an image that looks like no other: squares of 2 pixels of random colours."""
    height, width, channels = field.shape
    colours = np.random.default_rng(seed).integers(0, 256, (height // 2 + 1, width // 2 + 1, channels), np.uint8)
    return np.repeat(np.repeat(colours, 2, 0), 2, 1)[:height, :width]


def plain_cache(directory: Path, *, samples: int = 12, variants: int = 3, **more: Any) -> Path:
    """Write a cache of nothing but images, in the classes of CLASSES in turn unless `labels` say otherwise."""
    field = image_field()
    records = [[{"image": patches(samples * v + i, field)} for i in range(samples)] for v in range(variants)]
    known = {"labels": np.arange(samples) % len(CLASSES), "classes": CLASSES}
    return write_cache(directory, [field], records, **{**known, **more})


def drawn_cache(directory: Path, samples: int = 6) -> Path:
    """Write a cache of images with masks, boxes and keypoints, several classes a sample, two variants."""
    image, mask = image_field(40), Field("mask", "raw", "|u1", (40, 44, 1))
    fields = [image, mask, Field("boxes", "raw", "<f4", (3, 5)), Field("keypoints", "raw", "<f4", (2, 3))]
    record: dict[str, Array] = {"mask": np.zeros(mask.shape, np.uint8)}
    record["mask"][8:20, 8:20] = 1
    record["mask"][30:36, 30:40] = 255
    record["boxes"] = np.array([[4, 4, 24, 24, 1], [20, 20, 43, 39, 3], [-1] * 5], np.float32)
    record["keypoints"] = np.array([[10, 10, 1], [30, 30, 0]], np.float32)
    records = [{**record, "image": patches(number, image)} for number in range(samples)]
    labels = (np.arange(samples)[:, None] % np.array([2, 3, 5, 7]) == 0).astype(np.float32)
    paths = [f"{HOSTILE}/{'deep/' * 40}{number}.png" for number in range(samples)]
    return write_cache(directory, fields, [records, records], labels=labels, classes=CLASSES, paths=paths)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images in four classes, three variants. Not to be written to."""
    return plain_cache(tmp_path_factory.mktemp("caches") / "plain")


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images with everything that is drawn over them. Not to be written to."""
    return drawn_cache(tmp_path_factory.mktemp("caches") / "drawn")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples without an image, without labels."""
    field = Field("tokens", "raw", "<i4", (8,))
    records = [{"tokens": np.arange(8, dtype=np.int32) + number} for number in range(5)]
    return write_cache(tmp_path_factory.mktemp("caches") / "tokens", [field], [records], recipe={"size": [1, 1]})


def copies_cache(directory: Path, samples: int = 10, *, blank: int | None = None, equal: int = 1, **more: Any) -> Path:
    """Write a cache of images that are all different, but for the last two and the first so many `equal` ones.

    The `blank` one has no contrast. The last two are a brighter copy of the first one with another label, and the
    second one's mirror image with the same label.
    """
    field = image_field(40)
    images = [patches(number, field) for number in range(samples - 2)]
    images += [images[0] // 10 * 8 + 30, images[1][:, ::-1]]
    images[1:equal] = [images[0]] * (equal - 1)
    if blank is not None:
        images[blank] = np.full(field.shape, 7, np.uint8)
    labels = np.arange(samples) % 2
    labels[-2:] = 1
    known = {"labels": labels, "classes": CLASSES[:2], **more}
    return write_cache(directory, [field], [[{"image": image} for image in images]], **known)


@pytest.fixture(scope="session", name="copies_cache")
def copies_cache_fixture() -> Callable[..., Path]:
    return copies_cache


@pytest.fixture(scope="session", name="plain_cache")
def plain_cache_fixture() -> Callable[..., Path]:
    return plain_cache


def write_run(folder, dataset, *, text="plain", **arrays):
    """Write the files of a finished run of classes in which a text is wherever a file can hold one."""
    from tpucache.training.pace import Pace
    from tpucache.training.run.files import write_history
    from tpucache.training.run.report import TrainReport, write_report

    folder.mkdir(parents=True)
    samples = len(dataset)
    place = {"cache": str(dataset.directory), "variant": 0, "samples": samples, "digest": dataset.digest}
    info = {
        "settings": {"model": text, text: text, "augment": {"flip": True}},
        "task": "classes",
        "outputs": 4,
        "classes": [f"{text} {number}" for number in range(4)],
        "training": {"cache": text, "variant": text, "samples": 7},
        "validation": place,
    }
    told = dict.fromkeys(("backend", "device", "unit", "watched", "advice", "rates", "precision", "batch"), text)
    facts = {"cores": 1, "losses": [3.0, 2.0, 1.0], "epochs": [], "host_peak_bytes": 0, "device_peak_bytes": None}
    seconds = {"seconds": {text: 2.5, "steps": 1.0}, "wall_seconds": 4.0}
    pace = Pace(2, 9.0, 0.1, 0.0, 0.5, 0, 0, resident=text)
    labels = np.arange(samples) % 4
    found = {
        "positions": np.asarray(dataset.positions),
        "labels": labels,
        "predictions": (labels + 1) % 4,
        "errors": np.linspace(0.9, 0.5, samples),
        "probabilities": np.full(samples, 0.75),
        **arrays,
    }
    (folder / "run.json").write_text(json.dumps(info))
    write_report(folder, TrainReport(**told, **facts, **seconds, pace=pace, best_epoch=1))
    name = "valid_" + text.replace("\udcff", "")
    row = {name: 0.5, "step": 2, "lr": 0.1, "valid_loss": 1.5, "valid_samples": 12}
    write_history(folder, [row, row])
    np.savez(folder / "validation.npz", **{key: each for key, each in found.items() if each is not None})
    return folder


@pytest.fixture(scope="session", name="write_run")
def write_run_fixture() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


#: Every tag of a page, and the attributes that could load something.
_TAGS = {
    "html", "head", "meta", "title", "style", "body", "article", "section", "header", "footer", "div", "span",
    "h1", "h2", "p", "b", "i", "g", "dl", "dt", "dd", "code", "pre", "figure", "figcaption", "img", "details",
    "summary", "svg", "polyline", "table", "thead", "tbody", "tr", "th", "td", "input", "label",
}  # fmt: skip
_LOADING = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction"}


class ParsedPage(HTMLParser):
    """A page as a browser takes it: its tags, its attributes, its text, and the text of each section by its heading."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.sections = [], [], [], {}
        self._tag, self._heading = "", ""
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.texts).split())
        self.sections = {name: " ".join(" ".join(texts).split()) for name, texts in self.sections.items()}

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self._tag == "h2" and data.strip():
            self._heading = data
        self._tag = "" if data.strip() else self._tag
        self.texts.append(data)
        self.sections.setdefault(self._heading, []).append(data)

    def check_harmless(self):
        """Only known tags, nothing that runs, and nothing loaded but pictures within the page."""
        assert set(self.tags) <= _TAGS
        assert not [name for name, _ in self.attributes if name.startswith("on")]
        assert all(value.startswith("data:image/") for name, value in self.attributes if name in _LOADING)
        assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in self.attributes


@pytest.fixture(scope="session")
def parse() -> type[ParsedPage]:
    return ParsedPage


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; skips where there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no page is looked at")
    try:
        with open_browser() as opened:
            yield opened
    except CommandError as error:
        pytest.skip(str(error))
