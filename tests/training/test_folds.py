"""All folds are one run: stopped anywhere it ends in the same files, and each fold is the run of that fold alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tiny_tasks
import torch
from PIL import Image
from running import TRUST, best_of, command, last_of, predictor_of, report_of, rows_of, train_on, with_folds
from stopping import Killed, Moment, differences
from thorough import thorough

from tpucache import CachedDataset, Recipe, TrainingError, UnfinishedError, UsageError, build_cache, report_run
from tpucache.loading.columns import fold_split
from tpucache.runs import fold_folder
from tpucache.text import seconds_text
from tpucache.training import (
    DeviceBatch,
    RunOptions,
    TrainSettings,
    load_checkpoint,
    open_all_folds,
    predict,
    train_folds,
)
from tpucache.training.device import CpuDevice
from tpucache.training.interrupt import StopRequest
from tpucache.training.metrics import mask_metrics
from tpucache.training.run.report import read_folds, write_folds

SETTINGS = TrainSettings(
    model="tiny_models:tiny", epochs=2, batch_size=8, lr=0.05, metric=("tiny_metrics:second_share",)
)
NAMES = ["0", "1"]


@pytest.fixture(scope="module")
def folded(photos, tmp_path_factory):
    """A cache of 30 photographs in two folds."""
    folder = tmp_path_factory.mktemp("folded")
    for path in sorted(photos.rglob("*.png"))[::5]:
        (folder / "photos" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "photos" / path.parent.name)
    build_cache(folder / "photos", folder / "plain", Recipe(size=8), jobs=1)
    return with_folds(folder / "plain", folder, NAMES)


def run_all(cache, run, device=None, settings=SETTINGS, **options):
    dataset = CachedDataset(cache)
    folds = open_all_folds(run, dataset, dataset, options.setdefault("resume", True))
    return train_folds(folds, settings, device or CpuDevice(), RunOptions(replay=False, **options))


@pytest.fixture(scope="module")
def whole(folded, tmp_path_factory):
    """A run of all folds that nothing stopped, its report, and how many batches the device ran."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    moment = Moment(device := CpuDevice())
    return run, run_all(folded, run, device), moment.count


def files(run):
    """What a run leaves that does not depend on time."""
    report = report_of(run)
    weights = [load_checkpoint(path) for path in sorted(run.rglob("*.pt"))]
    kept = {name: report[name] for name in ("folds", "mean", "deviation", "out_of_fold", "finished")}
    return {"report": kept, "csv": (run / "out_of_fold.csv").read_bytes()}, weights


@pytest.mark.slow
def test_each_fold_is_the_run_of_that_fold_alone(folded, whole, tmp_path):
    run, report, _ = whole
    dataset = CachedDataset(folded)
    split = fold_split(dataset.table, NAMES[1])
    parts = dataset.select(split.train), dataset.select(split.valid)
    alone = train_on(tmp_path, SETTINGS, *parts)
    for saved in (best_of, last_of):
        assert differences(saved(tmp_path), saved(run / "fold-1")) == []
    row = alone.epochs[alone.best_epoch - 1]
    assert (report.folds[1].fold, report.folds[1].samples) == (NAMES[1], len(split.valid))
    assert {f"valid_{name}": value for name, value in report.folds[1].metrics.items()}.items() <= row.items()
    assert report.wall_seconds == pytest.approx(sum(report.seconds.values()), rel=0.02)


def predict_fold(run, cache, folder, fold):
    words = ("--fold", fold, "--backend", "eager", "--trust", TRUST[0])
    return command("predict", run, cache, "-o", folder / "out.csv", *words)


@pytest.mark.slow
def test_out_of_fold_predictions_are_those_of_the_model_that_has_not_seen_them(folded, whole, tmp_path):
    run, report, _ = whole
    for name, folder in zip(NAMES, sorted(run.glob("fold-*")), strict=True):
        assert predict_fold(folder, folded, tmp_path, name) == 0
        rows = {row["sample"]: row for row in rows_of(tmp_path / "out.csv")}
        expected = [row for row in rows_of(run / "out_of_fold.csv") if row["sample"] in rows]
        assert list(rows.values()) == expected
    labels, classes = CachedDataset(folded).labels.numpy(), ("ant", "bee", "cat", "dog")
    found = np.float32([[row[name] for name in classes] for row in rows_of(run / "out_of_fold.csv")])
    assert report.out_of_fold["accuracy"] == pytest.approx(np.mean(found.argmax(1) == labels))
    assert report.out_of_fold["second_share"] == pytest.approx(found[:, 1].mean())


def kill():
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("share", [*thorough(0.1, 0.4), 0.6, *thorough(0.8, 1)])
def test_killed_anywhere_it_ends_in_the_same_files_and_trains_nothing_twice(folded, whole, tmp_path, share):
    Moment(device := CpuDevice(), int(share * whole[2]), kill)
    with pytest.raises(Killed):
        run_all(folded, tmp_path, device, checkpoint_every=1)
    rest = Moment(device := CpuDevice())
    run_all(folded, tmp_path, device, checkpoint_every=1)
    assert differences(files(tmp_path)[0], files(whole[0])[0]) == []
    for left, right in zip(files(tmp_path)[1], files(whole[0])[1], strict=True):
        assert differences(left, right) == []
    again = Moment(device := CpuDevice())
    before = (tmp_path / "out_of_fold.csv").stat()
    run_all(folded, tmp_path, device)
    assert (again.count, (tmp_path / "out_of_fold.csv").stat()) == (0, before)
    assert rest.count < whole[2] or share == 0.1


def predicting_seconds(report, run):
    """Seconds that are in none of the folds' runs: in all, and the sum of the parts."""
    runs = map(report_of, run.glob("fold-*"))
    (wall, parts), *others = ((each["wall_seconds"], sum(each["seconds"].values())) for each in (report, *runs))
    return wall - sum(other[0] for other in others), parts - sum(other[1] for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("share", [*thorough(0.2), 0.7, *thorough(0.95)])
def test_a_time_limit_leaves_a_report_of_the_folds_so_far(folded, whole, tmp_path, share):
    moment = Moment(device := CpuDevice(), int(share * whole[2]))
    stop = StopRequest(100, clock=lambda: 1000.0 if moment.is_past else 0.0)
    with pytest.raises(UnfinishedError, match="--resume"):
        run_all(folded, tmp_path, device, stop=stop)
    report = report_of(tmp_path)
    assert (report["finished"], report["out_of_fold"]) == (False, {})
    assert [fold["finished"] for fold in report["folds"]] == {0.2: [False], 0.7: [True, False], 0.95: [True, True]}[
        share
    ]
    before = predicting_seconds(report, tmp_path)
    assert before[0] == pytest.approx(before[1], abs=1e-3)
    assert (before[0] > 0) == (share == 0.95)
    run_all(folded, tmp_path)
    after = predicting_seconds(report_of(tmp_path), tmp_path)
    assert after[0] == pytest.approx(after[1], abs=1e-3)
    assert after[0] > before[0]
    assert differences(files(tmp_path)[0], files(whole[0])[0]) == []


def test_a_run_of_folds_predicts_the_mean_of_its_models(folded, whole, tmp_path):
    found = []
    for number, runs in enumerate(([whole[0]], sorted(whole[0].glob("fold-*")))):
        output = tmp_path / f"{number}.csv"
        predict(predictor_of(*runs), [CachedDataset(folded)], output, 8)
        found.append(output.read_bytes())
    assert found[0] == found[1]


def test_samples_of_a_fold_that_a_run_may_have_learned_are_told_of(folded, whole, tmp_path, capsys):
    cache = shutil.copytree(folded, tmp_path / "cache")
    run, told = whole[0] / "fold-0", "may have learned from some of them"
    assert predict_fold(run, cache, tmp_path, 0) == 0
    assert told not in capsys.readouterr().err
    assert predict_fold(run, cache, tmp_path, 1) == 0
    assert f"not validated on the samples and labels that fold 1 has now: it {told}" in capsys.readouterr().err
    assert command("relabel", cache, "--make-folds", 2, "--seed", 7) == 0
    assert predict_fold(run, cache, tmp_path, 0) == 0
    assert told in capsys.readouterr().err


def test_one_page_shows_all_folds_and_then_a_part_of_each(folded, whole, tmp_path):
    run, report, _ = whole
    _, top, *parts = report_run(run, samples=1).html.split("<article")
    for fold, part in zip(report.folds, parts, strict=True):
        for shown in (f"<h1>fold-{fold.fold}</h1>", "Confusion", "polyline", "tiny_models:tiny", "<img"):
            assert shown in part
        assert f"{fold.metrics['loss']:.4f}" in top
    for value in (*report.out_of_fold.values(), *report.mean.values(), *report.deviation.values()):
        assert f"{value:.4f}" in top
    assert f"{seconds_text(report.wall_seconds)} in all" in top
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "fold-1")
    (tmp_path / "run" / "report.json").unlink()
    assert command("report", tmp_path / "run", "-o", tmp_path / "page.html", "--valid", folded) == 0
    begun = (tmp_path / "page.html").read_text()
    assert "Not finished: 0 of 2" in begun
    assert begun.count("<article") == 2
    for damage in ('{"folds": [{"fold": "0"}]}', '{"finished": true}', "[]"):
        (tmp_path / "run" / "report.json").write_text(damage)
        with pytest.raises(TrainingError, match="opy the run again"):
            report_run(tmp_path / "run")


def test_the_folder_of_a_fold_is_within_its_run_whatever_its_name(tmp_path):
    names = ["0", "site a", "a/b", "../c", ".", "é", "\udce9", "a%2Fb"]
    folders = [fold_folder(tmp_path, name) for name in names]
    assert {folder.parent for folder in folders} == {tmp_path}
    assert len(set(folders)) == len(names)
    assert folders[:2] == [tmp_path / "fold-0", tmp_path / "fold-site%20a"]
    write_folds(tmp_path, names)
    assert read_folds(tmp_path) == names


@pytest.mark.slow
def test_what_is_no_run_of_these_folds_is_refused(folded, whole, cache, tmp_path, capsys):
    """Folds are positions in a whole cache: in a selection they would be other samples."""
    run, dataset = whole[0], CachedDataset(folded)
    (tmp_path / "run").mkdir()
    shutil.copy(run / "folds.json", tmp_path / "run")
    (tmp_path / "other").mkdir()
    other = with_folds(folded, tmp_path / "other", ["0", "1", "2"])
    items = [(np.zeros((8, 8, 3), np.uint8), number % 2) for number in range(len(dataset))]
    build_cache(items, tmp_path / "black", Recipe(size=8), jobs=1)
    black, few = CachedDataset(tmp_path / "black"), TrainSettings(batch_size=30)
    faster = TrainSettings(**{**vars(SETTINGS), "lr": 0.1})
    selections = [dataset[np.arange(len(dataset))[::-1]], dataset[np.arange(len(dataset) - 1)]]
    for call, error, words in (
        (lambda: run_all(folded, run, resume=False), UsageError, "already contains a run: add --resume"),
        (lambda: run_all(folded, run / "fold-1", resume=False), UsageError, "not of all folds"),
        (lambda: run_all(cache, tmp_path / "new", resume=False), UsageError, "no folds"),
        (lambda: run_all(folded, folded, resume=False), UsageError, "is a cache"),
        (lambda: run_all(other, run), UsageError, "has the folds 0, 1, and the cache has 0, 1, 2"),
        (lambda: run_all(folded, run, settings=faster), UsageError, "lr 0.05, now 0.1"),
        (lambda: run_all(folded, tmp_path / "small", settings=few), UsageError, "training samples do not make"),
        (lambda: train_on(run, SETTINGS, dataset, dataset, resume=True), UsageError, "continue it with --folds"),
        (lambda: predictor_of(tmp_path / "run"), TrainingError, "no weights of fold 0, 1 yet"),
        (lambda: predict(predictor_of(run), [dataset], run / "out_of_fold.csv", 8), UsageError, "is a file of the run"),
        *(
            (lambda sets=sets: open_all_folds(tmp_path / "new", *sets, resume=False), UsageError, words)
            for words, *sets in (
                *(("are a selection of", dataset, each) for each in selections),
                *(("are a selection of", each, dataset) for each in selections),
                ("have other samples", black, dataset),
            )
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    run_all(other, tmp_path / "small", resume=False)  # nothing had begun there
    assert command("train", folded, "--run", tmp_path / "new", "--folds", "--valid", 0.2, "--backend", "eager") == 2
    assert "leave --valid out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_maps_are_scored_over_all_folds_and_turned_back_when_mirrored(tmp_path):
    items = [tiny_tasks.squares()[number] for number in range(24)]
    build_cache(items, tmp_path / "plain", Recipe(size=16), jobs=1)
    cache = with_folds(tmp_path / "plain", tmp_path, ["0", "1"])
    settings = TrainSettings(model="unet", epochs=1, batch_size=4, lr=0.05, task="mask", mask_classes=2)
    report = run_all(cache, tmp_path / "run", settings=settings)
    dataset, counts = CachedDataset(cache), np.zeros((2, 2))
    for number, row in enumerate(rows_of(tmp_path / "run" / "out_of_fold.csv")):
        with Image.open(tmp_path / "run" / row["prediction"]) as image:
            found = np.asarray(image).ravel().astype(int)
        np.add.at(counts, (dataset[number]["mask"].numpy().ravel().astype(int), found), 1)
    assert report.out_of_fold == pytest.approx(mask_metrics(counts))

    predictor = predictor_of(tmp_path / "run", flip_tta=True)
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    maps, of_mirrored = (
        predictor.predict(DeviceBatch({"image": each}, torch.zeros(2))) for each in (images, images.flip(2))
    )
    torch.testing.assert_close(maps, of_mirrored.flip(3))
    assert not torch.allclose(maps, of_mirrored)
