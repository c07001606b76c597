"""Each option is declared once, in a dataclass; help shows no default that is none."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache import Recipe, UsageError, build_cache
from tpucache.cli import main, make_parser
from tpucache.cli.arguments import from_options
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import options_of
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings
from tpucache.warmup.build_options import BuildOptions, WorkerOptions
from tpucache.warmup.sources import TableOptions

LINES = {
    "warmup": ["photos", "cache"],
    "train": ["cache", "--run", "run"],
    "publish": ["cache", "--id", "ann/noise-at-16", "--title", "Noise at 16", "--license", "CC-BY-4.0"],
}
COMMANDS = [
    "warmup",
    "verify",
    "inspect",
    "preview",
    "report",
    "bench",
    "train",
    "predict",
    "publish",
    "fetch",
    "push",
    "doctor",
]
DECLARED = [
    ("warmup", Recipe),
    ("warmup", WorkerOptions),
    ("warmup", BuildOptions),
    ("warmup", TableOptions),
    ("train", TrainSettings),
    ("train", AugmentSettings),
    ("train", RunOptions),
    ("publish", PublishOptions),
]
each_dataclass = pytest.mark.parametrize(("command", "kind"), DECLARED)


def actions(command: str) -> dict[str, argparse.Action]:
    """Return what a command reads, by name."""
    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    known: dict[str, argparse.Action] = {}
    for action in commands.choices[command]._actions:
        if action.default != argparse.SUPPRESS:  # as that of a second option for the same
            known.setdefault(action.dest, action)  # --no-NAME comes after --NAME
    return known


@each_dataclass
def test_a_command_without_options_makes_the_dataclass_of_its_defaults(command, kind):
    given = make_parser().parse_args([command, *LINES[command]])
    assert from_options(kind, given) == kind()


@each_dataclass
def test_help_default_and_choices_of_an_option_are_those_of_its_field(command, kind):
    known = actions(command)
    assert len(options_of(kind)) >= 3
    for name, option in options_of(kind).items():
        assert known[name].help == option.help
        default = known[name].default
        assert (tuple(default) if isinstance(default, list) else default) == option.default
        assert tuple(known[name].choices or ()) == tuple(option.choices)


def test_what_has_to_be_given_is_required_under_its_own_name(capsys):
    given = make_parser().parse_args(["publish", *LINES["publish"]])
    assert from_options(Metadata, given) == Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")
    with pytest.raises(SystemExit) as stop:
        main(["publish", "cache"])
    assert stop.value.code == 2
    assert "the following arguments are required: --id, --title" in capsys.readouterr().err


def test_an_option_of_several_values_takes_each_of_its_uses():
    given = make_parser().parse_args(["warmup", *LINES["warmup"], "--label-col", "x", "--label-col", "y"])
    assert from_options(TableOptions, given) == TableOptions(label_cols=("x", "y"))
    given = make_parser().parse_args(["warmup", *LINES["warmup"], "--missing-label", "-1", "--missing-label", "NA"])
    assert from_options(BuildOptions, given) == BuildOptions(missing_label=("-1", "NA"))


@each_dataclass
def test_every_field_with_a_plain_value_is_an_option(command, kind):
    ours = {"max_blocks", "augment", "stop", "account", "replay", "curves", "watchers", "on_epoch", "name", "following"}
    ours |= {"jobs"}  # of BuildOptions: the command has it among WorkerOptions
    ours |= {"chosen"}  # which `train` makes itself, as it says why
    assert {item.name for item in dataclasses.fields(kind)} - set(options_of(kind)) <= ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "argument --epochs: must be at least 1, not 0"),
        (["--seed", "-1"], "argument --seed: must be at least 0, not -1"),
        (["--schedule", "linear"], "argument --schedule: invalid choice: 'linear'"),
    ],
)
def test_a_value_that_a_field_does_not_allow_is_wrong_usage(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *LINES["train"], *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_shows_no_default_that_is_none(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"example: tpucache {command}" in text
    assert not {"(default: None)", "(default: False)", "(default: [])", "(default: )"} & {
        f"(default: {part.split(')')[0]})" for part in text.split("(default: ")[1:]
    }


def test_a_default_of_zero_is_shown(capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    assert "in addition to the clean one (default: 0)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_declarations_and_parsers_load_no_torch():
    code = "import sys; from tpucache.cli import make_parser; make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE).returncode == 0


URL = "s3://user:secret@bucket/there"
NAMED = r"s3://bucket/there(/\*\.tfrec)? is a URL, .*`aws s3 cp --recursive`"


@pytest.mark.parametrize(
    "words",
    [
        ["warmup", f"{URL}/*.tfrec", "cache"],
        *(["warmup", "photos", "cache", option, URL] for option in ("--classes", "--boxes", "--root")),
        ["relabel", "CACHE", URL],
        ["verify", "CACHE", "--repair", f"{URL}/*.tfrec"],
        ["train", "CACHE", "--run", URL],
        ["train", "CACHE", "--run", "run", "--backend", "torch", "--model", "cnn", "--weights", URL],
        ["predict", URL, "CACHE", "-o", "predictions.csv"],
        ["predict", "run", "CACHE", "-o", URL],
        ["preview", "CACHE", "-o", URL],
        ["publish", "CACHE", "--id", "a/b", "--title", "A title", "--license", "CC0-1.0", "--out", URL],
    ],
)
def test_a_url_where_a_path_belongs_is_refused_with_what_to_do(words, cache, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    try:
        status = main([str(cache) if word == "CACHE" else word for word in words])
    except SystemExit as end:
        status = end.code
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("tpucache"))
    assert status == 2
    assert re.search(NAMED, said)
    assert "secret" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"] or "--weights" in words


def test_a_url_in_python_is_refused_and_no_folder_is_called_so(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in (f"{URL}/*.tfrec", Path(f"{URL}/*.tfrec")):
        with pytest.raises(UsageError, match=NAMED):
            build_cache(source, "cache", Recipe(size=8), jobs=1)
    assert list(tmp_path.iterdir()) == []
