"""Images are normalised by the statistics that are asked for, and a step is given all views of its samples."""

from __future__ import annotations

import dataclasses

import pytest
from running import best_of, command, train_on
from torch import nn

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.training.forward import decide_statistics
from tpucache.training.settings import TrainSettings

LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=20, lr=0.01)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Squares and their masks, without a label."""
    folder = tmp_path_factory.mktemp("squares")
    build_cache("failing_data:labelled_squares", folder / "cache", Recipe(size=16), jobs=1)
    return CachedDataset(folder / "cache")


def statistics(dataset, **settings):
    decided = decide_statistics(dataclasses.replace(LINEAR, **settings), dataset, nn.Identity())
    return [*decided.mean], [*decided.std]


def test_a_mean_and_a_deviation_of_ones_own_replace_those_known(dataset):
    known = dataset.manifest.statistics
    assert statistics(dataset) == (list(known.mean), list(known.std))
    assert statistics(dataset, mean=(1, 2, 3)) == ([1, 2, 3], list(known.std))
    assert statistics(dataset, std=[4, 5, 6.5]) == (list(known.mean), [4, 5, 6.5])
    assert statistics(dataset, mean=(0, 0, 0), std=(1, 1, 1)) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.slow
def test_a_run_and_its_best_weights_have_the_statistics_that_the_command_gave(dataset, tmp_path, capsys):
    options = f"--backend eager --model {LINEAR.model} --batch-size 20 --epochs 1 --valid 0.2 --std 50,60,70 --mean"
    words = ["train", dataset.directory, "--run", tmp_path / "run", *options.split()]
    assert command(*words, "100,110,120") == 0
    best = best_of(tmp_path / "run")
    assert (best["mean"], best["std"]) == ([100, 110, 120], [50, 60, 70])
    with pytest.raises(SystemExit):
        command(*words, "100,x")
    assert "--mean" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_gets_the_views_of_a_sample_side_by_side_with_mask_and_label(dataset, tmp_path):
    moves = {"flip": True, "vertical_flip": True, "shift": 3, "rotate": True, "tilt": 10, "crop": True, "zoom": 0.6}
    augment = dataclasses.replace(LINEAR.augment, **moves, hue=0.1, views=2)
    settings = dataclasses.replace(LINEAR, train_step="tiny_tasks:views_step", augment=augment)
    first = train_on(tmp_path / "run", settings, dataset)
    assert len(first.losses) == len(dataset) // 20
