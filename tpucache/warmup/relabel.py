"""relabel_cache and set_columns: change labels, folds and columns of a finished cache without rewriting records."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError, UsageError
from tpucache.native import Array
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
from tpucache.warmup.sources.source import Listing, Sample, name_some, unique
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

    A row belongs to the sample with the same path. If no row has the path of a sample, the table's column of paths is
    compared with the cache's column of the same name, then with its column `id`, then with file names without folders.
    Every sample needs a row; a warning names rows without a sample. Without `label_cols`, labels stay as they are;
    without `fold_col`, folds do. Columns that are not in the table stay, too.

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
    cache, options, soft = Path(cache).absolute(), options or TableOptions(), soft or SoftOptions()
    if options.mask_col is not None or options.root is not None or options.rle_cols:
        raise UsageError("masks and the folder of images are for a warmup: leave --mask-col, --root and rle_cols out")
    names = class_names(classes)
    check_kind(labels, options.label_sep, names)
    is_read_otherwise = labels != "auto" or bool(names)
    if not options.label_cols and is_read_otherwise:
        raise UsageError("--labels and --classes need a column of labels: name it with --label-col")
    if soft.soft_labels and (options.label_cols or options.fold_col is not None or corrections):
        raise UsageError("soft labels are targets of train only: leave --label-col, --fold-col and --corrections out")
    if corrections and (not options.label_cols or is_read_otherwise):
        raise UsageError(
            "corrections change only labels: name their column with --label-col; leave --labels and --classes out"
        )
    content = read_table(table)
    is_plain = options == TableOptions() and not (missing_label or soft.soft_labels)
    if is_plain and tuple(content.columns) in CORRECTION_COLUMNS:
        corrections, options = True, TableOptions(path_col="path", label_cols=("label",))
    with changing(cache, "relabel") as opened:
        if soft.soft_labels:
            return _write(opened, _soft_columns(opened, content, options, soft), "relabel --soft-labels")
        if corrections:
            return _write(opened, {LABEL: _corrected(opened, content, options)}, "relabel --corrections")
        columns, changes = _relabelled(opened, content, options, labels, names, missing_label)
        return _write(opened, columns, "relabel", **changes)


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
        return _write(opened, {**columns}, f"relabel: {', '.join(columns)}")


def _relabelled(
    cache: Cache,
    table: CsvTable,
    options: TableOptions,
    kind: LabelKind,
    names: tuple[str, ...],
    missing: Sequence[str],
) -> tuple[dict[str, Column], dict[str, Any]]:
    _tell_of_unused(table, options)
    table, places = _rows_of_samples(cache, table, options)
    listing, order = _listing(table, options, kind, names, missing), np.argsort(places)
    columns = {name: taken(column, order) for name, column in listing.columns.items()}
    if not options.label_cols:
        return columns, {}
    found = [listing.samples[row].label for row in order]
    labels, classes, _ = label_column(found, cache.samples.paths, listing.classes)
    source = cache.manifest.source
    asked = {name: value for name, value in source.get("asked", {}).items() if name != "classes"}
    asked |= {"classes": "given"} if names else {}
    changes = {
        "classes": classes,
        "value_names": value_names(options.label_cols, labels, classes),
        "source": {**source, "asked": asked, "labels": {"asked": kind}},
    }
    return {LABEL: labels, **columns}, changes


def _listing(
    table: CsvTable, options: TableOptions, kind: LabelKind, classes: tuple[str, ...] = (), missing: Sequence[str] = ()
) -> Listing:
    listing = table_listing(table, [Sample(row, f"line {line}") for row, line in enumerate(table.lines)], options)
    if not options.label_cols:
        return listing
    listing = read_labels(listing, kind, classes, missing_texts(missing), where=str(table.path))
    for sample in listing.samples:
        if sample.fault or sample.label is None:
            fault = sample.fault or "the row has no label, and every sample needs one"
            raise SourceError(f"{table.path}, {sample.path}: {fault}")
    return listing


def _tell_of_unused(table: CsvTable, options: TableOptions) -> None:
    used = {path_column(table, options), *options.label_cols, options.fold_col, *options.keep}
    likely = dict.fromkeys(() if options.label_cols else LABEL_NAMES, "label")
    likely |= {} if options.fold_col else {"fold": "fold"}
    for name in table.names:
        what = likely.get(name.lower())
        if what and name not in used and not options.is_dropped(name):
            _log.warning(
                "%s: column %r is only kept as a column, and the %ss stay as they were: give --%s-col %s to replace "
                "them", table.path, name, what, what, name,
            )  # fmt: skip


def _corrected(cache: Cache, table: CsvTable, options: TableOptions) -> Array:
    labels, manifest, classes = cache.samples.labels, cache.manifest, cache.manifest.classes
    if labels is None:
        raise UsageError(f"{cache.directory} has no labels to correct: give a table with a row for each sample")
    if tuple(table.columns) in CORRECTION_COLUMNS and labels.ndim > 1 and classes:
        options = dataclasses.replace(options, label_sep=options.label_sep or SEPARATOR)
    table = _without_marks(table, path_column(table, options), *options.label_cols)
    table, places = _rows_of_samples(cache, table, options, need_all=False)
    listing = _listing(table, options, "auto" if classes else "numbers")
    if unknown := [name for name in listing.classes if name not in classes]:
        raise SourceError(
            f"{table.path} has the label {unknown[0]!r}, and the classes of {cache.directory} are "
            f"{name_some(classes) if classes else 'none'}: correct the label, or relabel all samples"
        )
    if differ_in_values(manifest.value_names, options.label_cols):
        raise SourceError(
            f"the labels of {cache.directory} are the columns {', '.join(manifest.value_names)}, not "
            f"{', '.join(options.label_cols)}: give {label_options(manifest.value_names)}"
        )
    new = np.array([sample.label for sample in listing.samples])
    if listing.classes:
        numbers = np.array([classes.index(name) for name in listing.classes])
        new = new @ np.eye(len(classes))[numbers] if new.ndim > 1 else numbers[new]
    labels = labels.copy() if classes else labels.astype(np.float64)
    if new.shape[1:] != labels.shape[1:]:
        raise SourceError(
            f"{table.path}: the labels have another form than those of {cache.directory}: write them in the same form"
        )
    labels[places] = new
    return labels


def _without_marks(table: CsvTable, *names: str) -> CsvTable:
    """Remove the marks that keep a spreadsheet from reading the cells of some columns as formulas."""
    if table.is_own:
        return table
    columns = {name: [*map(from_cell, table.column(name))] for name in names}
    return dataclasses.replace(table, columns=table.columns | columns, is_own=True)


def _soft_columns(cache: Cache, table: CsvTable, options: TableOptions, soft: SoftOptions) -> dict[str, Column]:
    samples, classes, labels = cache.samples, cache.manifest.classes, cache.samples.labels
    if not classes or labels is None or labels.ndim != 1:
        raise UsageError(
            f"soft labels need one class for each sample, and {cache.directory} has other labels: use --label-col, "
            "which also accepts numbers from 0 to 1 as labels"
        )
    table = _without_marks(table, path_column(table, options))
    table, places = _rows_of_samples(cache, table, options, need_all=False)
    is_known = labels >= 0
    hard = np.eye(len(classes), dtype=np.float32)[np.where(is_known, labels, 0)] * is_known[:, None]
    targets, weights = samples.get(SOFT_LABEL), samples.get(SOFT_WEIGHT)
    if not (isinstance(targets, np.ndarray) and isinstance(weights, np.ndarray)):
        targets, weights = hard, is_known.astype(np.float32)
    targets, weights = targets.copy(), weights.copy()
    predicted = np.stack([_numbers(table, _class_column(table, name), 1.0) for name in classes], 1)
    totals = predicted.sum(1)
    if len(odd := np.flatnonzero(abs(totals - 1) > _SUM_ERROR)):
        raise SourceError(
            f"{table.path}, line {table.lines[odd[0]]}: the probabilities of the classes add up to "
            f"{totals[odd[0]]:.3g}, not to 1: give the probabilities, as predict writes them"
        )
    shares = np.where(is_known[places], soft.soft_share, 1.0)[:, None]
    targets[places] = shares * predicted / totals[:, None] + (1 - shares) * hard[places]
    weights[places] = 1.0 if soft.weight_col is None else _numbers(table, soft.weight_col, _MOST_WEIGHT)
    return {SOFT_LABEL: targets, SOFT_WEIGHT: weights}


def _class_column(table: CsvTable, name: str) -> str:
    heading = to_heading(name)
    is_plain = heading not in table.columns and heading == to_cell(name)
    return name if is_plain and name in table.columns else heading


def _numbers(table: CsvTable, column: str, most: float) -> npt.NDArray[np.float64]:
    cells = table.column(column)
    numbers = [*map(to_number, cells)]
    for row, number in enumerate(numbers):
        if number is None or not 0 <= number <= most:
            raise table.wrong(row, column, f"the value must be a number from 0 to {most:g}, not {cells[row]!r:.40}")
    return np.array(numbers, np.float64)


def _rows_of_samples(
    cache: Cache, table: CsvTable, options: TableOptions, *, need_all: bool = True
) -> tuple[CsvTable, list[int]]:
    """Return the rows of samples alone, and the position of each row's sample."""
    column, paths = path_column(table, options), cache.samples.paths
    known = {path.removeprefix("./"): path for path in sorted(paths)} | {path: path for path in paths}
    given = [cell + options.suffix for cell in table.column(column)]
    given = [known.get(key) or known.get(key.replace("\\", "/").removeprefix("./"), key) for key in given]
    keys = unique(given)
    rows = {key: row for row, key in enumerate(keys)}
    what, names = _names_in(cache.samples, column, rows)
    zeros = _zeros_advice(keys, names or paths)
    if not names:
        raise SourceError(
            f"no row of {table.path} belongs to a sample of {cache.directory}: column {column!r} has values such as "
            f"{keys[0]!r}, and the samples have paths such as {paths[0]!r}. Name the column of paths "
            f"with --path-col, and a missing ending with --suffix{zeros}"
        )
    are_there = {*names}
    for row, (key, own) in enumerate(zip(given, keys, strict=True)):
        if key != own and key in are_there and own not in are_there:
            line = table.lines[given.index(key)]
            raise table.wrong(row, column, f"{key!r} is also in line {line}, and the cache has only one such sample")
    lacking = [path for path, name in zip(paths, names, strict=True) if name not in rows]
    if lacking and need_all:
        raise SourceError(
            f"{len(lacking):,} samples of {cache.directory} have no row in {table.path}, compared by {what}: "
            f"{name_some(lacking)}. Add their rows, or give --corrections to keep their labels{zeros}"
        )
    are_there |= {skip.path for skip in cache.manifest.skipped}
    if others := [key for key in keys if key not in are_there]:
        _log.warning(
            "%s rows of %s belong to no sample and are not used: %s%s",
            len(others), table.path, name_some(others), zeros,
        )  # fmt: skip
    places = {rows[name]: place for place, name in enumerate(names) if name in rows}
    used = sorted(places)
    columns = {name: [cells[row] for row in used] for name, cells in table.columns.items()}
    own_rows = dataclasses.replace(table, columns=columns, lines=[table.lines[row] for row in used])
    return own_rows, [places[row] for row in used]


def _zeros_advice(keys: Sequence[str], names: Sequence[str]) -> str:
    known = {*names, *(PurePosixPath(name).name for name in names)}
    found = (zeros_advice(PurePosixPath(key).name, known.__contains__) for key in keys if key not in known)
    return next(filter(None, found), "")


def _names_in(samples: SampleTable, column: str, keys: Collection[str]) -> tuple[str, list[str]]:
    """Return what identifies samples in a table's `keys`, and its value for each sample; empty if nothing does."""
    candidates = {
        "path": samples.paths,
        f"column {column!r}": samples.get(column, ()),
        "column 'id'": samples.get("id", ()),
        "file name": [PurePosixPath(path).name for path in samples.paths],
    }
    for what, values in candidates.items():
        names = [*map(str, values)]
        if len({*names}) == len(names) and not {*names}.isdisjoint(keys):
            return what, names
    return "", []


def _write(cache: Cache, columns: dict[str, Any], command: str, **changes: Any) -> Manifest:
    folder, before = cache.directory, cache.manifest
    gone = (SOFT_LABEL, SOFT_WEIGHT) if LABEL in columns else ()  # targets made of the old labels
    data = encode_columns({name: column for name, column in cache.samples.items() if name not in gone} | columns)
    classes, source = changes.get("classes", before.classes), {**changes.get("source", before.source)}
    if classes == before.classes and data == (folder / before.table.name).read_bytes():
        return before
    source["relabelled"] = [*earlier_tables(before), before.table.sha256]
    if LABEL in columns:
        labels, asked = columns[LABEL], str(source.get("labels", {}).get("asked", "auto"))
        source["labels"] = label_facts(asked, labels, bool(classes))
        counts = class_counts(labels, classes) if classes else ()
        changes["statistics"] = dataclasses.replace(before.statistics, class_counts=counts)
    manifest = before.changed(**{**changes, "source": source})
    return save_version(folder, before, manifest, (before.index, data), command)
