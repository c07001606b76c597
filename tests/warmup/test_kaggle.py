"""Caches that are built into a dataset at Kaggle, against the stand-in: the bytes of a local build, after any kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from made import build_here, write_photos
from stops import Stopped, stop_after
from thorough import thorough

from scripts.kaggle_server import KEY, PIECE, Blob, KaggleServer
from tpucache import BuildError, Recipe, UnfinishedError, UsageError, build_cache
from tpucache.errors import PublishError
from tpucache.store.remote import kaggle
from tpucache.store.remote.kaggle import Draft, KaggleDataset
from tpucache.warmup.run import scheduler, tasks

_RECIPE = Recipe(size=160, shard_mb=1)
_PLACE, _ID = "kaggle:ann/birds-at-160", "ann/birds-at-160"
_SHARDS = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("kaggle") / "photos", 40, size=(20, 20))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    cache = tmp_path_factory.mktemp("built") / "cache"
    build_here(source, cache, _RECIPE, target="kaggle")
    return {path.name: path.read_bytes() for path in cache.iterdir()}


@pytest.fixture(scope="module")
def running() -> Iterator[KaggleServer]:
    with KaggleServer(page=3).running() as server:
        yield server


@dataclass
class Case:
    source: Path
    built: dict[str, bytes]
    server: KaggleServer
    work: Path
    made: list[str] = field(default_factory=list)

    def warm_up(self, folder: str = "work", **options: Any) -> None:
        local = self.work.with_name(folder)
        build_here(self.source, _PLACE, _RECIPE, local=local, **{"keep_local": False, **options})

    def stop(self) -> None:
        with pytest.raises(Stopped):
            self.warm_up(on_progress=stop_after(30))

    def check(self, *, versions: int = 1, **more: bytes) -> None:
        assert self.server.files(_ID) == {**self.built, **more}
        assert len(self.server.datasets[_ID].versions) == versions

    @property
    def bytes(self) -> int:
        return sum(map(len, self.built.values()))


@pytest.fixture
def case(
    source: Path,
    built: dict[str, bytes],
    running: KaggleServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Case:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kaggle, "_FIRST_POLL", 0.001)
    monkeypatch.setattr(kaggle, "_PAUSES", (0.001,) * 8)
    running.reset()
    found, install = Case(source, built, running, tmp_path / "work"), tasks.install_shard
    monkeypatch.setattr(
        scheduler,
        "install_shard",
        lambda context, one: found.made.append(one.shard.entry.name) or install(context, one),
    )
    return found


@pytest.mark.parametrize("keep", [*thorough(True), False])
def test_a_dataset_has_the_bytes_of_a_local_build_in_one_version(case: Case, keep: bool) -> None:
    case.server.faults.lag = 5
    for _ in range(2):  # the second time it is there
        case.warm_up(keep_local=keep, companions=lambda manifest: {"README.md": b"card"})
        case.check(**{"README.md": b"card"})
    assert sum(name.endswith(".lmdb") for name in case.built) == _SHARDS
    assert case.server.datasets[_ID].is_private
    assert case.server.received == sum(map(len, case.server.files(_ID).values()))
    kept = {path.name: path.read_bytes() for path in case.work.glob("*")}
    assert kept == (case.built if keep else {})


def test_the_same_cache_is_built_once_and_sent_from_its_folder(case: Case) -> None:
    build_here(case.source, case.work, _RECIPE, target="kaggle")
    before = list(case.made)
    case.warm_up(keep_local=True)
    assert case.made == before
    case.check()
    assert {path.name for path in case.work.iterdir()} == {*case.built}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_build_that_is_stopped_at_any_step_ends_in_the_same_one_version(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, case.server.faults.lag = [0], 2

    def stopping(real: Any) -> Any:
        def step(*words: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Stopped
            found = real(*words, **options)
            left[0] -= 1
            if left[0] == 0:
                raise Stopped
            return found

        return step

    for kind, name in ((KaggleDataset, "_ask"), (KaggleDataset, "_put"), (Draft, "_save"), (Path, "touch")):
        monkeypatch.setattr(kind, name, stopping(getattr(kind, name)))
    for steps in itertools.count(1, 3):  # each run gets a little further
        left[0] = steps
        try:
            case.warm_up()
        except Stopped:
            continue
        break
    assert steps > 40
    case.check()
    assert not case.work.exists()


def test_shards_whose_uploads_have_expired_are_built_again_and_no_others(case: Case) -> None:
    case.stop()
    assert [*(case.work / ".warmup").glob("*.sent")]
    gone = next(name for name in case.made if not (case.work / name).exists())
    case.server.expire(gone)
    before = len(case.made)
    case.warm_up()
    assert gone in case.made[before:]
    assert len(case.made) == _SHARDS + 1
    case.check()


@pytest.mark.parametrize("is_early", [True, *thorough(False)])
def test_what_expires_before_the_version_is_made_is_found_out_then(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    is_early: bool,
) -> None:
    name = next(name for name in case.built if name.endswith(".lmdb"))
    kind, step = (Draft, "commit") if is_early else (KaggleDataset, "create")  # Kaggle itself refuses the second
    real = getattr(kind, step)

    def late(*words: Any, **options: Any) -> Any:
        case.server.expire(name)
        return real(*words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, step, late)
        with pytest.raises(
            UnfinishedError, match=rf"1 files .* have expired at Kaggle \({name}\): no version was made"
        ):
            case.warm_up()
    assert not case.server.datasets
    case.warm_up()
    assert case.made[_SHARDS:] == [name]
    case.check()


def test_broken_connections_continue_in_the_middle_of_a_file_and_lost_answers_make_one_version(case: Case) -> None:
    case.server.faults.cuts = [PIECE + 1000, 10, 2 * PIECE]
    case.server.faults.busy, case.server.faults.broken, case.server.faults.lost = 3, 2, 1
    case.warm_up()
    case.check()
    assert case.server.received == case.bytes + 1000 + 10


def test_a_kill_in_the_middle_of_a_file_continues_there(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    put = KaggleDataset._put

    def stop(*words: Any) -> None:
        put(*words)
        raise Stopped

    case.server.faults.cuts = [2 * PIECE + 7]
    with monkeypatch.context() as patch:
        patch.setattr(KaggleDataset, "_put", stop)
        with pytest.raises(Stopped):
            case.warm_up()
    case.warm_up()
    case.check()
    assert case.server.received == case.bytes + 7


def test_a_version_that_lacks_a_file_is_noticed_and_the_next_one_has_it(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.server.faults.left_out = 1
    lacking = sorted(case.built)[0]
    with monkeypatch.context() as patch:
        patch.setattr(kaggle, "_GRACE_SECONDS", 0.0)
        with pytest.raises(PublishError, match=rf"{_ID} is not what was sent: {lacking} is missing"):
            case.warm_up()
    received = case.server.received
    case.server.faults.lag = 4
    case.warm_up()
    case.check(versions=2)
    assert case.server.received == received + len(case.built[lacking])


def test_an_account_without_room_loses_nothing_that_was_sent(case: Case) -> None:
    case.server.faults.quota = 1000
    with pytest.raises(PublishError, match=r"\(https://www.kaggle.com/datasets/ann/birds-at-160\) says why"):
        case.warm_up()
    case.server.faults.quota = None
    del case.server.datasets[_ID]
    received = case.server.received
    case.warm_up()
    case.check()
    assert case.server.received == received
    assert len(case.made) == _SHARDS


@pytest.mark.parametrize("fault", [*thorough("forbidden", "broken", "no answer"), "unknown"])
def test_no_message_and_no_file_holds_a_key_or_an_address_to_write_to(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    caplog.set_level(logging.DEBUG, "tpucache")
    case.stop()
    ids = [token[::-1] for token in case.server.blobs]
    journal = case.work / ".warmup/kaggle.json"
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    for path in case.work.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
        assert path.is_dir() or path == journal or not any(each.encode() in path.read_bytes() for each in ids)
    if fault == "unknown":
        monkeypatch.setenv("KAGGLE_KEY", f"another than {KEY}")
    case.server.faults.is_forbidden = fault == "forbidden"
    case.server.faults.broken = 99 if fault == "broken" else 0
    if fault == "no answer":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(PublishError) as found:
        case.warm_up()
    texts = [str(found.value), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in texts if KEY in text or any(each in text for each in ids)]
    assert "\n" not in str(found.value)
    if fault == "unknown":
        assert "set KAGGLE_API_TOKEN, or KAGGLE_USERNAME and KAGGLE_KEY" in str(found.value)


def test_a_dataset_that_no_warmup_made_is_left_alone(case: Case) -> None:
    with contextlib.closing(KaggleDataset(_ID)) as theirs:
        token, _ = theirs.start("thesis.txt", 4, 1)
        case.server.blobs[token] = Blob("thesis.txt", 4, bytearray(b"mine"))
        theirs.create([token], "birds-at-160", "")
    with pytest.raises(UsageError, match="is a dataset that no warmup made"):
        case.warm_up()
    assert case.server.files(_ID) == {"thesis.txt": b"mine"}
    assert not case.work.exists()
    with pytest.raises(UsageError, match="the dataset is owner/slug"):
        build_cache(case.source, "kaggle:birds", _RECIPE)


def test_nothing_is_added_to_a_finished_dataset(case: Case) -> None:
    case.warm_up()
    case.source = write_photos(case.work.with_name("more"), 50, size=(20, 20))
    with pytest.raises(BuildError, match=r"has a finished cache of 40 samples, .* by `tpucache publish`"):
        case.warm_up()
    case.check()


@pytest.mark.thorough
def test_two_processes_do_not_send_one_folder(case: Case) -> None:
    refused: list[str] = []

    def begin_other(_: object) -> None:
        if not refused:
            with pytest.raises(BuildError) as found:
                case.warm_up()
            refused.append(str(found.value))

    case.warm_up(on_progress=begin_other)
    assert "another process sends" in refused[0]
    case.check()


@pytest.mark.thorough
def test_two_machines_that_build_the_same_cache_make_one_version(case: Case) -> None:
    def build_before(call: str, moment: str) -> None:
        if (call, moment) == ("CreateDataset", "asked"):
            case.server.watch = lambda call, moment: None
            case.warm_up("other")

    case.server.watch = build_before
    case.warm_up()
    case.check()


def test_a_journal_that_cannot_be_read_is_named(case: Case) -> None:
    case.stop()
    journal = case.work / ".warmup/kaggle.json"
    content = json.loads(journal.read_text())
    for text in ("{", "[]", json.dumps({**content, "files": {"a": {}}}), json.dumps({**content, "format": 9})):
        journal.write_text(text)
        with pytest.raises(BuildError, match=r"kaggle.json cannot be read: .*\. Remove this file: then all files are"):
            case.warm_up()
    journal.write_text(json.dumps({**content, "dataset": "ann/others"}))
    with pytest.raises(BuildError, match="is for the dataset 'ann/others', not for"):
        case.warm_up()


def test_a_dataset_has_no_more_files_than_kaggle_takes(case: Case) -> None:
    with pytest.raises(PublishError, match=r"would have 5\d files, and a dataset has at most 50"):
        case.warm_up(companions=lambda _: {f"{number}.md": b"x" for number in range(48)})
