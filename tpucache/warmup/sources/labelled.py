"""label_source: a source whose labels are read as the user's options say, with classes in the order that they give."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from tpucache.errors import SampleError, SourceError, TpucacheError, UsageError
from tpucache.progress import Progress
from tpucache.store.copying import earlier_tables
from tpucache.store.files import read_text
from tpucache.store.history import load_version, split_version
from tpucache.store.manifest import Manifest, differ_in_values, label_options
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.labels import Reading, decide, plain, read_labels
from tpucache.warmup.sources.source import DerivedSource, Item, Listing, Sample, Source, repeated

#: Why a sample without a label cannot be used where other samples have one.
NO_LABEL_REASON: Final = (
    "has no label, as other samples have (--missing-label states what means no label): give it a label, or leave "
    "such samples out with --on-error skip"
)
#: If labels are stored in the samples, this many evenly spread samples are read to decide how to read labels.
_LOOKED_AT: Final = 64
#: The same number if a finished cache states how its labels were read.
_LOOKED_AT_AGAIN: Final = 8

_log: Final = logging.getLogger("tpucache")


def label_source(
    source: Source,
    kind: LabelKind,
    classes: Sequence[str] = (),
    missing: Sequence[str] | None = None,
    before: Mapping[str, Any] | None = None,
) -> Source:
    """Return `source` with labels that are read as `kind`, and converted to `classes` if these are given.

    The texts `missing` mean no label. With `before`, a result of `labels_before`, labels are read as they were for that
    cache. Raises UsageError for an unknown kind, for `classes` of numbers, and if `missing` is a single text.
    """
    check_kind(kind, classes=classes)
    return LabelledSource(source, kind, tuple(classes), missing_texts(missing), before or {})


def labels_before(cache: Path) -> Mapping[str, Any] | None:
    """Return how the labels of a finished cache were read; None without a cache, or if it was relabelled.

    A damaged cache counts as none: opening it later raises the error.
    """
    try:
        manifest = Manifest.load(cache)
    except TpucacheError:
        return None
    read = manifest.source.get("labels")
    return read if isinstance(read, dict) and not earlier_tables(manifest) else None


def missing_texts(missing: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return the values that mean no label as texts, None without any."""
    if isinstance(missing, str):
        raise UsageError(f"missing_label must be a list of values, such as [{missing!r:.60}], not one text")
    return tuple(str(value).strip() for value in missing) if missing else None


def check_kind(kind: LabelKind, separator: str | None = None, classes: Sequence[str] = ()) -> None:
    """Raise UsageError for an unknown kind, and for classes, or a separator of their names, if labels are numbers."""
    if kind not in get_args(LabelKind):
        raise UsageError(f"labels must be one of {', '.join(get_args(LabelKind))}, not {kind!r}")
    if classes and kind == "numbers":
        raise UsageError("labels that are numbers have no classes: leave out --classes, or --labels numbers")
    if separator is not None and kind == "numbers":
        raise UsageError("--label-sep is for several names of classes: leave it out, or --labels numbers")


def class_names(classes: str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """Return class names in order: the given names, those of a cache, or the lines of a text file.

    Empty lines are skipped.
    """
    if classes is None:
        return ()
    if isinstance(classes, (str, Path)):
        where, names = str(classes), _read_names(Path(classes))
    else:
        where, names = "classes", tuple(classes)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where} has no class names: give a text file with one on each line, or a cache with classes")
    if twice := repeated(names):
        raise UsageError(f"{where} has the class {twice!r} more than once: name each class once")
    return names


def _read_names(path: Path) -> tuple[str, ...]:
    folder, version = split_version(path)
    if Path(folder).is_dir():
        return load_version(folder, version).classes
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the classes in {path} cannot be read: {error}. Give a text file, or a cache") from error
    return tuple(line.strip() for line in lines if line.strip())


def labels_like(
    cache: str | Path,
    kind: LabelKind,
    classes: str | Path | Sequence[str] | None = None,
    columns: Sequence[str] = (),
) -> tuple[LabelKind, tuple[str, ...] | None]:
    """Return the kind of labels and the classes for a new cache whose labels are like those of a finished cache.

    The kind is "numbers" if the cache's labels are numbers, and otherwise `kind`. The classes are None if the cache has
    no class names.
    """
    manifest, names = load_version(*split_version(cache)), class_names(classes)
    if differ_in_values(manifest.value_names, columns):
        raise UsageError(
            f"the labels of {cache} are the columns {', '.join(manifest.value_names)}, not {', '.join(columns)}: give "
            f"{label_options(manifest.value_names)}, or leave --like out"
        )
    if names and names != manifest.classes:
        raise UsageError(f"{cache} has other classes than those given: leave --classes out, or --like")
    read = manifest.source.get("labels")
    known = read.get("kind") if isinstance(read, dict) else None
    found = known if known in ("numbers", "multilabel") else "classes" if manifest.classes else "auto"
    if kind not in ("auto", found):
        raise UsageError(f"the labels of {cache} are {known or 'none'}, not {kind}: leave --labels out, or --like")
    return "numbers" if found == "numbers" else kind, manifest.classes or None


def like_source(source: Source, cache: str | Path) -> Source:
    """Return a source whose labels are refused unless they have the form of those of a finished cache."""
    read = load_version(*split_version(cache)).source.get("labels")
    return _LikeSource(source, {**read, "cache": str(cache)}) if isinstance(read, dict) else source


@dataclasses.dataclass(frozen=True, repr=False)
class _LikeSource(DerivedSource):
    source: Source
    like: Mapping[str, Any]

    def list(self) -> Listing:
        return dataclasses.replace(self.source.list(), like=self.like)


class UnreadLabelError(SampleError):
    """A sample has no label, or one that cannot be converted to the kind of the other labels, such as a class."""


@dataclasses.dataclass(repr=False)
class LabelledSource(DerivedSource):
    """The samples of another source, with labels of one kind. A sample does not load if its label cannot be converted.

    If the listing has labels, all of them decide how labels are read. Otherwise some evenly spread samples decide, or
    all samples if labels are texts or lists of classes that are not known. Call `list` before the source is sent to
    workers.
    """

    source: Source
    kind: LabelKind
    classes: tuple[str, ...]
    missing: tuple[str, ...] | None
    before: Mapping[str, Any]
    #: How the labels in the samples are read; None if the listing has the labels.
    reading: Reading | None = None

    def list(self) -> Listing:
        """Return the listing of the wrapped source, with its labels converted to one kind, and their classes."""
        listing, where = self.source.list(), repr(self)
        asked = dict(listing.asked)
        if self.classes:
            asked["classes"] = "given"
        if self.missing:
            asked["missing_label"] = [*self.missing]
        listing = dataclasses.replace(listing, asked=asked)
        if not listing.more_labels and all(sample.label is None and not sample.fault for sample in listing.samples):
            self.reading = self._look(listing, where)
            return dataclasses.replace(listing, classes=self.reading.classes)
        self.reading = None
        return read_labels(listing, self.kind, self.classes, self.missing, where=where)

    def load(self, sample: Sample) -> Item:
        """Load a sample from the wrapped source, and return its item with the label converted as `list` has decided."""
        item, reading = self.source.load(sample), self.reading
        if reading is None:
            return item
        value = plain(item.label)
        label, fault = reading.read(value)
        if reading.kind == "none" and fault and not self.before:
            raise SourceError(
                f"{sample.path!r} has the label {item.label!r:.80}, and the {_LOOKED_AT} samples that were looked at "
                "have none: say with --labels how to read labels"
            )
        if reading.kind == "none":  # a label is compared with those of the cache later
            return item if fault else dataclasses.replace(item, label=None)
        if label is not None:
            return dataclasses.replace(item, label=label)
        stated = (
            f"has the label {value!r:.80}, which means no label (class numbers begin at 0; see --missing-label): give "
            "it a label, or leave such samples out with --on-error skip"
        )
        raise UnreadLabelError(sample.path, fault or (NO_LABEL_REASON if value is None else stated))

    def _look(self, listing: Listing, where: str) -> Reading:
        """Read the labels of some samples, and return how to read all labels."""
        samples, before, kind = listing.samples, self.before.get("kind"), self.kind
        most = _LOOKED_AT_AGAIN if self.before else _LOOKED_AT
        count = 0 if (before, kind) == ("none", "auto") else min(most, len(samples))
        values = self._labels_of([samples[at * len(samples) // count] for at in range(count)])
        has_texts = any(isinstance(part, str) for value in values for part in _parts(value))
        if self.classes and has_texts and not listing.classes:
            listing = dataclasses.replace(listing, classes=self.classes)
        if kind == "auto" and before in ("classes", "multilabel", "numbers"):
            kind = before
        lengths = {len(_parts(value)) for value in values if value is not None}
        has_lists = kind == "multilabel" and (len(lengths) > 1 or lengths == {1})  # the highest number is needed
        is_known = count == len(samples) or kind == "numbers" or listing.value_names[1:] or listing.classes
        if not is_known and (has_lists or has_texts):
            _log.warning("%s: the labels are texts or lists: reading all samples to find their classes", where)
            values = self._labels_of(samples)
        reading = decide(values, listing, kind, self.classes, self.missing, where=where, is_all=False)
        is_class = (reading.kind, kind) == ("none", "classes")
        return dataclasses.replace(reading, kind="classes") if is_class else reading

    def _labels_of(self, samples: Sequence[Sample]) -> Sequence[Any]:
        values: list[Any] = []
        with Progress(len(samples), "read labels", "samples", is_brief=True) as progress:
            for sample in samples:
                with contextlib.suppress(SampleError):
                    values.append(plain(self.source.load(sample).label))
                progress.advance(1)
        return values


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
