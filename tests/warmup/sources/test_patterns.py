"""A path is a path first and a pattern second; what is nearly a path says what to type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made import png, tar_of, write
from patience import PATIENCE
from PIL import Image

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import TableOptions, TableSource, open_source, select_source
from tpucache.warmup.sources.source import expand_braces, find_files, split_pattern

_NAMES = ["data [1]", "data*", "{0..9}", "{a,b}", "a?"]


@pytest.mark.parametrize("name", _NAMES)
def test_a_folder_or_a_file_of_any_name_is_a_path_first(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "data 1").mkdir()
    for number in range(3):
        write(folder / f"{name}-{number}.tar", tar_of({f"{number}.png": png()}))
    write(tmp_path / "data 1" / "other-0.tar", tar_of({"other.png": png()}))
    assert [sample.path for sample in open_source(folder / f"{name}-1.tar").list().samples] == ["1.png"]
    root, pattern = split_pattern(folder / "*-[12].tar")
    assert root == folder
    assert [path.name for path in find_files(root, pattern)] == [f"{name}-1.tar", f"{name}-2.tar"]


def test_braces_are_those_of_webdataset_and_each_name_has_to_be_there(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write(tmp_path / f"train-{number:04d}.tar", tar_of({f"{number}.png": png()}))
    source = open_source(tmp_path / "train-{0008..0010}.tar")
    assert [sample.path.rpartition("/")[2] for sample in source.list().samples] == ["8.png", "9.png", "10.png"]
    with pytest.raises(SourceError, match=r"train-0011\.tar matches no file"):
        open_source(tmp_path / "train-{0008..0011}.tar").list()


def test_braces_stand_for_their_names_in_order() -> None:
    assert expand_braces("a{1..3}-{x,y}") == ["a1-x", "a1-y", "a2-x", "a2-y", "a3-x", "a3-y"]
    assert expand_braces("{a}-{}-{1...2}") == ["{a}-{}-{1...2}"]
    for pattern in ("{3..1}", "{0..99999999999}", "{0..999}{0..999}"):
        with pytest.raises(SourceError, match="counts down, or the pattern stands for"):
            expand_braces(pattern)


def test_an_image_of_any_name_is_included_by_its_path(tmp_path: Path) -> None:
    for name in ("a[1].png", "a1.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    chosen = select_source(open_source(tmp_path), include=["a[1].png", "./b.png"], exclude=["a1.png"])
    assert [sample.path for sample in chosen.list().samples] == ["a[1].png", "b.png"]


@pytest.mark.parametrize(
    ("cell", "suffix", "advice"),
    [
        ("sub\\0007.png", "", r"sub/0007\.png is there: write / instead"),
        ("sub/7", ".png", r"0007\.png is there: .*zfill\(4\)"),
        ("sub/7", "", r"0007\.png is there: .*zfill\(4\)"),
        ("./sub/0007.png", "", ""),
    ],
)
def test_a_path_that_is_nearly_one_works_or_says_what_to_type(
    cell: str, suffix: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "sub" / "0007.png")
    (tmp_path / "t.csv").write_text(f"path,label\n{cell},1\n")
    source = TableSource(tmp_path / "t.csv", TableOptions(suffix=suffix))
    (sample,) = source.list().samples
    if not advice:
        assert source.load(sample).fields["image"]
        return
    with pytest.raises(SampleError, match=advice):
        source.load(sample)


@pytest.mark.parametrize(
    ("name", "text"), [("my list.tsv", "path\tlabel\ncat/a,1.png\t3\n"), ("my list.txt", "cat/1.png 3\n")]
)
def test_a_list_that_is_no_csv_says_the_command_that_makes_one(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=r"is not a \.csv") as caught:
        open_source(tmp_path / name)
    command = str(caught.value).split("`")[-2]
    assert shlex.quote(str(tmp_path / name)) in command
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE)
    listing = open_source(tmp_path / "table.csv", TableOptions(label_cols=("label",))).list()
    assert [sample.label for sample in listing.samples] == ["3"]
