"""What reads and trains does so with numpy and torch alone, or numpy and JAX alone, and ends without a word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import DOCS, blocks
from patience import PATIENCE

from tpucache import Recipe, build_cache

pytestmark = pytest.mark.slow

#: What the page leaves to its reader: a step, and a network.
OWN = """
import jax

state = 0.0
train_step = jax.jit(lambda state, images, labels: (state + images.mean(), labels.sum()))
apply = lambda state, images: jax.nn.one_hot(images[:, 0, 0, 0] * 0, 4)
"""


def succeeded(words: list[str], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs as coefficients that a device finishes, without augmented variants."""
    directory = tmp_path_factory.mktemp("packed") / "cache"
    build_cache(photos, directory, Recipe(size=16, codec="dct-lz4"), jobs=1)
    return directory


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_the_page_about_jax_runs_with_numpy_and_jax_alone(packed, tmp_path, jax_alone):
    program = OWN + "\n".join(text for language, text in blocks(DOCS / "jax.md") if language == "python")
    program = program.replace("kaggle:you/birds-at-224", str(packed)).replace("1024", "32")
    (tmp_path / "page.py").write_text(program)
    done = succeeded([sys.executable, "page.py"], jax_alone, tmp_path)
    assert "accuracy 0.253" in done.stdout  # of 150 samples, 38 are of class 0
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


def test_reading_training_predicting_and_the_report_need_numpy_and_torch_alone(packed, tmp_path, run_torch_alone):
    options = ["--valid", "0.2", "--model", "cnn", "--epochs", "1", "--batch-size", "32", "--backend", "torch"]
    commands = [
        ["train", str(packed), "--run", "run", *options],
        ["predict", "run", str(packed), "-o", "predictions.csv", "--backend", "torch"],
        ["inspect", str(packed)],
        ["verify", str(packed)],
        ["bench", str(packed), "--batch-size", "8"],
        ["report", "run", "-o", "run.html"],
    ]
    refused = ["preview", str(packed), "-o", "sheet.png"]
    quick = "from tpucache.report.bench import run_bench\nrun_bench.__kwdefaults__.update(rounds=1, seconds=0.05)"
    program = f"{quick}\nfrom tpucache.cli import main\nfor words in {commands}: assert main(words) == 0, words"
    program += f"\nimport sys\nprint('REFUSED', file=sys.stderr)\nassert main({refused}) == 1"
    done = run_torch_alone(program)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    page = (tmp_path / "run.html").read_text()
    assert "The pictures are left out: pictures are drawn by Pillow" in page
    assert "<h2>Confusion</h2>" in page
    (line,) = done.stderr.partition("REFUSED\n")[2].splitlines()
    assert "`pip install 'pillow>=10.1'`" in line
