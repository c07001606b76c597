"""Each option of `train` changes results, or what a run leaves, or is refused: none is accepted and ignored."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from PIL import Image
from running import command, last_of, report_of
from thorough import thorough

from tpucache.cli import make_parser
from tpucache.errors import UsageError
from tpucache.training import loop

COUNT: Final = 24
#: What users' code the options name, as a module of this name.
MODULE: Final = "train_options_code"
CODE: Final = """
import numpy as np
from torch import nn


def tiny(outputs):
    pooled = nn.AdaptiveAvgPool2d(4), nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4)
    return nn.Sequential(*pooled, nn.Flatten(), nn.Linear(64, outputs))


class WithColumns(nn.Module):
    def __init__(self, outputs, columns):
        super().__init__()
        self.images, self.columns = tiny(outputs), nn.Linear(columns, outputs)

    def forward(self, images, columns):
        return self.images(images) + self.columns(columns)


def with_columns(outputs, columns):
    return WithColumns(outputs, columns)


def pixels(outputs):
    return nn.Conv2d(3, outputs, 3, 1, 1)


def train_step(model, batch):
    return 2 * nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def eval_step(model, batch):
    return 2 * model(batch["image"])


def spread(predictions, labels):
    return float(np.std(predictions))
"""


class Case(NamedTuple):
    """A use of an option: its value, what else is given, and a file that it leaves if it changes no figure.

    It is compared with a run without the option, or with the value `other`. Paths begin at {folder}, {begun} is a run.
    """

    value: str = ""
    given: tuple[str, ...] = ()
    file: str | None = None
    other: str | None = None
    cache: str = "classes"


_HALF: Final = ("--valid", "0.5")
#: A use of each option that changes what the run computes, or a file that it leaves.
SEEN: Final[Mapping[str, Case]] = {
    "--valid": Case("fold=1"),
    "--export": Case("safetensors", file="{folder}/run/export/model-0.safetensors"),
    "--folds": Case(),
    "--model": Case("cnn"),
    "--weights": Case("{begun}"),
    "--freeze": Case("1"),
    "--layer-decay": Case("0.5"),
    "--mask-classes": Case("3", ("--task", "mask", "--model", f"{MODULE}:pixels"), other="2", cache="masks"),
    "--epochs": Case("3"),
    "--batch-size": Case("6"),
    "--accumulate": Case("2"),
    "--steps-per-execution": Case("2"),
    "--optimizer": Case("torch.optim:NAdam"),
    "--schedule": Case("constant"),
    "--lr": Case("0.003"),
    "--weight-decay": Case("0.3"),
    "--size": Case("32"),
    "--grow": Case("32:0.5,64", ("--epochs", "4")),
    "--valid-size": Case("32", _HALF),
    "--smoothing": Case("0.2"),
    "--balance": Case(),
    "--clip": Case("0.01"),
    "--ema": Case("0.9", _HALF),
    "--precision": Case("bf16"),
    "--loss": Case("focal"),
    "--metric": Case(f"{MODULE}:spread", _HALF),
    "--watch": Case("loss", _HALF),
    "--patience": Case("1", (*_HALF, "--epochs", "4", "--lr", "1e-9", "--watch", "accuracy")),
    "--train-step": Case(f"{MODULE}:train_step"),
    "--eval-step": Case(f"{MODULE}:eval_step", _HALF),
    "--inputs": Case("extra", ("--model", f"{MODULE}:with_columns"), other="more"),
    "--seed": Case("1"),
    "--flip": Case(),
    "--mixup": Case("1"),
    "--crop": Case(),
    "--zoom": Case("0.5", ("--crop",)),
    "--augment": Case("tilt=30,cutmix=1,rand_augment=2"),
    "--cache-dir": Case("{folder}/kept", file="{folder}/kept"),
    # Help leaves these out.
    "--mean": Case("120,110,100"),
    "--std": Case("20,30,40"),
    "--tensorboard": Case(file="{folder}/run/tensorboard"),
}
#: Those that say how the work is carried out: what `train` of the loop is then given.
CARRIED_OUT: Final[Mapping[str, tuple[tuple[str, ...], Any]]] = {
    "--resume": ((), lambda given: given.options.resume),
    "--checkpoint-every": (("3",), lambda given: given.options.checkpoint_every == 3),
    "--time-limit": (("1h",), lambda given: 0 < given.options.stop.seconds_left <= 3600),
    "--threads": (("3",), lambda given: given.settings.threads == 3),
    "--resident": (("yes",), lambda given: given.options.resident == "yes"),
    "--cache-gb": (("1", "--cache-dir", "{folder}/kept"), lambda given: given.train_set.network is not None),
    "--backend": (("torch",), lambda given: given.device.name == "torch" and not given.options.chosen),
    "--device": (("cpu",), lambda given: "--device cpu" in given.options.chosen),
    "--compile": ((), lambda given: given.device.compiles),
    "--cores": (("1",), lambda given: given.device.cores == 1),
    "--processes": (("1",), lambda given: "--processes" in given.options.chosen),
}
#: Uses in which an option would change nothing: each is refused, and the refusal names this.
REFUSED: Final = (
    (("--zoom", "0.5"), "crop"),
    (("--augment", "magnitude=20"), "rand_augment"),
    (("--watch", "loss"), "--valid"),
    (("--patience", "1"), "--valid"),
    (("--metric", f"{MODULE}:spread"), "--valid"),
    (("--mask-classes", "3"), "no masks"),
    (("--task", "multilabel"), "multilabel"),
    (("--freeze", "nothing"), "fits no parameter"),
    (("--cache-gb", "1"), "leave --cache-gb out"),
    (("--cores", "8"), "1 core"),
    (("--epochs", "auto"), "--time-limit"),
    (("--folds", "--valid", "0.5"), "--valid"),
    (("--loss", "focal", "--train-step", f"{MODULE}:train_step"), "--loss"),
    (("--backend", "xla", "--processes", "2"), "--processes"),
    (("--grow", "32:0.5,64", "--size", "32"), "--size"),
    (("--augment", "rand_augment=1,trivial_augment"), "rand_augment"),
    (("--inputs", "extra", "--mixup", "1"), "--inputs"),
    (("--weights", "pretrained"), "--weights"),
)
_PLAIN: Final = {"--config", "--help", "--help-all", "--json", "--run", "--run-dir"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A cache of classes with folds and columns, one of masks, and a run that has begun."""
    folder = tmp_path_factory.mktemp("options")
    (folder / f"{MODULE}.py").write_text(CODE)
    rng, lines, masked = np.random.default_rng(0), ["path,label,fold,extra,more"], ["path,mask"]
    for number in range(COUNT):
        pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
        Image.fromarray(pixels[..., 0] // 128).save(folder / f"{number:02}-mask.png")
        lines.append(f"{number:02}.png,{'aabc'[number % 4]},{number % 2},{number},{number % 5}")
        masked.append(f"{number:02}.png,{number:02}-mask.png")
    for name, table in (("classes", lines), ("masks", masked)):
        (folder / f"{name}.csv").write_text("\n".join(table) + "\n")
    made = ("--size", "64", "--codec", "dct-lz4", "--jobs", "1")
    columns = ("--label-col", "label", "--fold-col", "fold", "--keep", "extra", "--keep", "more")
    for name, own in (("classes", columns), ("masks", ("--mask-col", "mask"))):
        assert command("warmup", folder / f"{name}.csv", folder / name, *made, *own) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        assert train(folder / "classes", folder / "begun", "--seed", "7") == 0
        yield {name: folder / name for name in ("classes", "masks", "begun")}


def train(cache: Path, run: Path, *words: str) -> int:
    """Train with small settings, which the words may replace."""
    small = f"--model {MODULE}:tiny --epochs 2 --batch-size 8 --backend torch"
    try:
        return command("train", cache, "--run", run, *small.split(), *words)
    except SystemExit as ended:
        return int(ended.code or 0)


def outcome(run: Path) -> list[Any]:
    """Return what a run has computed: losses, metrics, which of them it watched, when it ended, and weights."""
    folder = min(run.rglob("last.pt")).parent  # of the first fold, where there are several
    report = report_of(folder)
    weights = {name: value.tolist() for name, value in last_of(folder)["learner"]["model"].items()}
    return [*(report[name] for name in ("losses", "epochs", "watched", "best_epoch", "stopped_early")), weights]


@pytest.fixture(scope="module")
def without(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return the outcome of a run with these words, which many options are compared with."""

    @functools.cache
    def computed(cache: Path, *words: str) -> list[Any]:
        run = tmp_path_factory.mktemp("without") / "run"
        assert train(cache, run, *words) == 0
        return outcome(run)

    return computed


def uses(name: str, places: dict[str, Path], folder: Path) -> tuple[list[str], list[str]]:
    """Return the words of a use of an option, and those of the run that it is compared with."""
    case = SEEN[name]
    words = [name, *case.value.format(folder=folder, begun=places["begun"]).split()]
    return [*case.given, *words], [*case.given, *([] if case.other is None else [name, case.other])]


#: One that changes losses, those that the test below leaves out, and one of those that leave a file.
USUAL: Final = ("--seed", "--folds", "--cache-dir", "--export")


@pytest.mark.parametrize("name", [*USUAL, *thorough(*(name for name in SEEN if name not in USUAL))])
def test_an_option_changes_what_a_run_computes_or_leaves(name, places, without, tmp_path):
    case = SEEN[name]
    cache, run, (words, before) = places[case.cache], tmp_path / "run", uses(name, places, tmp_path)
    assert train(cache, run, *words) == 0
    if case.file is None:
        assert outcome(run) != without(cache, *before)
    else:
        assert Path(case.file.format(folder=tmp_path)).exists()


#: These are not among what `train` of the loop is given.
ELSEWHERE: Final = ("--folds", "--export", "--cache-dir")


@pytest.fixture
def seen(monkeypatch):
    """What the loop is given, which is not carried out."""
    found, signature = [], inspect.signature(loop.train)

    def record(*given: Any) -> None:
        found.append(SimpleNamespace(**signature.bind(*given).arguments))
        raise UsageError("this is seen")

    monkeypatch.setattr("tpucache.training.loop.train", record)
    return found


@pytest.mark.parametrize("name", [name for name in SEEN if name not in ELSEWHERE])
def test_an_option_changes_what_the_loop_is_given(name, places, tmp_path, seen):
    for words in uses(name, places, tmp_path):
        assert train(places[SEEN[name].cache], tmp_path / "run", *words) == 2
    one, other = (
        [given.settings, len(given.train_set), given.valid_set is None, given.options.tensorboard] for given in seen
    )
    assert one != other


@pytest.mark.parametrize("name", CARRIED_OUT)
def test_an_option_of_how_it_is_carried_out_reaches_the_loop(name, places, tmp_path, seen):
    values, holds = CARRIED_OUT[name]
    words = [word.format(folder=tmp_path) for word in (name, *values)]
    backend = [] if name in ("--device", "--compile", "--processes", "--backend") else ["--backend", "torch"]
    assert command("train", places["classes"], "--run", tmp_path / "run", "--model", "cnn", *backend, *words) == 2
    assert holds(*seen)


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_an_option_that_would_change_nothing_is_refused(words, named, places, tmp_path, capsys):
    assert train(places["classes"], tmp_path / "run", *words) == 2
    assert named in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.pt"))


def test_no_option_is_left_out_here():
    names = {name for action in make_parser().commands["train"].actions for name in action.option_strings}
    long = {name for name in names if name.startswith("--") and not name.startswith("--no-")}
    refused = {word for words, _ in REFUSED for word in words if word.startswith("--")}
    of_sources = {"--cache", "--build"}  # test_source.py
    assert long - _PLAIN - of_sources <= {*SEEN, *CARRIED_OUT, *refused}
    assert {*SEEN, *CARRIED_OUT} <= names


def test_a_cache_to_validate_on_at_a_url_is_kept_where_the_option_says(places, tmp_path):
    kept, url = tmp_path / "kept", places["classes"].as_uri()
    assert train(places["classes"], tmp_path / "run", "--valid", url, "--cache-dir", str(kept), "--cache-gb", "1") == 0
    assert any(path.is_file() for path in kept.rglob("*"))


def test_a_folder_is_read_like_a_url_by_preview_too_where_the_option_says(places, tmp_path):
    kept = tmp_path / "kept"
    assert command("preview", places["classes"], "-o", tmp_path / "sheet.png", "--cache-dir", kept) == 0
    assert any(path.is_file() for path in kept.rglob("*"))
