"""A cache made of a .csv, with labels, folds and a column that groups samples; and a Python that runs examples."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpucache import Recipe, build_cache
from tpucache.warmup.sources import TableOptions, open_source

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "integrations"


@pytest.fixture(scope="session")
def cache(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 samples of four classes and 25 patients at 32x32, with two augmented variants. Not to be written to."""
    table = tmp_path_factory.mktemp("table") / "train.csv"
    paths = sorted(photos.rglob("*.png"), key=lambda path: path.name)
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "patient"])
        rows.writerows([path.relative_to(photos), path.parent.name, f"p{at // 6}"] for at, path in enumerate(paths))
    directory = tmp_path_factory.mktemp("caches") / "patients"
    source = open_source(table, TableOptions(label_cols=("label",), root=photos))
    build_cache(source, directory, Recipe(size=32, variants=2), jobs=1)
    return directory


@pytest.fixture(scope="session")
def needs() -> Callable[[str], None]:
    """Skip a test where a library is not installed."""

    def check(module: str) -> None:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: `python -m scripts.checks integrations` installs it and runs this")

    return check


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a process without a TPU.

    Lightning asks torch_xla, where it is installed, for the TPU's kind also where there is none. It is told one: else
    torch_xla asks the network, or fails where JAX, once imported, has forbidden that by a variable that is inherited.
    """
    kind = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8"}
    return {**os.environ, **kind, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}


@pytest.fixture
def run_example(tmp_path: Path, environment: dict[str, str], xla_forks: Any, run_with_jax: Any) -> Callable[..., int]:
    """Run an example as a user would, but with torch and torch_xla, or JAX, imported before.

    Return how many images it says it has seen.
    """

    def run(name: str, *arguments: str | Path) -> int:
        words = [*map(str, [EXAMPLES / name, *arguments])]
        if name == "with_jax.py":
            done = run_with_jax(*words, cwd=tmp_path)
        else:
            done = xla_forks.run(words, environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^(\d+) images seen", done.stdout, re.MULTILINE)
        assert found, done.stdout
        return int(found[1])

    return run
