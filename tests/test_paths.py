"""Every public function takes a path as text or as a Path, and does the same with either."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tpucache
from tpucache import Recipe, build_cache
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.report.preview import contact_sheet, save_picture
from tpucache.warmup.sources import FolderSource, TableSource, open_source
from tpucache.warmup.sources.columns import TableOptions

pytestmark = pytest.mark.usefixtures("short_runs")

#: What others than users call: results, and parts of what they are given.
INNER = {"Device.profile", "Manifest.save", "Predictions"}
PACKAGES = ("tpucache", "tpucache.training", "tpucache.warmup", "tpucache.ondevice", "tpucache.insight")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each public function, constructor and method, by name."""
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            yield from members(getattr(package, name))


def members(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isfunction(value):
        yield value.__name__, value
    elif inspect.isclass(value):
        yield value.__name__, value.__init__
        for name, method in inspect.getmembers(value, callable):
            if not name.startswith("_") and inspect.isroutine(method) and not inspect.isbuiltin(method):
                yield f"{value.__name__}.{name}", method


def test_no_public_function_asks_for_a_path_of_one_kind() -> None:
    found = set()
    for name, function in functions():
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # built in
            continue
        for parameter in parameters.values():
            kind = str(parameter.annotation)
            if "Path" in kind and "str" not in kind and name not in INNER:
                found.add(f"{name}({parameter.name}: {kind})")
    assert not found


def test_the_walk_meets_the_functions_that_it_is_for() -> None:
    names = {name for name, _ in functions()}
    assert names >= {"stage_cache", "verify_cache", "report_cache", "build_cache", "train", "predict", "Manifest.load"}


def verify(cache: Any, out: Any) -> Any:
    return tpucache.verify_cache(cache)


def stage(cache: Any, out: Any) -> Any:
    return tpucache.stage_cache(cache, out).name


def find(cache: Any, out: Any) -> Any:
    return tpucache.find_cache(Path(cache).name, [type(cache)(Path(cache).parent)])


def preview(cache: Any, out: Any) -> Any:
    Path(out).mkdir()
    picture = tpucache.preview_cache(cache, samples=2, side=16)
    return Path(save_picture(picture, type(out)(Path(out) / "sheet.png"))).read_bytes(), contact_sheet(cache)


def report(cache: Any, out: Any) -> Any:
    Path(out).mkdir()
    return tpucache.report_cache(cache, samples=2).save(type(out)(Path(out) / "page.html")).exists()


def transfer(cache: Any, out: Any) -> Any:
    push_cache(cache, f"file://{out}/pushed")
    return fetch_cache(f"{out}/pushed", type(out)(Path(out) / "fetched")).identity


def test_where_nobody_has_a_home_what_needs_one_says_so(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "TPUCACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # which has no entry in the table of users
    with pytest.raises(tpucache.UsageError, match=r"no home folder for ~/\.cache/tpucache: set TPUCACHE_DIR"):
        tpucache.ImageFolder(photos, size=8)
    with pytest.raises(tpucache.NotACacheError, match="no cache is called 'nothing'"):
        tpucache.find_cache("nothing")


DOORS = (verify, stage, find, preview, report, transfer)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_text_and_path_do_the_same(door: Callable[[Any, Any], Any], cache: Path, tmp_path: Path) -> None:
    assert door(str(cache), str(tmp_path / "text")) == door(cache, tmp_path / "path")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [str, Path])
def test_sources_are_given_either_way(kind: type, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("image,label\n" + "".join(f"ant/{number:04d}.png,{number % 3}\n" for number in range(0, 20, 4)))
    options = TableOptions(root=kind(photos), label_cols=("label",))
    assert len(FolderSource(kind(photos)).list().samples) == 150
    assert len(TableSource(kind(table), options).list().samples) == 5
    assert len(open_source(kind(table), options).list().samples) == 5
    source, cache = open_source(kind(photos / "bee")), kind(tmp_path / "cache")
    before = build_cache(source, cache, Recipe(size=8), jobs=1)
    (tmp_path / "cache" / "v00-00000.lmdb").write_bytes(b"damaged")
    assert tpucache.repair_cache(kind(photos / "bee"), cache, jobs=1) != []
    assert tpucache.verify_cache(cache) == []
    assert json.loads((tmp_path / "cache" / "manifest.json").read_text())["fingerprint"] == before.fingerprint
