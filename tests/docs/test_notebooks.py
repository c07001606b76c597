"""The notebooks run from top to bottom, the second on what the first has left.

A small runner stands in for Jupyter: cells of Python, and the lines that begin with ! or %pip. A notebook's values are
set as papermill sets them, after the cell tagged "parameters".
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

import tpucache
from tpucache import CachedDataset
from tpucache.cli import main

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
PARAMETERS = "parameters"
PROGRAMS = (["tpucache"], ["python", "-m", "tpucache"])
#: Runs the second notebook in a process of its own, where it measures for a moment, as all others do here.
SHORT = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from pathlib import Path
from test_notebooks import run_notebook
from tpucache.report.bench import run_bench
from tpucache.training import loop

run_bench.__kwdefaults__.update(rounds=1, seconds=0.05)
ceiling = loop.ceiling
loop.ceiling = lambda execute, device, images, _: ceiling(execute, device, images, 0.0)
run_notebook(sys.argv[1], INPUT=Path(sys.argv[2]), RUN=Path(sys.argv[3]), MODEL="cnn", EPOCHS=1)
"""
#: The same of the third.
THIRD = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from test_notebooks import run_notebook

print(run_notebook(sys.argv[1], INPUT=sys.argv[2], BATCH=32, EPOCHS=3, WIDTH=8)["history"])
"""


def code_cells(name: str) -> list[dict[str, Any]]:
    """Return a notebook's cells of code."""
    return [cell for cell in json.loads((FOLDER / name).read_text())["cells"] if cell["cell_type"] == "code"]


def run_notebook(name: str, **parameters: Any) -> dict[str, Any]:
    """Run a notebook's cells in order, as papermill does: values for its parameters are put after the tagged cells.

    Return its variables. `%pip` lines are left out: what they install is here already.
    """
    space: dict[str, Any] = {"__name__": "__main__", "_shell": _shell}
    for cell in code_cells(name):
        source = "".join(cell["source"])
        tagged = PARAMETERS in cell["metadata"].get("tags", ())
        exec(compile(_as_python(source), f"{name}:{cell['id']}", "exec"), space)
        if tagged:
            space.update({key: value for key, value in parameters.items() if key in space})
    missing = parameters.keys() - space.keys()
    assert not missing, f"{name} has no parameters {missing}"
    return space


def _as_python(source: str) -> str:
    """Return a cell's source with its ! lines as calls and without its %pip lines."""
    lines = []
    for line in _joined(source):
        if line.startswith("!"):
            # IPython fills {names} in, as an f-string does; here paths may have spaces, in a temporary folder's name.
            lines.append(f"_shell([{', '.join(f'f{word!r}' for word in shlex.split(line[1:]))}])")
        elif line.startswith("%"):
            assert line.startswith("%pip install "), line
        else:
            lines.append(line)
    return "\n".join(lines)


def _joined(source: str) -> list[str]:
    """Return the lines of a cell, with those of a command that a backslash continues made one."""
    lines: list[str] = []
    for line in source.splitlines():
        if lines and lines[-1].startswith(("!", "%")) and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1] + line.strip()
        else:
            lines.append(line)
    return lines


def _shell(words: list[str]) -> None:
    """Run a command; tpucache's own in this process, which has imported what it needs."""
    for program in PROGRAMS:
        if words[: len(program)] == program:
            assert main(words[len(program) :]) == 0, words
            return
    subprocess.run(words, check=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def built(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first notebook publishes: a folder of inputs with a cache in it."""
    inputs, cache = tmp_path_factory.mktemp("input"), tmp_path_factory.mktemp("working") / "cache"
    run_notebook("01-warmup.ipynb", SOURCE=photos, CACHE=cache, SIZE=16, VARIANTS=2)
    shutil.move(cache.with_name("cache.publish"), inputs / "my-cache")
    return inputs


def test_the_first_notebook_leaves_a_cache(built):
    assert len(CachedDataset(built / "my-cache", "epoch")) == 150


def test_the_second_trains_on_it_and_says_so_without_a_tpu(built, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPUCACHE_PATH", str(built))
    space = run_notebook("02-train.ipynb", INPUT=built, RUN=tmp_path / "run", MODEL="cnn", EPOCHS=2)
    out = capsys.readouterr().out
    assert space["CACHE"] == built / "my-cache"
    assert "'epoch': 2," in out


@pytest.mark.thorough
def test_the_second_runs_with_numpy_and_torch_alone_also_without_variants(photos, tmp_path, run_torch_alone):
    directory = tmp_path / "input" / "my-cache"
    tpucache.build_cache(photos, directory, tpucache.Recipe(size=16), jobs=1)
    place = str(directory.parent)
    done = run_torch_alone(SHORT, "02-train.ipynb", place, tmp_path / "run", TPUCACHE_PATH=place)
    assert done.returncode == 0, done.stderr
    assert 'variant="epoch" shows the clean images' in done.stderr
    assert (tmp_path / "run" / "predictions.csv").exists()


@pytest.mark.skipif(find_spec("flax") is None, reason="flax is not installed")
def test_the_third_trains_on_it_with_jax(built, tmp_path, run_with_jax):
    """In a process of its own: in one with JAX, every later fork warns."""
    program = tmp_path / "third.py"
    program.write_text(THIRD)
    done = run_with_jax(program, "03-train-jax.ipynb", built, TPUCACHE_PATH=built)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.thorough
def test_the_fourth_ends_with_a_submission(photos, tmp_path):
    data = tmp_path / "data"
    for name in ("train", "test"):
        (data / name).mkdir(parents=True)
    paths = sorted(photos.rglob("*.png"))[:60]
    for number, path in enumerate(paths):
        shutil.copy(path, data / ("test" if number % 6 == 0 else "train"))
    with (data / "train.csv").open("w", newline="") as file:
        rows = [(path.stem, path.parent.name) for number, path in enumerate(paths) if number % 6]
        csv.writer(file).writerows([("id", "label"), *rows])
    classes = sorted({label for _, label in rows})
    tests = [path.stem for path in paths[::6]]
    with (data / "sample_submission.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", *classes), *((name, *[0] * len(classes)) for name in tests)])
    values = {"SIZE": 16, "VARIANTS": 1, "MODEL": "cnn", "EPOCHS": 1}
    run_notebook("04-competition.ipynb", DATA=data, WORK=tmp_path, **values)
    with (tmp_path / "submission.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == tests
    assert all(abs(sum(float(row[name]) for name in classes) - 1) < 1e-4 for row in found)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_is_committed_with_the_outputs_of_one_run(name):
    notebook = json.loads((FOLDER / name).read_text())
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    (note,) = [cell for cell in notebook["cells"] if cell["id"] == "outputs"]
    assert "a small run" in "".join(note["source"])
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not re.search(r"/(home|root|work|tmp|usr)/|\\u001b", json.dumps(outputs))
    printed = "\n".join("".join(output.get("text", "")) for output in outputs)
    assert not re.search(r"^(?:python -m )?tpucache[ \w]*: ", printed, re.MULTILINE), "a command printed an error"
    assert 0 < len(json.dumps(outputs)) < 1_500_000
    (parameters,) = [cell for cell in code_cells(name)[:1] if PARAMETERS in cell["metadata"].get("tags", ())]
    assert "/kaggle/" in "".join(parameters["source"])


def test_a_failing_command_fails_the_notebook(tmp_path):
    with pytest.raises(AssertionError, match="verify"):
        _shell(["tpucache", "verify", str(tmp_path)])
