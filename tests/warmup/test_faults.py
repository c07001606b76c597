"""Every write, sync and rename of a warmup fails, as on a full disk or by a kill: the next run ends the same.

Of the calls that come from one place of the package by one way, as those in a loop, the first and the last fail.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from made import Made, build_here, digests, write_rows
from thorough import thorough

import tpucache
from tpucache import BuildError, CachedDataset, Recipe, repair_cache, verify_cache
from tpucache.store.ahead import Lateness
from tpucache.warmup import TableOptions, blocks, compact_cache, delete_samples, relabel_cache, undo_delete
from tpucache.warmup.sources.source import Item

pytestmark = pytest.mark.slow


_open, _open_lmdb = io.open, lmdb.open

#: What may fail without ending the run: a removal is tried again, and a folder that is there need not be made.
HARMLESS = ("unlink", "rmdir", "mkdir")
_PACKAGE = str(Path(tpucache.__file__).parent)


def _place() -> tuple[tuple[str, int], ...]:
    found, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class Faults:
    def __init__(self, at: int = -1, look: Callable[[], None] = lambda: None) -> None:
        self.at, self.calls, self.places = at, list[str](), list[object]()
        self._look, self._looks = look, False

    def look(self) -> None:
        self._looks = True
        self._look()
        self._looks = False

    def fails(self, name: str) -> bool:
        if self._looks:  # it copies files itself
            return False
        self.calls.append(name)
        self.places.append((name, _place()))
        self.look()
        return len(self.calls) - 1 == self.at

    def chosen(self) -> list[int]:
        first = {place: at for at, place in reversed([*enumerate(self.places)])}
        last = {place: at for at, place in enumerate(self.places)}
        return sorted({*first.values(), *last.values()})

    def error(self, kind: type[Exception] = OSError) -> Exception:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if kind is OSError else kind("No space left on device")

    def call(self, name: str, real: Callable[..., Any], kind: type[Exception] = OSError) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if self.fails(name):
                raise self.error(kind)
            return real(*arguments, **options)

        return called

    def open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set("wax+") & set(mode):
            return _open(file, mode, *arguments, **options)
        if self.fails("open"):
            raise self.error()
        return FaultyFile(self, _open(file, mode, *arguments, **options))

    def open_lmdb(self, *arguments: Any, **options: Any) -> Any:
        if options.get("readonly"):
            return _open_lmdb(*arguments, **options)
        if self.fails("lmdb.open"):
            raise self.error(lmdb.Error)
        return FaultyEnvironment(self, _open_lmdb(*arguments, **options))


class FaultyFile:
    def __init__(self, faults: Faults, file: Any) -> None:
        self._faults, self._file = faults, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        fails = self._faults.fails("write")
        half = self._file.write(data[: len(data) // 2])
        if fails:
            raise self._faults.error()
        self._file.flush()
        self._faults.look()
        return int(half + self._file.write(data[len(data) // 2 :]))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def flush(self) -> None:
        if self._faults.fails("flush"):
            raise self._faults.error()
        self._file.flush()


class FaultyEnvironment:
    def __init__(self, faults: Faults, environment: Any) -> None:
        self._faults, self._environment = faults, environment
        self.set_mapsize = faults.call("lmdb.set_mapsize", environment.set_mapsize, lmdb.Error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def begin(self, **options: Any) -> FaultyTransaction:
        return FaultyTransaction(self._faults, self._environment.begin(**options))


class FaultyTransaction:
    def __init__(self, faults: Faults, transaction: Any) -> None:
        self._faults, self._transaction = faults, transaction
        self.put = faults.call("lmdb.put", transaction.put, lmdb.Error)

    def __enter__(self) -> FaultyTransaction:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None or self._faults.fails("lmdb.commit"):
            self._transaction.abort()
            if kind is None:
                raise self._faults.error(lmdb.Error)
            return
        self._transaction.commit()


def pictures(count: int, *broken: int) -> Made:
    def item(number: int) -> Item:
        return Item({"image": np.random.default_rng(number).integers(0, 256, (12, 10, 3), np.uint8)})

    return Made(count, item, lambda at: at % 2, "{}.png", broken=broken, facts={"classes": ("a", "b")})


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MIN_BLOCK_SAMPLES", 3)
    monkeypatch.setattr(Lateness, "samples_a_task", 1)  # or a busy machine would have other tasks each time


@contextlib.contextmanager
def watching(faults: Faults) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "replace", "rename", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, faults.call(name, getattr(os, name)))
        patch.setattr(io, "open", faults.open)
        patch.setattr(lmdb, "open", faults.open_lmdb)
        yield


def _first(jitter: str) -> Recipe:
    return Recipe(size=8, variants=1, augment=jitter)


def _build(jitter: str, cache: Path) -> None:
    build_here(pictures(5), cache, _first(jitter))


def _add(jitter: str, cache: Path) -> None:
    build_here(pictures(7), cache, Recipe(size=8, variants=2, augment=jitter))


def _repair(jitter: str, cache: Path) -> None:
    repair_cache(pictures(5), cache, jobs=1, augment=jitter)


def _nothing(jitter: str, cache: Path) -> None:
    cache.mkdir()


def _damaged(jitter: str, cache: Path) -> None:
    _build(jitter, cache)
    for name in ("v00-00000.lmdb", "v01-00001.lmdb", "index.npy"):
        (cache / name).write_bytes((cache / name).read_bytes()[:-1] + b"x")


def _relabel(jitter: str, cache: Path) -> None:
    relabel_cache(cache, cache.with_name("labels.csv"), TableOptions(label_cols=("label",)))


def _skip(jitter: str, cache: Path) -> None:
    build_here(pictures(5, 1, 0), cache, on_error="skip")


def _retry(jitter: str, cache: Path) -> None:
    build_here(pictures(5, 0), cache, retry=True)


#: What is there before, what is then run, and how many points of failure it has at least.
RUNS = {
    "build": (_nothing, _build, 130),
    "add": (_build, _add, 150),
    "repair": (_damaged, _repair, 70),
    "retry": (_skip, _retry, 60),
}


State = frozenset[tuple[str, bytes]]
Run = Callable[[str, Path], None]


def state(cache: Path) -> State:
    return frozenset(
        (str(path.relative_to(cache)), path.read_bytes() if path.is_file() and path.name != "lock" else b"")
        for path in cache.rglob("*")
    )


#: After which call a run ended, and its error if it raised one.
End = tuple[tuple[int, str], BuildError | None]


def full_disks(run: Run, jitter: str, start: Path, cache: Path, counted: Faults) -> Iterator[End]:
    for at in counted.chosen():
        name = counted.calls[at]
        shutil.copytree(start, cache)
        faults, error = Faults(at), None
        with watching(faults):
            try:
                run(jitter, cache)
            except BuildError as caught:
                error = caught
        assert faults.calls[at] == name
        yield (at, name), error
        shutil.rmtree(cache)


def kills(run: Run, jitter: str, start: Path, cache: Path, counted: Faults) -> Iterator[End]:
    seen, left, chosen = set[State](), dict[Path, tuple[int, str]](), {*counted.chosen()}

    def look() -> None:
        if len(faults.calls) - 1 in chosen and (found := state(cache)) not in seen:
            seen.add(found)
            copied = shutil.copytree(cache, cache.with_name(f"killed-{len(left)}"))
            left[Path(copied)] = len(faults.calls), faults.calls[-1]

    faults = Faults(look=look)
    shutil.copytree(start, cache)
    with watching(faults):
        run(jitter, cache)
    assert faults.calls == counted.calls
    shutil.rmtree(cache)
    for copied, where in left.items():
        copied.rename(cache)
        yield where, None
        shutil.rmtree(cache)


ENDS = {"full disk": full_disks, "kill": kills}


#: A full disk and kills in all that changes a cache; these are always run.
ALWAYS = [("build", "kill"), ("repair", "kill")]
MORE = [(name, mode) for name in RUNS for mode in ENDS if (name, mode) not in ALWAYS]


def changes(run: Run, jitter: str, cache: Path) -> Faults:
    faults = Faults()
    with watching(faults):
        run(jitter, cache)
    return faults


@pytest.mark.parametrize(("name", "mode"), [*thorough(*MORE), *ALWAYS])
def test_whatever_fails_is_reported_and_the_next_run_ends_in_the_same_bytes(
    name: str, mode: str, jitter: str, tmp_path: Path
) -> None:
    prepare, run, floor = RUNS[name]
    start, cache, finished = tmp_path / "start", tmp_path / "cache", set[State]()
    prepare(jitter, start)
    run(jitter, shutil.copytree(start, tmp_path / "whole"))
    expected = digests(tmp_path / "whole")
    counted = changes(run, jitter, shutil.copytree(start, tmp_path / "again"))
    calls = counted.calls
    assert len(calls) >= floor
    assert {"open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir"} <= set(calls)
    assert {"lmdb.open", "lmdb.put", "lmdb.commit"} <= set(calls)
    for where, error in ENDS[mode](run, jitter, start, cache, counted):
        if error is not None:
            assert re.search(r"^[^\n]*No space left[^\n]*again[^\n]*$", str(error)), where
        elif mode == "full disk":
            assert where[1] in (*HARMLESS, "link"), where  # a copy does as well as a link
        if (found := state(cache)) in finished:
            continue
        finished.add(found)
        if name in ("add", "retry"):
            assert verify_cache(cache) == [], where
        run(jitter, cache)
        assert digests(cache) == expected, where
    assert len(finished) >= floor / 8


def shown(cache: Path) -> dict[str, Any]:
    dataset = CachedDataset(cache)
    items = zip(dataset.paths, dataset, strict=True)
    return {path: (dataset.classes[int(label)], np.asarray(image).tobytes()) for path, (image, label) in items}


CHANGES: dict[str, Run] = {
    "relabel": _relabel,
    "delete": lambda _, cache: delete_samples(cache, paths=["3.png"]),
    "undo": lambda _, cache: undo_delete(cache),
    "compact": lambda _, cache: compact_cache(cache),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("relabel", "kill"),
        ("delete", "kill"),
        *thorough(("relabel", "full disk"), ("undo", "kill"), ("compact", "kill")),
    ],
)
def test_a_change_that_fails_anywhere_leaves_the_version_before_or_the_next(
    name: str, mode: str, jitter: str, tmp_path: Path
) -> None:
    start, cache, change = tmp_path / "start", tmp_path / "cache", CHANGES[name]
    _build(jitter, start)
    delete_samples(start, paths=["1.png"])
    rows = [f"{number}.png,{'xyz'[number % 3]}" for number in range(5)]
    write_rows(tmp_path / "labels.csv", "file,label", *rows)
    counted = changes(change, jitter, shutil.copytree(start, tmp_path / "whole"))
    expected, (before, after) = digests(tmp_path / "whole"), (shown(each) for each in (start, tmp_path / "whole"))
    assert {"open", "write", "fsync", "replace"} <= {*counted.calls}
    seen = []
    for where, _ in ENDS[mode](change, jitter, start, cache, counted):
        assert verify_cache(cache) == [], where
        seen.append(shown(cache) == after)
        assert seen[-1] or shown(cache) == before, where
        if not seen[-1] or name in ("relabel", "compact"):
            change(jitter, cache)
        found = digests(cache).items()
        assert {each for each in found if not each[0].startswith(".warmup")} == expected.items(), where
    assert len(seen) > 3
    assert any(seen)
    assert name == "compact" or not all(seen)
