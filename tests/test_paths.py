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
from tpucache import CachedDataset, Manifest, Recipe, UsageError, build_cache
from tpucache.publish.bundle import make_bundle
from tpucache.publish.publish import prepare
from tpucache.publish.rules import Metadata
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.report.preview import contact_sheet, save_picture
from tpucache.store.cache import Cache
from tpucache.store.reader import ShardReader
from tpucache.store.samples import SampleTable
from tpucache.warmup.sources import FolderSource, TableSource, open_source
from tpucache.warmup.sources.table import TableOptions

pytestmark = pytest.mark.usefixtures("short_runs")

#: The modules whose functions users call; the others' take a Path that these have made.
MODULES = (
    *("errors", "recipe", "loading.dataset", "loading.find", "loading.loader", "publish.bundle", "publish.publish"),
    *("publish.rules", "publish.transfer", "report.bench", "report.doctor", "report.inspect"),
    *("report.page", "report.preview", "training.page"),
    *("report.records", "store.cache", "store.manifest", "store.reader", "store.samples"),
    *("store.verify", "training.weights", "training.loop", "training.lr_finder", "training.options"),
    *("training.prediction", "training.run.report", "warmup.repair", "warmup.build"),
    *("warmup.sources", "warmup.sources.folder", "warmup.sources.table"),
)
#: What of them takes only a Path: parts of one another, and the machine's own files.
INNER = {
    *(
        "is_whole",
        "rebuild_index",
        "CsvTable.path",
        "find_lr.stop",
        "Manifest.save.aside",
        "RecordIndex",
        "load_manifest",
        "read_file",
        "predict_parts",
        "write_json",
        "write_file",
        "read_below",
    ),
    *("make_folds_report", "read_folds", "rebuild_index", "run_folders", "write_folds"),
    *("Found", "Search", "Bundle", "OpenFile", "diagnose.root", "look_into"),
}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each public function, constructor and method of the modules, by name."""
    homes = [importlib.import_module(f"tpucache.{name}") for name in MODULES]
    for value in [getattr(tpucache, name) for name in tpucache.__all__]:
        yield from members(value)
    for home in homes:
        for name, value in vars(home).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == home.__name__:
                yield from members(value)


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
            if "Path" in kind and "str" not in kind and not {name, f"{name}.{parameter.name}"} & INNER:
                found.add(f"{name}({parameter.name}: {kind})")
    assert not found


def test_the_walk_meets_the_functions_that_it_is_for() -> None:
    names = {name for name, _ in functions()}
    assert names >= {
        *("stage_cache", "verify_cache", "report_cache", "preview_cache", "build_cache", "repair_cache", "find_cache"),
        *("fetch_cache", "push_cache", "prepare", "make_bundle", "train", "predict", "find_lr", "Manifest.load"),
        *("CachedDataset", "Predictor", "TableSource", "FolderSource", "Page.save"),
    }


METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")


def verify(cache: Any, out: Any) -> Any:
    return tpucache.verify_cache(cache)


def stage(cache: Any, out: Any) -> Any:
    return tpucache.stage_cache(cache, out).name


def manifest(cache: Any, out: Any) -> Any:
    Path(out).mkdir()
    Manifest.load(cache).save(out)
    return Manifest.load(out).identity


def samples(cache: Any, out: Any) -> Any:
    return list(Cache.open(cache).samples["number"]), len(SampleTable(type(out)(Path(cache) / "samples.npz"), 150))


def records(cache: Any, out: Any) -> Any:
    rows = Cache(cache, Manifest.load(cache)).index.read_all()
    return bytes(ShardReader(cache, Manifest.load(cache).shards).read(rows[3]))


def dataset(cache: Any, out: Any) -> Any:
    return CachedDataset(cache)[3][1].item()


def find(cache: Any, out: Any) -> Any:
    return tpucache.find_cache(Path(cache).name, [type(cache)(Path(cache).parent)])


def preview(cache: Any, out: Any) -> Any:
    Path(out).mkdir()
    picture = tpucache.preview_cache(cache, samples=2, side=16)
    return Path(save_picture(picture, type(out)(Path(out) / "sheet.png"))).read_bytes(), contact_sheet(cache)


def wrong_picture(cache: Any, out: Any) -> Any:
    with pytest.raises(UsageError, match="is that of no picture format"):
        save_picture(tpucache.preview_cache(cache, samples=2, side=16), type(out)(f"{out}.lmdb"))


def report(cache: Any, out: Any) -> Any:
    Path(out).mkdir()
    return tpucache.report_cache(cache, samples=2).save(type(out)(Path(out) / "page.html")).exists()


def publish(cache: Any, out: Any) -> Any:
    made = make_bundle(cache, METADATA, out)
    assert prepare(cache, METADATA, out) == made
    return made.files


def transfer(cache: Any, out: Any) -> Any:
    push_cache(cache, f"file://{out}/pushed")
    return fetch_cache(f"{out}/pushed", type(out)(Path(out) / "fetched")).identity


DOORS = (
    verify, stage, manifest, samples, records, dataset, find, preview, wrong_picture, report, publish, transfer
)  # fmt: skip


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
