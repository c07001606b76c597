"""relabel_cache and set_columns: change labels, folds and columns of a finished cache without rewriting records."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.store.cache import Cache
from tpucache.store.copying import earlier_tables
from tpucache.store.fields import FIELD_NAME, LABEL, SOFT_LABEL, SOFT_WEIGHT
from tpucache.store.manifest import Manifest, differ_in_values, label_options
from tpucache.store.samples import Column, SampleTable, encode_columns
from tpucache.text import SEPARATOR, from_cell, to_cell, to_heading
from tpucache.warmup.build_options import LabelKind, SoftOptions
from tpucache.warmup.listing import OWN_COLUMNS
from tpucache.warmup.sources.columns import LABEL_NAMES, TableOptions, to_number
from tpucache.warmup.sources.folder import zeros_advice
from tpucache.warmup.sources.labelled import check_kind, class_names, missing_texts
from tpucache.warmup.sources.labels import read_labels
from tpucache.warmup.sources.source import Label, Listing, Sample, name_some, unique
from tpucache.warmup.sources.table import CsvTable, path_column, read_table, table_listing
from tpucache.warmup.tables import (
    class_counts,
    label_column,
    label_facts,
    save_version,
    taken,
    value_names,
)
from tpucache.warmup.versions import changing

RowNumbers = npt.NDArray[np.int64]

_ID: Final = "id"
#: The columns of the correction tables that a page of findings and the command `suspects` write.
CORRECTION_COLUMNS: Final = (("path", "label"), ("sample", "path", "label", "predicted", "score"))
#: The sum of a row's probabilities may differ from 1 by this much, because tables have rounded numbers.
_SUM_ERROR: Final = 0.02
_MOST_WEIGHT: Final = 1e6

_log: Final = logging.getLogger("tpucache")


def relabel_cache(
    cache: str | Path,
    table: str | Path,
    options: TableOptions | None = None,
    *,
    labels: LabelKind = "auto",
    classes: str | Path | Sequence[str] | None = None,
    missing_label: Sequence[str] = (),
    corrections: bool = False,
    soft: SoftOptions | None = None,
) -> Manifest:
    """Give the samples of a finished cache the labels, folds and columns of a CSV table, and return its manifest.

    A row belongs to the sample with the same path. If no row has the path of a sample, the values in the table's column
    of paths are compared with the cache's column of the same name, then with its column `id`, then with file names
    without folders. Every sample needs a row; a warning names rows without a sample. Without `label_cols`, labels
    stay as they are; without `fold_col`, folds do. Columns that are not in the table stay, too.

    With `corrections`, the table has rows for some samples only, with new labels: names of the same classes, or
    numbers. All other samples keep their labels, and classes and other columns do not change. If no option is given, a
    table that a page of findings or `suspects` has written counts as corrections.

    With `soft`, the table has one column of probabilities for each class, as `predict` writes it. Then only the targets
    of `train` change: a sample with a row is trained towards its probabilities, and its weight scales its loss. A
    sample without a row keeps its previous target, which is its label at first. Later tables with labels remove these
    targets.

    `options`, `labels`, `classes` and `missing_label` are those of a build. No record is read or written, and at any
    moment the cache has either its old labels or the new ones. Raises UsageError for options that do not fit together,
    SourceError for a table that does not fit the cache, BuildError when the cache cannot be written or a warmup of it
    is not finished, and the errors of opening a cache.
    """
    cache, options = Path(cache).absolute(), options or TableOptions()
    if options.mask_col is not None or options.root is not None:
        raise UsageError("masks and the folder of images are for a warmup: leave --mask-col and --root out")
    if options.rle_cols:
        raise UsageError("masks as run lengths are for a warmup: leave rle_cols out")
    names = class_names(classes)
    check_kind(labels, names, options.label_sep)
    if not options.label_cols and (labels != "auto" or names):
        raise UsageError("--labels and --classes need a column of labels: name it with --label-col")
    soft = soft or SoftOptions()
    if soft.soft_labels and (options.label_cols or options.fold_col is not None or corrections):
        raise UsageError("soft labels are targets of train only: leave --label-col, --fold-col and --corrections out")
    if corrections and (not options.label_cols or labels != "auto" or names):
        raise UsageError(
            "corrections change only labels: name their column with --label-col; leave --labels and --classes out"
        )
    content = read_table(table)
    is_plain = options == TableOptions() and labels == "auto" and not (names or missing_label or soft.soft_labels)
    if is_plain and tuple(content.columns) in CORRECTION_COLUMNS:
        corrections, options = True, TableOptions(path_col="path", label_cols=("label",))
    changes: dict[str, Any] = {}
    with changing(cache, "relabel") as opened:
        if soft.soft_labels:
            columns: dict[str, Column] = {**opened.samples, **_soft_columns(opened, content, options, soft)}
        elif corrections:
            columns, changes = _corrected(opened, content, options)
        else:
            columns, changes = _new_columns(opened, content, options, labels, names, missing_label)
        command = "relabel --soft-labels" if soft.soft_labels else "relabel --corrections" if corrections else "relabel"
        return _write(opened, columns, changes, command)


def set_columns(cache: str | Path, columns: Mapping[str, Column | npt.NDArray[Any]]) -> Manifest:
    """Add columns, such as `fold`, to the samples of a finished cache, and return its manifest.

    A column is an array (n,) of numbers or a `Strings`, with one value for each sample, in the order of the samples
    table. It replaces a column with the same name. No record is read or written.

    Raises UsageError for a column that a warmup sets, such as the labels, for a name that is not valid, and for a wrong
    number of values; BuildError when the cache cannot be written or a warmup of it is not finished; and the errors of
    opening a cache.
    """
    cache = Path(cache).absolute()
    with changing(cache, "relabel") as opened:
        for name, column in columns.items():
            if name in OWN_COLUMNS or not FIELD_NAME.fullmatch(name):
                raise UsageError(f"a column {name!r} cannot be set: use another name, or `relabel` to change labels")
            if len(column) != opened.manifest.samples:
                samples = opened.manifest.samples
                raise UsageError(
                    f"the column {name!r} has {len(column):,} values, and {cache} has {samples:,} samples: give one "
                    "value for each"
                )
        return _write(opened, {**opened.samples, **columns}, {}, f"relabel: {', '.join(columns)}")


def _new_columns(
    cache: Cache,
    table: CsvTable,
    options: TableOptions,
    kind: LabelKind,
    names: tuple[str, ...],
    missing: Sequence[str],
) -> tuple[dict[str, Column], dict[str, Any]]:
    samples, manifest = cache.samples, cache.manifest
    rows = _find_rows(cache, table, options)
    columns: dict[str, Column] = dict(samples)
    changes: dict[str, Any] = {}
    own, places = _used_part(table, rows)
    listing = _listing(own, options)
    if options.label_cols:
        found, classes = _read_labels(own, listing, kind, names, missing)
        used = [found[place] for place in places.tolist()]
        if None in used:
            line = own.lines[int(places[used.index(None)])]
            raise SourceError(f"{table.path}, line {line}: the row has no label, and every sample needs one")
        columns.pop(SOFT_LABEL, None)
        columns.pop(SOFT_WEIGHT, None)
        columns[LABEL], classes, counts = label_column(used, samples.paths, classes)
        asked = {name: value for name, value in manifest.source.get("asked", {}).items() if name != "classes"}
        asked |= {"classes": "given"} if names else {}
        changes = {
            "classes": classes,
            "value_names": value_names(options.label_cols, columns[LABEL], classes),
            "statistics": dataclasses.replace(manifest.statistics, class_counts=counts),
            "source": {
                **manifest.source,
                **({"asked": asked} if asked or "asked" in manifest.source else {}),
                "labels": label_facts(kind, columns[LABEL], bool(classes)),
            },
        }
    _tell_of_unused(table, options)
    for name, column in listing.columns.items():
        columns[name] = taken(column, places)
    return columns, changes


def _used_part(table: CsvTable, rows: RowNumbers) -> tuple[CsvTable, RowNumbers]:
    """Return a table of the rows of samples alone, in their order, and the number of each sample's row in it."""
    used, places = np.unique(rows, return_inverse=True)
    columns = {name: [cells[row] for row in used.tolist()] for name, cells in table.columns.items()}
    return dataclasses.replace(table, columns=columns, lines=[table.lines[row] for row in used.tolist()]), places


def _tell_of_unused(table: CsvTable, options: TableOptions) -> None:
    used = {path_column(table, options), *options.label_cols, options.fold_col, *options.keep}
    left = [name for name in table.names if name not in used and not options.is_dropped(name)]
    for known, given, what, flag in (
        (LABEL_NAMES, options.label_cols, "labels", "--label-col"),
        (("fold",), options.fold_col, "folds", "--fold-col"),
    ):
        for name in left:
            if name.lower() in known and not given:
                _log.warning(
                    "%s: column %r is only kept as a column, and the %s stay as they were: give %s %s to replace them",
                    table.path, name, what, flag, name,
                )  # fmt: skip


def _listing(table: CsvTable, options: TableOptions) -> Listing:
    samples = [Sample(row, f"line {line}") for row, line in enumerate(table.lines)]
    return table_listing(table, samples, options)


def _read_labels(
    table: CsvTable, listing: Listing, kind: LabelKind, classes: tuple[str, ...] = (), missing: Sequence[str] = ()
) -> tuple[Sequence[Label], tuple[str, ...]]:
    read = read_labels(listing, kind, classes, missing_texts(missing), where=str(table.path))
    for sample in read.samples:
        if sample.fault:
            raise SampleError(sample.path, sample.fault, str(table.path))
    return [sample.label for sample in read.samples], read.classes


def _soft_columns(cache: Cache, table: CsvTable, options: TableOptions, soft: SoftOptions) -> dict[str, Column]:
    samples, classes = cache.samples, cache.manifest.classes
    path, labels = path_column(table, options), samples.get(LABEL)
    if not table.is_own:  # tpucache's tables have a mark before names that a spreadsheet would read as formulas
        table = dataclasses.replace(table, columns={**table.columns, path: [*map(from_cell, table.column(path))]})
    if not classes or not isinstance(labels, np.ndarray) or labels.ndim != 1:
        raise UsageError(
            f"soft labels need one class for each sample, and {cache.directory} has other labels: use --label-col, "
            "which also accepts numbers from 0 to 1 as labels"
        )
    rows = _find_rows(cache, table, options, need_all=False)
    numbers, found = labels.astype(np.int64), rows >= 0
    targets = np.eye(len(classes), dtype=np.float32)[np.maximum(numbers, 0)] * (numbers >= 0)[:, None]
    weights = (numbers >= 0).astype(np.float32)
    earlier = samples.get(SOFT_LABEL), samples.get(SOFT_WEIGHT)
    kept = targets.copy(), weights.copy()
    if isinstance(earlier[0], np.ndarray) and isinstance(earlier[1], np.ndarray):
        kept = earlier[0].copy(), earlier[1].copy()
    used = rows[found].tolist()
    predicted = np.stack([_cells(table, _class_column(table, name), used, most=1.0) for name in classes], 1)
    totals = predicted.sum(1)
    if len(odd := np.flatnonzero(abs(totals - 1) > _SUM_ERROR)):
        raise SourceError(
            f"{table.path}, line {table.lines[used[odd[0]]]}: the probabilities of the classes add up to "
            f"{totals[odd[0]]:.3g}, not to 1: give the probabilities, as predict writes them"
        )
    shares = np.where(numbers[found] >= 0, soft.soft_share, 1.0)[:, None]
    kept[0][found] = shares * predicted / totals[:, None] + (1 - shares) * targets[found]
    kept[1][found] = 1.0 if soft.weight_col is None else _cells(table, soft.weight_col, used)
    return {SOFT_LABEL: kept[0], SOFT_WEIGHT: kept[1]}


def _class_column(table: CsvTable, name: str) -> str:
    heading = to_heading(name)
    is_plain = heading not in table.columns and heading == to_cell(name)
    return name if is_plain and name in table.columns else heading


def _cells(table: CsvTable, column: str, rows: Sequence[int], most: float = math.inf) -> npt.NDArray[np.float64]:
    cells = table.column(column)
    numbers = [to_number(cells[row]) for row in rows]
    for row, number in zip(rows, numbers, strict=True):
        if number is None or not 0 <= number <= min(most, _MOST_WEIGHT):
            limit = "" if math.isinf(most) else f" to {most:g}"
            raise table.wrong(row, column, f"the value must be a number from 0{limit}, not {cells[row]!r:.40}")
    return np.array(numbers, np.float64)


def _corrected(cache: Cache, table: CsvTable, options: TableOptions) -> tuple[dict[str, Column], dict[str, Any]]:
    samples, manifest = cache.samples, cache.manifest
    if samples.labels is None:
        raise UsageError(f"{cache.directory} has no labels to correct: give a table with a row for each sample")
    if tuple(table.columns) in CORRECTION_COLUMNS and samples.labels.ndim > 1 and manifest.classes:
        options = dataclasses.replace(options, label_sep=options.label_sep or SEPARATOR)
    # A page of findings puts a mark before text that a spreadsheet would read as a formula.
    cells = set() if table.is_own else {path_column(table, options), *options.label_cols}
    plain = {name: [*map(from_cell, column)] if name in cells else column for name, column in table.columns.items()}
    table = dataclasses.replace(table, columns=plain, is_own=True)
    rows = _find_rows(cache, table, options, need_all=False)
    table, places_in_table = _used_part(table, rows[rows >= 0])
    labels, classes = samples.labels.copy(), manifest.classes
    found, names = _read_labels(table, _listing(table, options), "auto" if classes else "numbers")
    if unknown := [name for name in names if name not in classes]:
        raise SourceError(
            f"{table.path} has the label {unknown[0]!r}, and the classes of {cache.directory} are "
            f"{name_some(list(classes)) if classes else 'none'}: correct the label, or relabel all samples"
        )
    if differ_in_values(manifest.value_names, options.label_cols):
        raise SourceError(
            f"the labels of {cache.directory} are the columns {', '.join(manifest.value_names)}, not "
            f"{', '.join(options.label_cols)}: give {label_options(manifest.value_names)}"
        )
    places = np.array([classes.index(name) for name in names], np.int64)
    for row, at in zip(places_in_table.tolist(), np.flatnonzero(rows >= 0).tolist(), strict=True):
        value = found[row]
        if isinstance(value, int) and labels.ndim == 1:
            labels[at] = places[value]
        elif isinstance(value, tuple) and labels.ndim > 1 and names:
            labels[at] = 0
            labels[at, places] = value
        elif isinstance(value, tuple) and not classes and len(value) == labels.shape[-1]:
            labels = labels.astype(np.float64)
            labels[at] = value
        else:
            raise SourceError(
                f"{table.path}, line {table.lines[row]}: the label has another form than the labels of "
                f"{cache.directory}: write it in the same form"
            )
    counts = class_counts(labels, classes) if classes else ()
    asked = str(manifest.source.get("labels", {}).get("asked", "auto"))
    changes = {
        "statistics": dataclasses.replace(manifest.statistics, class_counts=counts),
        "source": {**manifest.source, "labels": label_facts(asked, labels, bool(classes))},
    }
    kept = {name: column for name, column in samples.items() if name not in (SOFT_LABEL, SOFT_WEIGHT)}
    return {**kept, LABEL: labels}, changes


def _find_rows(cache: Cache, table: CsvTable, options: TableOptions, need_all: bool = True) -> RowNumbers:
    column = path_column(table, options)
    keys = table.column(column)
    if options.suffix:
        keys = [cell + options.suffix for cell in keys]
    paths = {*cache.samples.paths}
    plain = {path.removeprefix("./"): path for path in sorted(paths)}
    keys = [key if key in paths else plain.get(key.replace("\\", "/").removeprefix("./"), key) for key in keys]
    places = {key: row for row, key in enumerate(keys)}
    candidates = _sample_names(cache.samples, column)
    what, names = next((found for found in candidates if not places.keys().isdisjoint(found[1])), ("", []))
    if not names:
        raise SourceError(
            f"no row of {table.path} belongs to a sample of {cache.directory}: column {column!r} has values such as "
            f"{keys[0]!r}, and the samples have paths such as {cache.samples.paths[0]!r}. Name the column of paths "
            f"with --path-col, and a missing ending with --suffix{_zeros_advice(keys, cache.samples.paths)}"
        )
    if len(places) < len(keys):
        keys = _tell_apart(table, column, keys, names)
        places = {key: row for row, key in enumerate(keys)}
    rows = [places.get(name, -1) for name in names]
    lacking = [cache.samples.paths[at] for at, row in enumerate(rows) if row < 0]
    if lacking and need_all:
        raise SourceError(
            f"{len(lacking):,} samples of {cache.directory} have no row in {table.path}, compared by {what}: "
            f"{name_some(lacking)}. Add their rows, or give --corrections to keep their labels"
            f"{_zeros_advice(keys, names)}"
        )
    if len(keys) > len(names) or not need_all:
        _warn_of_others(cache, table, keys, set(names))
    return np.array(rows, np.int64)


def _zeros_advice(keys: Sequence[str], names: Sequence[str]) -> str:
    known = {*names, *(PurePosixPath(name).name for name in names)}
    found = (zeros_advice(PurePosixPath(key).name, known.__contains__) for key in keys if key not in known)
    return next(filter(None, found), "")


def _sample_names(samples: SampleTable, column: str) -> Iterator[tuple[str, list[str]]]:
    yield "path", list(samples.paths)
    for name in dict.fromkeys((column, _ID)):
        if name in samples and len(set(names := list(map(str, samples[name])))) == len(names):
            yield f"column {name!r}", names
    names = [PurePosixPath(path).name for path in samples.paths]
    if len(set(names)) == len(names):
        yield "file name", names


def _tell_apart(table: CsvTable, column: str, keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the keys of a table's rows, made unique as in a warmup: a repeated key gets a suffix such as `#2`."""
    known, apart = set(names), unique(keys)
    for row, (key, own) in enumerate(zip(keys, apart, strict=True)):
        if key != own and key in known and own not in known:
            first = table.lines[keys.index(key)]
            raise table.wrong(row, column, f"{key!r} is also in line {first}, and the cache has only one such sample")
    return apart


def _warn_of_others(cache: Cache, table: CsvTable, keys: Sequence[str], names: set[str]) -> None:
    skipped = {skip.path for skip in cache.manifest.skipped}
    others = [key for key in keys if key not in names and key not in skipped]
    if others:
        _log.warning(
            "%s rows of %s belong to no sample and are not used: %s%s",
            len(others), table.path, name_some(others), _zeros_advice(others, sorted(names)),
        )  # fmt: skip


def _write(cache: Cache, columns: dict[str, Column], changes: dict[str, Any], command: str) -> Manifest:
    folder, before = cache.directory, cache.manifest
    data = encode_columns(columns)
    if changes.get("classes", before.classes) == before.classes and data == (folder / before.table.name).read_bytes():
        return before
    source = changes.get("source", before.source)
    changes["source"] = {**source, "relabelled": [*earlier_tables(before), before.table.sha256]}
    return save_version(folder, before, before.changed(**changes), (before.index, data), command)
