"""Help in two lengths, errors in two lines, and options out of a settings file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE

from tpucache import Manifest, UsageError, plugins
from tpucache.cli import main, make_parser
from tpucache.cli.parser import augmentation, from_options
from tpucache.ondevice.settings import AugmentSettings
from tpucache.recipe import Recipe
from tpucache.training.settings import TrainSettings
from tpucache.warmup.sources import TableOptions

PARSER = make_parser()
COMMANDS = sorted(name for name, parser in PARSER.commands.items() if parser.get_default("command"))  # the installed
each_command = pytest.mark.parametrize("command", COMMANDS)
WARMUP, TRAIN = ["warmup", "photos", "cache"], ["train", "cache", "--run", "run"]


def printed(words, capsys):
    """Return what a command that ends at once has printed: its status, standard output and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("words", [["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_fits_a_terminal_of_45_lines_and_has_an_example(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = printed(words, capsys)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 45
    assert "None" not in lines[0]
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("usage: tpucache ")
    text = " ".join(out.split())
    assert (f"example: tpucache {words[0]}" in text) == (len(words) == 2)
    assert not {"(default: None)", "(default: False)", "(default: [])"} & {*re.findall(r"\(default: \S*\)", text)}


@each_command
def test_all_help_has_every_option(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSER.commands[command]
    _, text, _ = printed([command, "--help"], capsys)
    if parser.basic:
        assert "--help-all" in text
        _, text, _ = printed([command, "--help-all"], capsys)
        assert {*parser.basic} <= {flag for action in parser.actions for flag in action.option_strings}
    assert max(map(len, text.splitlines())) <= 80
    words = text.replace(",", " ").split()
    for action in parser.actions:
        assert action.help not in (None, "", argparse.SUPPRESS), action.option_strings
        assert "--help" in action.option_strings or {*action.option_strings} <= {*words}


def test_help_lists_every_command_in_its_group(capsys):
    _, text, _ = printed(["--help"], capsys)
    for title, modules in plugins.COMMANDS.items():
        (section,) = (each for each in text.split("\n\n") if each.startswith(f"{title}:"))
        assert [line.split()[0] for line in section.splitlines()[1:]] == [
            name for texts in modules.values() for name in texts
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wramup", "photos", "cache"], "tpucache: argument COMMAND: invalid choice: 'wramup': did you mean warmup?"),
        ([*WARMUP, "--sise", "64"], "tpucache warmup: there is no option --sise: did you mean --size?"),
        ([*WARMUP, "-size", "64"], "tpucache warmup: there is no option -size: did you mean --size?"),
        ([*WARMUP, "--label_col", "x"], "tpucache warmup: there is no option --label_col: did you mean --label-col?"),
        ([*WARMUP, "--codec", "jpg"], "tpucache warmup: argument --codec: invalid choice: 'jpg': did you mean jpeg?"),
        (["train", "cache", "--rn", "run"], "tpucache train: there is no option --rn: did you mean --run?"),
        ([*TRAIN, "--xyzzy"], "tpucache train: there is no option --xyzzy"),
        ([*TRAIN, "more"], "tpucache train: 'more' is one word too many (quote a pattern, as in 'photos/*.jpg')"),
        (["publish", "cache"], "tpucache publish: the following arguments are required: --id, --title"),
        (
            [*TRAIN, "--augment", "wobble=3"],
            "tpucache train: argument --augment: 'wobble' is none of ",
        ),
        ([*TRAIN, "--epochs", "0"], "tpucache train: argument --epochs: must be at least 1, not 0"),
        (
            [*TRAIN, "--schedule", "linear"],
            "tpucache train: argument --schedule: invalid choice: 'linear': choose one of ",
        ),
        (["dance"], "tpucache: argument COMMAND: invalid choice: 'dance': choose one of warmup, "),
    ],
)
def test_a_typo_is_answered_in_two_lines(words, said, capsys):
    status, out, err = printed(words, capsys)
    assert (status, out) == (2, "")
    line, see = err.splitlines()
    assert line == said or (said.endswith((", ", "of ")) and line.startswith(said))
    assert see == f"see {said.split(':')[0]} --help"


def test_no_password_is_in_an_error(capsys):
    _, _, err = printed([*TRAIN, "https://ann:secret@host/x"], capsys)
    assert "secret" not in err
    assert "https://host/x" in err


def test_a_value_that_looks_like_an_option_is_a_value():
    given = PARSER.parse_args([*WARMUP, "--missing-label", "-1", "--label-sep=--size"])
    assert (given.missing_label, given.label_sep) == (["-1"], "--size")


SETTINGS = """
size = 64
variants = 2
fit = "pad"
label-col = ["x", "y"]
missing_label = "-1"
exact = true
"""


def test_options_of_the_command_line_win_over_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SETTINGS)
    found = PARSER.parse_args([*WARMUP, "--size", "8", "--label-col=z", f"--config={path}"])
    assert from_options(Recipe, found) == Recipe(size=8, variants=2, fit="pad", exact=True)
    assert from_options(TableOptions, found) == TableOptions(label_cols=("z",))
    path.write_text("flip = true\nlr = 0.5\nrun = 'there'")
    found = PARSER.parse_args(["train", "cache", "--config", str(path), "--no-flip"])
    assert (found.flip, found.lr, str(found.run)) == (False, 0.5, "there")
    path.write_text("flip = false")
    assert PARSER.parse_args([*TRAIN, "--config", str(path)]).explicit == {"flip", "run", "config"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sise = 64", "there is no option 'sise': did you mean --size?"),
        ("config = 'other.toml'", "there is no option 'config'"),
        ("exact = 1", "argument --exact: it does not take 1"),
        ("size = true", "argument --size: it does not take True"),
        ("size = {a = 1}", "argument --size: it does not take {'a': 1}"),
        ("fit = 'corp'", "argument --fit: invalid choice: 'corp': did you mean crop?"),
        ("shard-mb = 'x'", "argument --shard-mb: invalid int value: 'x'"),
        (
            "augment = 'os:x'",
            "argument --augment: 'os:x' names code, which a file may not do: give --augment on the",
        ),
        (f"size = {'[' * 9999}", "cannot be read: "),
        (f"size{'.a' * 9999} = 1", "cannot be read: "),
        (f"size = 0x{'f' * 9999}", "cannot be read: "),
        ("size = ", "cannot be read: Invalid value"),
        ("size = 1\nsize = 2", "cannot be read: "),
        (None, "cannot be read: "),
    ],
)
def test_what_is_wrong_in_a_settings_file_is_said_with_its_name(text, said, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    status, _, err = printed([*WARMUP, "--config", str(path)], capsys)
    assert status == 2
    line, _ = err.splitlines()
    assert str(path) in line
    assert said in line
    if text is not None and "names code" in said:  # what the user names, too, is the user's
        found = PARSER.parse_args([*WARMUP, "--config", str(path), "--augment", "os:x"])
        assert found.augment == "os:x"


plain = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@given(suffix=plain, columns=st.lists(plain, max_size=3), seed=st.integers(0, 2**40), exact=st.booleans())
def test_options_mean_the_same_in_a_file_and_on_the_command_line(suffix, columns, seed, exact, tmp_path_factory):
    words = [*WARMUP, f"--suffix={suffix}", f"--seed={seed}", *(f"--keep={name}" for name in columns)]
    first = PARSER.parse_args([*words, *["--exact"] * exact])
    given = {"suffix": suffix, "seed": seed, "keep": columns, "exact": exact}
    # What JSON writes of these is TOML, but for one character.
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        for name, value in given.items()
    ]
    path = tmp_path_factory.mktemp("settings") / "settings.toml"
    path.write_text("".join(lines), "utf-8")
    again = PARSER.parse_args([*WARMUP, "--config", str(path)])
    for name in ("suffix", "keep", "seed", "exact", "size"):
        assert getattr(again, name) == getattr(first, name)


RECIPES = st.fixed_dictionaries(
    {},
    optional={
        "size": st.sampled_from([8, (8, 12)]),
        "fit": st.sampled_from(["pad", "stretch"]),
        "variants": st.integers(0, 3),
        "augment": st.sampled_from(["flip", "strong"]),
        "seed": st.integers(0, 2**40),
        "shard_mb": st.integers(1, 9),
        "exact": st.booleans(),
        "coordinates": st.sampled_from(["displayed", "stored"]),
        "white_level": st.integers(1, 4095),
        "max_pixels": st.integers(10_000, 20_000),
        "mask_values": st.sampled_from(["scale", "keep"]),
    },
)
CODECS = st.sampled_from([{}, {"codec": "png", "quality": 3}, {"codec": "dct-lz4", "chroma": "444"}])


@given(recipe=RECIPES, codec=CODECS)
def test_a_cache_keeps_its_recipe_for_another_one(cache, tmp_path_factory, recipe, codec):
    before, folder = Recipe(**recipe, **codec), tmp_path_factory.mktemp("kept")
    manifest = Manifest.load(cache)
    source = {**manifest.source, "labels": {"asked": "numbers"}}
    dataclasses.replace(manifest, recipe=before.to_dict(), source=source).save(folder)
    found = PARSER.parse_args([*WARMUP, "--config", str(folder)])
    assert from_options(Recipe, found) == Recipe.from_dict(before.to_dict())
    assert found.labels == "numbers"


RUN_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["cnn", "timm:vit?x=1"]),
        "epochs": st.integers(1, 40),
        "batch_size": st.integers(1, 512),
        "lr": st.floats(1e-5, 10),
        "optimizer": st.sampled_from(["sgd", "adamw"]),
        "metric": st.sampled_from([("mcc",), ("mcc", "top5")]),
        "freeze": st.sampled_from([("stem",), ("a", "b")]),
        "size": st.integers(8, 64),
        "balance": st.booleans(),
        "ema": st.floats(0.5, 0.99),
        "augment": st.builds(
            AugmentSettings, flip=st.booleans(), rotate=st.booleans(), shift=st.integers(0, 9), mixup=st.floats(0, 1)
        ),
        "mean": st.sampled_from([(0.5, 0.25, 0.125)]),
        "std": st.sampled_from([(0.5, 0.25, 0.125)]),
        "seed": st.integers(0, 2**40),
    },
)


@given(RUN_SETTINGS)
def test_a_run_keeps_its_settings_for_another_one(tmp_path_factory, values):
    before = TrainSettings(**values)
    run = tmp_path_factory.mktemp("run")
    (run / "run.json").write_text(json.dumps({"settings": before.to_dict()}))
    found = PARSER.parse_args([*TRAIN, "--config", str(run)])
    assert from_options(TrainSettings, found, augment=augmentation(found)) == before


@pytest.mark.parametrize(("words", "said"), [(WARMUP, "manifest.json"), (TRAIN, "run.json")])
def test_a_folder_that_keeps_no_settings_is_refused(words, said, tmp_path, capsys):
    status, _, err = printed([*words, "--config", str(tmp_path)], capsys)
    assert status == 2
    assert said in err


#: The options of a command whose values can name code: after parsing, these are in the attributes of their names.
CODE = {
    **dict.fromkeys(["model", "optimizer", "loss", "metric", "train_step", "eval_step", "build"], TRAIN),
    **dict.fromkeys(["augment", "scheduler"], WARMUP),
}
glue = st.text("'\"\\ ,-", max_size=2)
code = st.tuples(glue, st.sampled_from(["evilmod", "torch", "timm", "hub", "kaggle"]), glue, st.just(":"), glue).map(
    "".join
)
code = st.tuples(code, st.sampled_from(["fn", "os._exit", "resnet18"]), glue).map("".join)
in_build = st.builds(
    "{}{}{}".format, st.sampled_from(["--augment", "--aug", "--exact --augment"]), st.sampled_from(" ="), code
)


def names_code(option, value):
    """Return whether a parsed value makes a command import a module, or ask another machine to."""
    values = [value] if isinstance(value, str) else value
    return any(":" in each.removeprefix("timm:" if option == "model" else "") for each in values)


@pytest.mark.parametrize("option", CODE)
@given(data=st.data())
def test_a_settings_file_names_no_code_however_it_is_written(option, data, tmp_path_factory):
    value = data.draw(in_build if option == "build" else st.one_of(code, st.lists(code, min_size=1, max_size=2)))
    path = tmp_path_factory.mktemp("settings") / "mine.toml"
    path.write_text(f"{option} = {json.dumps(value)}")
    try:
        found = PARSER.parse_args([*CODE[option], "--config", str(path)])
    except (SystemExit, UsageError):  # refused
        return
    assert not names_code(option, getattr(found, option))


@pytest.mark.slow
def test_parsers_and_what_describes_a_cache_load_no_torch(cache):
    code = """
import sys
from tpucache.cli import main, make_parser
make_parser()
sys.exit(main(["inspect", sys.argv[1]]) or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code, cache], check=False, timeout=PATIENCE).returncode == 0
