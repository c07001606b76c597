"""The race: all seeds of a contender have as many epochs, and one that fails leaves the others alone."""

import argparse
from pathlib import Path

from scripts.bench import race
from scripts.bench.rounds import Contender, LeftOut, Track
from scripts.commands import CommandError


def test_epochs_of_the_first_seed_are_those_of_all_and_who_fails_is_left_out(tmp_path, monkeypatch):
    asked = []

    def train(contender, python, task, log, patience):
        asked.append((contender.name, task["seed"], task["epochs"], task["model"]))
        if contender.name == "broken" and task["seed"] == 1:
            raise CommandError("it broke")
        return {"accuracy": 0.5, "images": 10, "epochs": 7, "seconds": 1.0, "prepare_seconds": 0.0}

    monkeypatch.setattr(race, "train", train)
    options = argparse.Namespace(rounds=3, work=tmp_path, photographs=Path("photos"), size=64, seconds=1.0)
    contenders = [Contender("ours", "race.tpucache"), Contender("broken", "race.plain")]
    left_out: LeftOut = []
    runs = race.compare("cnn", contenders, Track(tmp_path), options, left_out)
    assert [one for one in asked if one[0] == "ours"] == [
        ("ours", 0, None, "cnn"),
        *(("ours", n, 7, "cnn") for n in (1, 2)),
    ]
    assert [one[1] for one in asked if one[0] == "broken"] == [0, 1]
    assert left_out == [{"name": "broken, cnn", "reason": "it broke"}]
    assert {name: len(each) for name, each in runs.items()} == {"ours": 3, "broken": 1}


def test_the_most_accurate_comes_first_by_the_mean_of_its_seeds():
    def runs(*accuracies):
        return [
            {"accuracy": each, "images": 100, "epochs": 2, "seconds": 4.0, "prepare_seconds": 1.0}
            for each in accuracies
        ]

    rows = race.to_rows({"second": runs(0.9, 0.1), "first": runs(0.6, 0.7)})
    assert [row[0] for row in rows[1:]] == ["first", "second"]
    assert rows[1][1:] == ["0.650", "0.600, 0.700", "25", "2", "4", "1"]
