"""A URL where a path belongs is refused; --augment sets changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpucache import Recipe, UsageError, build_cache
from tpucache.cli import main, make_parser
from tpucache.cli.parser import augmentation
from tpucache.ondevice.settings import AugmentSettings

URL = "s3://user:secret@bucket/there"
NAMED = r"s3://bucket/there(/\*\.csv)? is a URL, .*copy the files at the URL to a folder first"


@pytest.mark.parametrize(
    "words",
    [
        ["warmup", f"{URL}/*.csv", "cache"],
        *(["warmup", "photos", "cache", option, URL] for option in ("--classes", "--boxes", "--root")),
        ["relabel", "CACHE", URL],
        ["verify", "CACHE", "--repair", f"{URL}/*.csv"],
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
    for source in (f"{URL}/*.csv", Path(f"{URL}/*.csv")):
        with pytest.raises(UsageError, match=NAMED):
            build_cache(source, "cache", Recipe(size=8), jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_augment_sets_every_change_that_has_no_option_of_its_own():
    parser = make_parser()
    usual = parser.parse_args(["preview", "cache"])
    for name, default in vars(AugmentSettings()).items():
        if not hasattr(usual, name):
            value = {bool: True, int: 2, float: 0.5}[type(default)]
            needed = "rand_augment=1," if name == "magnitude" else ""
            words = ["preview", "cache", "--augment", f"{needed}{name}={float(value)}"]
            found = vars(augmentation(parser.parse_args(words)))
            assert (type(found[name]), found[name]) == (type(default), value)
