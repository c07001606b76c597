"""preview, report and doctor on the command line."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from tpucache.cli import main


@pytest.mark.parametrize("command", ["inspect", "preview", "report", "bench", "doctor"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: python -m tpucache {command}" in " ".join(capsys.readouterr().out.split())


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
        (["preview", "nowhere"], 1, "not a finished cache"),
        (["report", "nowhere"], 1, "not a finished cache"),
        (["preview", "CACHE", "-o", "sheet.txt"], 2, "try .png"),
        (["preview", "CACHE", "-o", "none/sheet.png"], 1, "cannot be written"),
        (["report", "CACHE", "-o", "none/report.html"], 1, "cannot be written"),
        (["preview", "CACHE", "--class", "beee"], 2, "such as 'bee'"),
        (["preview", "CACHE", "--samples", "0"], 2, "at least 1"),
        (["preview", "CACHE", "--seed", "-1"], 2, "at least 0"),
        (["preview", "CACHE", "-o", "link.png"], 2, "is a file of the cache"),
        (["report", "CACHE", "-o", "link.png"], 2, "is a file of the cache"),
        *(
            (["bench", "CACHE", f"--device-rate={rate}"], 2, "must be a number above 0")
            for rate in (0, -1, "nan", "inf")
        ),
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
    assert message in said.err.splitlines()[-1]
    assert said.out == ""


@pytest.mark.slow
def test_doctor_tells_what_is_there_and_ends_well(capsys):
    assert main(["doctor", "--no-xla"]) == 0
    text = capsys.readouterr().out
    for part in ("cores", "memory", "/dev/shm", "TPU", "libraries", "numpy", "mounts"):
        assert part in text
    assert main(["doctor", "--no-xla", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cores", "memory", "shm", "disk", "tpu", "xla", "libraries", "decoders", "mounts", "advice"} <= set(report)
