"""Training and predicting."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

from lab import (
    Lab,
    number_of,
    table_rows,
    write_csv,
    write_photos,
)
from refusals import assert_refused, succeeded

PLAIN = ("--backend", "torch", "--trust", "lab_module:tiny")


def test_settings_that_make_no_sense(lab):
    bad = [
        "--lr=nan",
        "--lr=-1",
        "--lr=0",
        "--lr=inf",
        "--epochs=0",
        "--batch-size=0",
        "--smoothing=2",
        "--smoothing=nan",
    ]
    bad += ["--ema=1", "--clip=-1", "--clip=nan", "--mixup=-1", "--mixup=nan", "--augment=cutmix=inf"]
    bad += ["--weight-decay=nan", "--weight-decay=-1", "--seed=-1"]
    bad += ["--accumulate=3", "--threads=0", "--checkpoint-every=0", "--cores=0"]
    changes = ("brightness=nan", "brightness=-1", "saturation=inf", "erase=2", "shift=-1", "shift=inf", "shift=99")
    for words in [*bad, *(f"--augment={change}" for change in changes)]:
        done = lab.train(lab.shared.cache, lab.folder / "run", words)
        named = words.strip("-").removeprefix("augment=").split("=")[0].replace("-", ".?")
        assert_refused(done, f"{named}|parts|rate|at least 1", status=2)


def test_validation_on_what_is_not_there(lab):
    for valid in ("fold=9", "fold=x", "fold=", "0", "1", "1.5", "-0.2", "nan"):
        assert_refused(lab.train(lab.shared.folds, lab.folder / "run", f"--valid={valid}"), "fold|fraction", status=2)
    assert_refused(lab.train(lab.shared.cache, lab.folder / "run", "--valid=fold=0"), "--fold-col", status=2)
    assert_refused(lab.train(lab.shared.cache, lab.folder / "run", "--valid", lab.folder / "nowhere"), "nowhere")
    assert not (lab.folder / "run" / "best.pt").exists()


def test_validation_on_a_cache_of_other_classes(lab):
    for names in (("ant", "bee"), ("bee", "cat", "dog"), ("x", "y", "z")):
        other = lab.folder / "-".join(names)
        succeeded(lab.warmup(write_photos(lab.folder / "p" / other.name, 8, names), other))
        assert_refused(lab.train(lab.shared.cache, lab.folder / "run", "--valid", other), "class", status=2)


def test_models_that_are_not_there_or_do_not_fit(lab):
    code = """
from torch import nn
def wide(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(768, outputs + 1))
def grey(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(256, outputs))
def broken(outputs): raise KeyError("colour")
def nothing(outputs): return None
def pair(outputs): return Pair()
class Pair(nn.Module):
    def __init__(self): super().__init__(); self.layer = nn.Linear(768, 3)
    def forward(self, x): y = self.layer(x.flatten(1)); return y, y
"""
    (lab.folder / "own_models.py").write_text(code)
    for name in (
        "nosuch",
        "own_models:nosuch",
        "own_nosuch:tiny",
        "timm:nosuch",
        *(f"own_models:{n}" for n in ["wide", "grey", "broken", "nothing", "pair"]),
    ):
        done = lab.train(lab.shared.cache, lab.folder / name.replace(":", "-"), "--model", name)
        assert_refused(
            done,
            "timm" if name.startswith("timm") else name.split(":")[-1],
            status=1 if name.startswith("timm") and find_spec("timm") is None else 2,
        )


def test_resuming_with_another_fold_of_the_same_size(lab):
    done = lab.train(lab.shared.folds, lab.folder / "run", "--valid", "fold=0", "--epochs", 3, "--time-limit", 0)
    assert done.status in (2, 3)
    run = lab.folder / "second"
    succeeded(lab.train(lab.shared.folds, run, "--valid", "fold=0"))
    assert_refused(lab.train(lab.shared.folds, run, "--valid", "fold=1", "--resume"), status=2)


def test_a_run_folder_with_files_of_ones_own(lab):
    run = lab.folder / "run"
    run.mkdir()
    (run / "history.csv").write_text("mine")
    (run / "best.pt").write_text("mine")
    done = lab.train(lab.shared.cache, run)
    assert {path.name: path.read_text() for path in run.iterdir()} == {"history.csv": "mine", "best.pt": "mine"}
    assert_refused(done, "run", status=2)


def test_numbers_to_regress_with_a_missing_one(lab):
    table = [{**r, "label": n + 0.5} for n, r in enumerate(table_rows())]
    table[5]["label"] = ""
    path = write_csv(lab.folder / "t.csv", table)
    words = (path, lab.folder / "cache", "--root", lab.shared.photos, "--label-col", "label", "--on-error", "skip")
    succeeded(lab.warmup(*words))
    succeeded(lab.train(lab.folder / "cache", lab.folder / "run", "--lr", "0.0001"))
    predict(lab, lab.folder / "run", lab.folder / "cache")
    for line in csv.DictReader((lab.folder / "p.csv").read_text().splitlines()):
        assert float(line["label"]) == number_of(line["path"]) + 0.5, line["path"]


def predict(lab: Lab, run: Path, cache: Path, *words: object) -> None:
    before = (lab.folder / "p.csv").read_bytes() if (lab.folder / "p.csv").exists() else None
    succeeded(lab.command("predict", run, cache, "-o", lab.folder / "p.csv", *PLAIN, *words))
    if before is not None:
        old, new = (
            [line.split(",")[:4] for line in text.decode().splitlines()]
            for text in (before, (lab.folder / "p.csv").read_bytes())
        )
        assert new == old, f"predictions with {words}"
