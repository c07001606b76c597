"""preview, report and doctor on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil

import pytest
from PIL import Image

from tpucache import Manifest
from tpucache.cli import main
from tpucache.progress import Progress
from tpucache.store.manifest import Skipped


@pytest.mark.slow
def test_preview_draws_a_sheet(cache, tmp_path, capsys):
    path = tmp_path / "sheet.png"
    assert main(["preview", str(cache), "-o", str(path), "--samples", "4", "--class", "bee", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with Image.open(path) as sheet:
        assert sheet.size == (report["width"], report["height"])
    assert main(["preview", str(cache), "-o", str(path), "--seed", "3"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.slow
def test_report_writes_a_page(cache, tmp_path, capsys):
    path = tmp_path / "report.html"
    assert main(["report", str(cache), "-o", str(path), "--samples", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path), "bytes": path.stat().st_size}
    assert path.read_text(encoding="utf-8").count("<img ") == 8
    assert main(["report", str(cache), "-o", str(path)]) == 0
    assert "open it in any browser" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "required: COMMAND"),
        (["inspect", "nowhere"], 1, "nowhere does not exist"),
        (["warmup", "nowhere", "new"], 1, "nowhere"),
        (["warmup", ".", "new", "--size", "0"], 1, "size is one or two whole numbers"),
        (["warmup", ".", "new", "--size", "1x2x3"], 1, "size is one or two whole numbers"),
        (["warmup", ".", "new", "--jobs", "0"], 2, "at least 1"),
        (["report", "nowhere"], 1, "nowhere does not exist"),
        (["preview", "CACHE", "-o", "sheet.txt"], 2, "use .png"),
        (["preview", "CACHE", "-o", "none/sheet.png"], 1, "cannot be written"),
        (["preview", "CACHE", "--class", "beee"], 2, "such as 'bee'"),
        (["preview", "CACHE", "--seed", "-1"], 2, "at least 0"),
        (["report", "CACHE", "-o", "link.png"], 2, "is a file of the cache"),
        *((["bench", "CACHE", f"--device-rate={rate}"], 2, "must be a number above 0") for rate in (0, "nan", "inf")),
        (["bench", "CACHE", "--threads=0"], 2, "at least 1"),
    ],
)
def test_what_cannot_be_done_ends_in_one_line(arguments, status, message, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.png").symlink_to(cache / "manifest.json")
    arguments = [str(cache) if argument == "CACHE" else argument for argument in arguments]
    try:
        ended = main(arguments)
    except SystemExit as stop:
        ended = stop.code
    assert ended == status
    said = capsys.readouterr()
    line, *see = said.err.splitlines()
    assert message in line
    assert see in ([], [f"see {' '.join(['tpucache', *arguments[:1]])} --help"])
    assert said.out == ""


@pytest.mark.slow
def test_doctor_tells_what_is_there_and_ends_well(capsys):
    assert main(["doctor", "--no-xla"]) == 0
    text = capsys.readouterr().out
    for part in ("cores", "memory", "/dev/shm", "TPU", "libraries", "numpy", "mounts"):
        assert part in text
    assert main(["doctor", "--no-xla", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cores", "memory", "shm", "disk", "tpu", "xla", "libraries", "mounts", "advice"} <= set(report)


#: A terminal's title, a cleared screen, C1's way to begin such a sequence, DEL, a reversal, and a line of its own.
STEERS = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202egpj.\u2066\r\nfingerprint  forged"


def is_tame(text):
    return all(one.isprintable() or one == "\n" for one in text) and "\nfingerprint  forged" not in text


@pytest.fixture
def steering(cache, tmp_path):
    """A copy of the cache in whose texts is whatever steers a terminal."""
    folder = shutil.copytree(cache, tmp_path / "steering")
    manifest = Manifest.load(cache)
    dataclasses.replace(
        manifest,
        classes=(STEERS, *manifest.classes[1:]),
        skipped=(Skipped(10**6, STEERS, STEERS),),
        recipe={**manifest.recipe, STEERS: STEERS},
        source={**manifest.source, "left_out": {STEERS: 1}},
        created_by={STEERS: STEERS},
    ).save(folder)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "CACHE"],
        ["inspect", "CACHE", "--json"],
        ["preview", "CACHE", "--class", STEERS + "?", "-o", "OUT"],
        ["--traceback", "inspect", STEERS.replace("\n", "")],
        [STEERS],
        ["inspect", "CACHE", STEERS],
    ],
)
def test_no_text_steers_the_terminal(steering, tmp_path, capsys, words):
    places = {"CACHE": str(steering), "OUT": str(tmp_path / "x.png")}
    with contextlib.suppress(SystemExit):
        main([places.get(word, word) for word in words])
    out, err = capsys.readouterr()
    assert is_tame(out + err)
    if "--json" in words:
        assert json.loads(out)["classes"][0] == STEERS
    else:
        assert "\\x1b]0;title\\x07" in out + err


def test_warnings_and_progress_do_not_steer_the_terminal(steering, capsys, caplog):
    main(["inspect", str(steering)])
    logging.getLogger("tpucache").warning("this is %s", STEERS)
    with Progress(2, STEERS, "samples") as progress:
        progress.advance(1, STEERS)
    assert is_tame(caplog.text + capsys.readouterr().err)
    assert "this is \\x1b" in caplog.text
