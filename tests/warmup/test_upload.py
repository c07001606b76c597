"""Caches that are built into a URL: the bytes of a build into a folder, also after a kill and on another machine."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import fsspec.implementations.memory
import huggingface_hub
import numpy as np
import pytest
from disk import SmallDisk
from made import build_here, write_photos
from stops import Stopped, stop_after
from stores import KEYS, serve_s3
from thorough import thorough

from tpucache import BuildError, CachedDataset, CachedLoader, Recipe, UnfinishedError, UsageError, build_cache
from tpucache.cli import main
from tpucache.errors import StoreError, TpucacheError
from tpucache.progress import BuildProgress
from tpucache.publish.transfer import push_cache
from tpucache.store.copying import Claim
from tpucache.store.remote.url import Remote
from tpucache.warmup.run import scheduler, tasks
from tpucache.warmup.run.places import UrlPlace

_RECIPE = Recipe(size=96, shard_mb=1)
_MANY = 100  # samples, in three shards


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("upload") / "photos", _MANY, size=(80, 70))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("built") / "cache"
    build_here(source, cache, _RECIPE)
    return cache


def held(url: str) -> dict[str, bytes]:
    files = fsspec.filesystem("memory")
    folder = "/" + url.partition("://")[2]
    if not files.exists(folder):
        return {}
    found = {path.rpartition("/")[2]: files.cat_file(path) for path in files.ls(folder, detail=False)}
    return {name: data for name, data in found.items() if name != "times.json"}


def files_of(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "times.json"}


@dataclass
class Case:
    source: Path
    built: dict[str, bytes]
    folder: Path
    url: str = "memory://caches/one"

    def build(self, local: str = "local", recipe: Recipe = _RECIPE, **options: Any) -> None:
        build_here(self.source, self.url, recipe, local=self.folder / local, **options)

    def held(self) -> dict[str, bytes]:
        return held(self.url)

    def check(self) -> None:
        assert self.held() == self.built


@pytest.fixture
def case(source: Path, built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Case]:
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "kept"))
    yield Case(source, files_of(built), tmp_path)
    fsspec.filesystem("memory").rm("/caches", recursive=True) if fsspec.filesystem("memory").exists("/caches") else None


@pytest.mark.parametrize("keep", [True, *thorough(False)])
def test_a_url_gets_the_bytes_of_a_folder(case: Case, keep: bool) -> None:
    case.build(keep_local=keep)
    case.check()
    if keep:
        assert files_of(case.folder / "local") == case.built
    else:
        assert not (case.folder / "local").exists()
    before = case.held()
    case.build(keep_local=keep)
    assert case.held() == before


def test_what_waits_to_be_sent_is_bounded_and_what_was_sent_is_gone(case: Case) -> None:
    most = []

    def look(_: object) -> None:
        waiting = 0
        for path in (case.folder / "local").glob("*.lmdb"):
            with contextlib.suppress(FileNotFoundError):  # it was sent, and removed, since it was listed
                waiting += path.stat().st_size
        most.append(waiting)

    case.build(keep_local=False, on_progress=look)
    case.check()
    largest = max(len(data) for name, data in case.built.items() if name.endswith(".lmdb"))
    assert max(most) <= 4 * largest


@pytest.mark.parametrize("keep", [*thorough(True), False])
def test_samples_and_variants_are_added_at_a_url_as_in_a_folder(case: Case, keep: bool) -> None:
    case.source, expected = case.folder / "photos", case.folder / "expected"
    for number, recipe in ((60, _RECIPE), (90, _RECIPE), (90, Recipe(size=96, shard_mb=1, variants=1))):
        write_photos(case.source, number, size=(80, 70))
        build_here(case.source, expected, recipe)
        case.build(recipe=recipe, keep_local=keep)
        there = case.held()
        assert {name: there[name] for name in files_of(expected)} == files_of(expected)


class Hub(fsspec.implementations.memory.MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    endpoint, token = "https://hub.invalid", "secret"
    commits: ClassVar[list[list[str]]] = []

    def resolve_path(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(
            repo_type="dataset",
            repo_id="ann/birds",
            revision="main",
            path_in_repo=path.partition("/birds")[2].strip("/"),
        )

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            self.commits.append([path])
        return super().open(path, mode, **options)


@pytest.fixture
def hub(case: Case, monkeypatch: pytest.MonkeyPatch) -> Hub:
    files = Hub()

    def create_commit(self: object, repo_id: str, operations: list[Any], **options: Any) -> None:
        assert (repo_id, options["repo_type"], options["revision"]) == ("ann/birds", "dataset", "main")
        made = [*Hub.commits, [operation.path_in_repo for operation in operations]]
        for operation in operations:
            path = f"/datasets/ann/birds/{operation.path_in_repo}"
            if isinstance(operation, huggingface_hub.CommitOperationAdd):
                with operation.as_file() as file:
                    files.pipe_file(path, file.read())
            else:
                files.rm_file(path)
        Hub.commits[:] = made

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (files, "/" + url.partition("://")[2]))
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("commits", [])):
        monkeypatch.setattr(Hub, name, value)
    files.pipe_file("/datasets/ann/birds/.gitattributes", b"of each repository")
    Hub.commits.clear()
    return files


@pytest.mark.parametrize("folder", ["", "/train"])
def test_the_hub_gets_a_shard_and_its_receipt_in_one_commit(case: Case, hub: Hub, folder: str) -> None:
    place = f"/datasets/ann/birds{folder}"
    case.url = f"hf:/{place}"
    case.build(keep_local=False)
    there = {path.rpartition("/")[2]: hub.cat_file(path) for path in hub.ls(place, detail=False)}
    assert {name: data for name, data in there.items() if name != ".gitattributes"} == case.built
    shards = [name for name in there if name.endswith(".lmdb")]
    assert len(Hub.commits) <= len(shards) + 4  # claim, plan, tables, manifest
    assert not [made for made in Hub.commits if any(name.endswith(".lmdb") for name in made) and len(made) < 2]


def test_the_hub_gets_what_a_version_adds_and_refuses_a_parent_of_another_cache(
    built: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = "hf://datasets/ann/birds", tmp_path / "cache"
    photos = write_photos(tmp_path / "photos", 60, size=(80, 70))
    build_here(photos, cache, _RECIPE)
    push_cache(cache, url)
    first = CachedDataset(cache)
    Hub.commits.clear()
    build_here(write_photos(photos, 70, size=(80, 70)), cache, _RECIPE)
    push_cache(cache, url)
    sent = {Path(name).name for made in Hub.commits for name in made if name.endswith(".lmdb")}
    assert sent == {path.name for path in cache.glob("*.lmdb")} - {shard.name for shard in first.manifest.shards}
    assert len(sent) == 1
    for version, samples in ((1, 60), (2, 70)):
        dataset = CachedDataset(f"{url}@{version}")
        assert len(dataset) == samples
        assert np.array_equal(dataset[59][0], first[59][0])
    hub.pipe_file("/datasets/ann/birds/version-1.json", (built / "manifest.json").read_bytes())
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "another reader's"))
    with pytest.raises(TpucacheError, match=r"version-1\.json"):
        CachedDataset(f"{url}@1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "is_another_machine", "step"), [(False, True, 6), *thorough((True, False, 2), (False, True, 2))]
)
def test_a_build_that_was_stopped_at_any_request_continues_where_it_was(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    is_another_machine: bool,
    keep: bool,
    step: int,
) -> None:
    made: list[str] = []
    real_install, real_write, real_remove = tasks.install_shard, Remote.write, Remote.remove
    monkeypatch.setattr(
        scheduler, "install_shard", lambda context, one: made.append(one.shard.entry.name) or real_install(context, one)
    )
    left = [0]

    def stopping(call: Callable[..., None]) -> Callable[..., None]:
        def ask(remote: Remote, name: str, *arguments: object) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Stopped
            call(remote, name, *arguments)

        return ask

    for method, real in (("write", real_write), ("remove", real_remove)):
        monkeypatch.setattr(Remote, method, stopping(real))
    for request in itertools.count(1 + is_another_machine, step):  # with a step of 2, each request in one of both ways
        local = f"local-{request}"
        left[0] = request
        try:
            case.build(local, keep_local=keep)
        except Stopped:
            pass
        else:
            break
        left[0] = 0
        sent = {*case.held()} & {*case.built}
        if is_another_machine:
            local = f"other-{request}"
        before = len(made)
        case.build(local, keep_local=keep)
        case.check()
        again = set(made[before:])
        # Of a shard whose receipt did not arrive, nothing is known on another machine.
        assert len(again & sent) <= (1 if is_another_machine else 0), request
        fsspec.filesystem("memory").rm("/caches", recursive=True)
    assert request > 12


def test_a_build_whose_time_is_up_has_sent_what_is_finished(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()

    def look(_: BuildProgress) -> None:
        if any(name.endswith(".lmdb") for name in case.held()):
            monkeypatch.setattr(time, "time", lambda: began + 10_000)

    with pytest.raises(UnfinishedError):
        case.build(keep_local=False, on_progress=look, time_limit=9000)
    assert {*case.held()} & {*case.built}
    assert not [*(case.folder / "local").glob("*.lmdb")]
    case.build(keep_local=False)
    case.check()


def test_of_two_builds_into_one_url_one_ends_in_one_line_and_the_other_is_whole(case: Case) -> None:
    began = []

    def begin_other(progress: BuildProgress) -> None:
        if not began and any(name.endswith(".lmdb") for name in case.held()):
            began.append(True)
            case.build("second")

    with pytest.raises(BuildError, match=r"another process builds into memory://caches/one: this process has stopped"):
        case.build("first", on_progress=begin_other)
    assert began
    case.check()


def test_a_claim_that_another_process_makes_at_the_same_moment_is_a_lost_race(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Remote.create

    def race(self: Remote, name: str, data: bytes) -> bool:
        self.write(name, Claim("warmup", "the other's", {}).to_json().encode())
        return create(self, name, data)

    monkeypatch.setattr(Remote, "create", race)
    with pytest.raises(BuildError, match="another process builds into"):
        case.build()
    assert "manifest.json" not in case.held()


def test_a_shard_that_another_process_replaces_leaves_no_manifest(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    send = UrlPlace._send_versions

    def replace(self: UrlPlace, *given: Any) -> None:
        send(self, *given)
        name = next(name for name in case.held() if name.endswith(".lmdb"))
        fsspec.filesystem("memory").pipe_file(f"/caches/one/{name}", case.held()[name])

    monkeypatch.setattr(UrlPlace, "_send_versions", replace)
    with pytest.raises(StoreError, match="was replaced after it was sent"):
        case.build()
    assert "manifest.json" not in case.held()


def test_a_url_that_holds_anything_else_is_left_alone(case: Case) -> None:
    Remote(case.url).write("thesis.txt", b"mine")
    with pytest.raises(UsageError, match="no warmup left there"):
        case.build()
    assert case.held() == {"thesis.txt": b"mine"}
    assert not (case.folder / "local").exists()


def test_another_cache_at_the_url_is_not_mixed_with_this_one(case: Case) -> None:
    case.build("a", Recipe(size=8))
    before = case.held()
    with pytest.raises(Exception, match=r"size"):
        case.build("b")
    assert case.held() == before


def test_what_cannot_be_written_to_or_has_no_folder_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        build_cache(source, "https://example.org/cache", _RECIPE)
    with pytest.raises(UsageError, match="which need a URL"):
        build_cache(source, tmp_path / "cache", _RECIPE, keep_local=False)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_cache_of_twice_the_free_disk_is_built_into_s3_and_read_from_it(
    disk: SmallDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_photos(tmp_path / "photos", 3 * _MANY, size=(80, 70))
    built = tmp_path / "built"
    build_here(source, built, _RECIPE)
    total = sum(path.stat().st_size for path in built.glob("*.lmdb"))
    disk.mount(f"size={total // 2}")
    monkeypatch.setenv("TPUCACHE_DIR", str(disk.path / "kept"))
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with serve_s3() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        command = ["warmup", str(source), "s3://bucket/cache", "--size", "96", "--shard-mb", "1", "--jobs", "1"]
        assert main([*command, "--keep-local", "no"]) == 0, capsys.readouterr().err
        dataset = CachedDataset("s3://bucket/cache", in_memory=False)
        loaders = [CachedLoader(each, 32, shuffle="block", seed=1) for each in (dataset, CachedDataset(built))]
        for (images, labels), (others, classes) in zip(*loaders, strict=True):
            assert images.equal(others)
            assert labels.equal(classes)


def test_a_receipt_of_another_shard_is_not_taken(case: Case) -> None:
    cache = case.folder / "cache"
    with pytest.raises(Stopped):
        build_here(case.source, cache, _RECIPE, on_progress=stop_after(70))
    work = cache / ".warmup"
    (work / "shard-00002-v0000.npz").write_bytes((work / "shard-00000-v0000.npz").read_bytes())
    (work / "shard-00002-v0000.sent").touch()
    build_here(case.source, cache, _RECIPE)
    assert files_of(cache) == case.built
