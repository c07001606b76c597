"""The package on docs/extending.md works as the page says: its commands run, with its files as they are shown."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpucache.plugins import GROUPS

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^```\ntpucache (.*?)\n```$", PAGE, re.MULTILINE)

# Each command is given as JSON; what they have in common is imported once.
RUN = """
import json, os, sys
sys.path.insert(1, os.environ["SITE"])
from tpucache.cli import main
for words in sys.argv[1:]:
    status = main(json.loads(words))
    print("status", status, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page, installed; photographs; and images in the IDX format, of which each class has a shade."""
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    metadata = tmp_path / "site" / "my_parts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    for group, entries in project["entry-points"].items():
        with (metadata / "entry_points.txt").open("a") as file:
            file.writelines([f"[{group}]\n", *(f"{name} = {value}\n" for name, value in entries.items())])
    labels = np.arange(60, dtype=np.uint8) % 3
    images = np.random.default_rng(0).integers(0, 40, (60, 28, 28), dtype=np.uint8) + (90 * labels[:, None, None])
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 60, 28, 28) + images.tobytes())
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 60) + labels.tobytes())
    return tmp_path


def test_the_page_has_a_part_of_each_group_and_a_command_with_it():
    assert {*tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]} == {*GROUPS}
    assert len(COMMANDS) == 4
    assert len(FILES) == 5


@pytest.mark.slow
@pytest.mark.thorough
def test_the_commands_of_the_page_run_with_the_parts_that_it_shows(
    folder: Path, photos: Path, torch_forks: Any
) -> None:
    (folder / "photos").symlink_to(photos)
    codec, source, task, device = (shlex.split(command) for command in COMMANDS)
    source, task, device = ([word.replace("cache", "digits") for word in words] for words in (source, task, device))
    quick = ["--model", "cnn", "--epochs", "2", "--batch-size", "20"]
    commands = [codec, source, [*task, "--backend", "torch", *quick], [*device, *quick]]
    commands.append(["predict", "runs/focal", "digits", "-o", "predictions.csv", "--backend", "torch"])
    (folder / "run.py").write_text(RUN)
    environment = {**os.environ, "SITE": str(folder / "site")}
    done = torch_forks.run(["run.py", *map(json.dumps, commands)], environment, cwd=folder)
    assert done.stdout.count("status 0") == len(commands), done.stdout + done.stderr
    manifest = json.loads((folder / "cache" / "manifest.json").read_text())
    assert manifest["fields"][0]["codec"] == "webp"
    assert manifest["created_by"]["my-parts"] == "1.0"
    assert json.loads((folder / "runs" / "focal" / "run.json").read_text())["task"] == "focal"
    assert len((folder / "predictions.csv").read_text().splitlines()) == 61
