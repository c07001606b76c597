"""The command line: what it prints, and the status it ends with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from thorough import thorough

import tpucache
from tpucache.cli import main

pytestmark = pytest.mark.usefixtures("short_runs")


@pytest.mark.slow
def test_warmup_verify_inspect_and_bench_tell_what_they_did(photos, tmp_path, capsys):
    cache = str(tmp_path / "cache")
    assert main(["warmup", str(photos), cache, "--size", "16", "--variants", "1", "--jobs", "1"]) == 0
    assert "300 records: the clean one and 1 augmented variant of each" in capsys.readouterr().out
    assert main(["verify", cache]) == 0
    assert "all sound" in capsys.readouterr().out
    assert main(["inspect", cache, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert (held["samples"], held["variants"], held["records"], held["skipped"]) == (150, 1, 300, [])
    assert held["classes"] == ["ant", "bee", "cat", "dog"]
    assert held["bytes"] == sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.[ln]*"))
    assert main(["inspect", cache]) == 0
    assert held["fingerprint"] in capsys.readouterr().out
    assert main(["bench", cache, "--batch-size", "16", "--device-rate", "1000", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["images_per_second"] > 0
    assert read["limit_images_per_second"] > 0
    assert 0 <= read["idle"] <= 1


def test_damage_is_listed_and_ends_with_status_one(cache, tmp_path, capsys):
    copy = shutil.copytree(cache, tmp_path / "copy")
    (copy / "v02-00001.lmdb").unlink()
    assert main(["verify", str(copy)]) == 1
    out, err = capsys.readouterr()
    assert "v02-00001.lmdb is missing" in out
    assert "v02-00001.lmdb" in err.splitlines()[-1]
    assert main(["verify", str(copy), "--json"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damages"]
    assert damage["name"] == "v02-00001.lmdb"


@pytest.mark.slow
def test_a_bad_sample_is_named_or_listed(photos, tmp_path, capsys):
    source = shutil.copytree(photos, tmp_path / "source")
    (source / "bee" / "bad\n.jpg").write_text("no image")
    cache = str(tmp_path / "cache")
    command = ["warmup", str(source), cache, "--size", "8", "--jobs", "1"]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert r"bee/bad\n.jpg" in err
    assert "Traceback" not in err
    assert main([*command, "--on-error", "skip"]) == 0
    assert r"  'bee/bad\n.jpg': not an image" in capsys.readouterr().out
    assert main(["inspect", cache, "--json"]) == 0
    (skipped,) = json.loads(capsys.readouterr().out)["skipped"]
    assert skipped["path"] == "bee/bad\n.jpg"
    assert skipped["reason"]


@pytest.mark.slow
def test_a_time_limit_ends_with_status_three_and_the_same_command_continues(photos, tmp_path, capsys):
    command = ["warmup", str(photos), str(tmp_path / "cache"), "--size", "8", "--jobs", "1"]
    assert main([*command, "--time-limit", "0"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "Run the same command again to continue" in err.splitlines()[-1]
    assert main(command) == 0


def run(words, **options):
    """Run Python with these words."""
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=PATIENCE, **options
    )


def installed_command(folder: Path) -> Path:
    """Write the program that pip writes for `tpucache`, into a folder of its own as pip does."""
    text = (Path(tpucache.__file__).parents[1] / "pyproject.toml").read_text()
    (module, function) = re.findall(r'^tpucache = "(.+):(.+)"$', text, re.MULTILINE)[0]
    program = folder / "bin" / "tpucache"
    program.parent.mkdir()
    program.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return program


@pytest.mark.slow
@pytest.mark.parametrize("safe", [False, *thorough(True)])
@pytest.mark.parametrize("module", [False, True], ids=["tpucache", "python -m tpucache"])
def test_the_installed_command_imports_from_the_working_folder_as_python_m_does(photos, tmp_path, module, safe):
    program = ["-m", "tpucache"] if module else [installed_command(tmp_path)]
    working = tmp_path / "working"
    working.mkdir()
    (working / "my_augmentation.py").write_text("def turn(image, generator):\n    return image[:, ::-1].copy()\n")
    root = Path(tpucache.__file__).parents[1]
    options = ["--size", "8", "--variants", "1", "--jobs", "1", "--augment", "my_augmentation:turn"]
    safely = {"PYTHONSAFEPATH": "1"} if safe else {}
    environment = {**os.environ, "PYTHONPATH": str(root), **safely}
    done = run([*program, "warmup", photos / "ant", "cache", *options], cwd=working, env=environment)
    if safe:
        assert done.returncode == 2
        assert "my_augmentation:turn" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_terminal_that_shows_ascii_alone_gets_every_report(photos, tmp_path):
    named = tmp_path / "named"
    shutil.copytree(photos / "ant", named / "日本")
    shutil.copytree(photos / "bee", named / "ü")
    commands = (["warmup", named, "cache", "--size", "8", "--jobs", "1"], ["inspect", "cache"], ["train", "--help"])
    words = json.dumps(commands, default=str)
    program = f"from tpucache.cli import main\nfor words in {words}: assert main(words) == 0"
    done = run(["-c", program], env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\\u65e5\\u672c" in done.stdout
    assert "\\xfc" in done.stdout
    assert "usage: " in done.stdout.lower()


@pytest.mark.slow
def test_a_library_that_is_missing_is_one_line_that_says_how_to_get_it(photos, tmp_path):
    program = "import sys; sys.modules['lmdb'] = None; from tpucache.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run(["-c", program, "warmup", photos, tmp_path / "cache", "--size", "16", "--jobs", "1"])
    assert done.returncode == 1
    assert re.fullmatch(r"tpucache: lmdb is not installed.*`pip install lmdb`.*\n", done.stderr)
    assert not (tmp_path / "cache").exists()
