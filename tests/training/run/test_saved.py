"""Files of a run are checked before any of them is used: what no run writes is one line that names the file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import zipfile

import pytest
import torch
from running import best_of, last_of, predictor_of, report_of, train_on

from tpucache import CachedDataset, TrainingError, UsageError
from tpucache.training.page import report_run
from tpucache.training.run.report import read_account, read_folds, read_report
from tpucache.training.run.saved import load_last
from tpucache.training.settings import TrainSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    dataset, run = CachedDataset(cache), tmp_path_factory.mktemp("trained") / "run"
    settings = TrainSettings(model="cnn", epochs=1, batch_size=50, lr=0.01)
    train_on(run, settings, dataset, dataset, curves=False)
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def weights(change):
    """Return a function that changes the first weight of a content."""

    def harm(content):
        name = next(iter(content["model"]))
        content["model"][name] = change(content["model"][name])

    return harm


HARMS = {
    "seven means": lambda content: content.update(mean=[0.0] * 7),
    "a text as mean": lambda content: content.update(mean="0, 0, 0"),
    "a deviation of 0": lambda content: content.update(std=[1.0, 0.0, 1.0]),
    "a mean that is not finite": lambda content: content.update(mean=[float("nan")] * 3),
    "weights in a list": lambda content: content.update(model=list(content["model"].values())),
    "no weights": lambda content: content.update(model={}),
    "a weight as a list": weights(lambda tensor: tensor.tolist()),
    "int8": weights(lambda tensor: tensor.to(torch.int8)),
    "complex": weights(lambda tensor: tensor.to(torch.complex64)),
    "float64": weights(lambda tensor: tensor.double()),
    "another shape": weights(lambda tensor: tensor[:1]),
    "a terabyte of one number": weights(lambda tensor: tensor.reshape(-1)[:1].expand(1 << 38)),
    "sparse": weights(lambda tensor: tensor.to_sparse()),
    "outputs as text": lambda content: content.update(outputs="4"),
    "outputs without end": lambda content: content.update(outputs=1 << 40),
    "another task": lambda content: content.update(task="sorting"),
    "classes twice": lambda content: content.update(classes=["ant"] * 4),
    "a field of no codec": lambda content: content["fields"][0].update(codec="telepathy"),
    "a shape as text": lambda content: content["fields"][0].update(shape="16"),
    "epochs as text": lambda content: content["settings"].update(epochs="1"),
    "a truth value as size": lambda content: content["settings"].update(batch_size=True),
    "a setting less": lambda content: content["settings"].pop("augment"),
    "no settings": lambda content: content.pop("settings"),
    "another version": lambda content: content.update(version=2),
}


@pytest.mark.parametrize("harm", HARMS)
def test_weights_that_no_run_writes_do_not_predict(run, harm):
    content = best_of(run)
    HARMS[harm](content)
    torch.save(content, run / "best.pt")
    with pytest.raises((TrainingError, UsageError)) as raised:
        predictor_of(run)
    message = str(raised.value)
    assert "\n" not in message
    assert "best.pt" in message or harm == "another task"


def test_a_checkpoint_takes_no_more_memory_than_its_file(run):
    with zipfile.ZipFile(run / "best.pt") as archive, zipfile.ZipFile(run / "packed", "w", 8) as packed:
        for member in archive.infolist():
            packed.writestr(member.filename, archive.read(member))
    (run / "packed").replace(run / "best.pt")
    with pytest.raises(TrainingError, match=r"best\.pt cannot be read: it has compressed members"):
        predictor_of(run)


@pytest.mark.thorough
def test_a_list_that_holds_another_one_many_times_is_not_followed(run):
    content = best_of(run)
    inner: list[object] = [0] * 100
    for _ in range(12):
        inner = [inner] * 100
    torch.save({**content, "classes": inner}, run / "best.pt")
    with pytest.raises(TrainingError, match="holds more than"):
        predictor_of(run)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"steps": 2},
        {"losses": "none"},
        {"losses": [None] * 3},
        {"rows": [7]},
        {"best": "high"},
        {"x": 1},
    ],
)
def test_a_state_that_no_run_is_in_is_not_continued(run, change):
    content = last_of(run)
    content["stand"].update(change)
    torch.save(content, run / "last.pt")
    with pytest.raises(TrainingError, match=r"last\.pt cannot be used: .*stand"):
        load_last(run)


TEXTS = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"seconds":' * 100_000 + "1" + "}" * 100_000,
    "too large": '{"seconds": {"training": 1e308}, "losses": [1e308, -1e308], "wall_seconds": 1e308}',
    "twice": '{"losses": [1], "losses": [2]}',
    "a list": "[]",
    "nothing": "",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["run.json", "report.json"])
def test_texts_that_no_run_writes_make_no_page_and_no_report(run, name, text):
    (run / name).write_text(TEXTS[text])
    for read in (report_run, *([read_report] if name == "report.json" else [])):
        with pytest.raises(TrainingError) as raised:
            read(run)
        assert "\n" not in str(raised.value)


def test_values_of_another_type_are_no_report(run):
    values = report_of(run)
    for change in ({"losses": "1"}, {"epochs": [[]]}, {"pace": {**values["pace"], "steps": "3"}}, {"finished": 1}):
        (run / "report.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(TrainingError, match=rf"report\.json cannot be read: .*'{next(iter(change))}"):
            read_report(run)


def test_accounts_and_folds_of_other_types_are_refused(run):
    (run / "account.json").write_text('{"seconds": {"training": "long"}, "wall_seconds": 1}')
    (run / "folds.json").write_text('{"version": 1, "folds": [1, 2]}')
    with pytest.raises(TrainingError, match=r"account\.json"):
        read_account(run)
    with pytest.raises(TrainingError, match=r"folds\.json"):
        read_folds(run)


def test_arrays_that_expand_are_no_part_of_a_page(run):
    with zipfile.ZipFile(run / "validation.npz", "w", 8) as archive:
        archive.writestr("errors.npy", bytes(1 << 20))
    with pytest.raises(TrainingError, match=r"validation\.npz cannot be read: it has compressed members"):
        report_run(run)


def give_up_waiting(pipe):
    """Let a reader that waits for a pipe go on, with an empty file."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_a_history_that_is_a_pipe_is_not_waited_for(run):
    (run / "history.csv").unlink()
    os.mkfifo(run / "history.csv")
    threading.Timer(1, give_up_waiting, [run / "history.csv"]).start()
    with pytest.raises(TrainingError, match=r"history\.csv cannot be read"):
        report_run(run)
