"""Whether tpucache fits the current release of what people use: the table of docs/integrations.md.

Each example of docs/integrations runs in an environment of its own, on scikit-learn's digits, and so do its tests.
The environments lie above the one that this runs in (`make test` makes that), so that torch is not installed again.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from scripts.commands import ROOT, CommandError, make_parser
from scripts.digits import write_digits
from scripts.environments import Environment, Environments

SAMPLES_A_PATIENT: Final = 6
TESTS: Final = ("tests/integrations", "tests/adopt", "tests/docs/test_notebooks.py")


@dataclass(frozen=True)
class Integration:
    """An example, the packages that it needs besides the tests' own, and its tests, as pytest's -k selects them."""

    name: str
    packages: tuple[str, ...] = ()
    tests: str = ""

    @property
    def example(self) -> Path:
        """The file that runs."""
        return ROOT / "docs" / "integrations" / f"with_{self.name}.py"

    @property
    def package(self) -> str:
        """The package whose release the table shows."""
        return self.packages[0] if self.packages else {"dataloader": "torch", "sklearn": "scikit-learn"}[self.name]

    @property
    def environment(self) -> Environment | None:
        """What the packages are installed into; None where the tests' own environment holds all."""
        pins = tuple(f"{name}=={version(name)}" for name in ("torch", "numpy"))
        return Environment(self.name, (self.packages,), pins, inherits=True) if self.packages else None


INTEGRATIONS: Final = (
    Integration("dataloader", tests="spawned"),
    Integration("sklearn"),
    Integration("lightning", ("lightning",)),
    Integration("trainer", ("transformers", "accelerate")),
    Integration("accelerate", ("accelerate",)),
    Integration("keras", ("keras", "jax"), "jax"),
    Integration("jax", ("jax",)),
    Integration("flax", ("flax", "optax", "jax"), "trains_on_it_with_jax"),
    Integration("grain", ("grain",)),
    Integration("timm", ("timm",)),
    Integration("torchvision", ("torchvision",)),
    Integration("fastai", ("fastai",)),
)


def main() -> None:
    """Run the check as the command line asks."""
    arguments = _parse()
    wanted = [one for one in INTEGRATIONS if not arguments.only or one.name in arguments.only]
    with tempfile.TemporaryDirectory() as aside:
        work = arguments.work or Path(aside)
        cache, environments = _build_cache(work), Environments(work)
        rows = [_check(one, environments, cache) for one in wanted]
    print(f"On {date.today()}, Python {platform.python_version()}, torch {version('torch')}:\n")
    print("| | works | version | images seen | seconds | tests |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.exit(any(row[1] != "yes" for row in rows))


def _check(one: Integration, environments: Environments, cache: Path) -> tuple[str, ...]:
    """Return a row of the table: name, whether it works, release, images seen, seconds of the example, note."""
    print(f"{one.name} …", file=sys.stderr, flush=True)
    try:
        python = environments.prepare(one.environment)
    except CommandError as error:
        return one.name, "no", "", "", "", f"cannot be installed: {error}"
    began = time.perf_counter()
    done = _run(python, one.example, cache)
    seconds = f"{time.perf_counter() - began:.1f}"
    seen = re.search(r"^(\d+) images seen", done.stdout, re.MULTILINE)
    release = _run(python, "-c", f"import importlib.metadata as m; print(m.version({one.package!r}))").stdout.strip()
    release = f"{one.package} {release}"
    if done.returncode or not seen:
        return one.name, "no", release, "", seconds, _last_line(done.stderr or done.stdout)
    tests = _run(python, "-m", "pytest", *TESTS, "-k", " or ".join(filter(None, (one.name, one.tests))))
    note = _last_line(tests.stdout).partition(",")[0]  # "3 passed"; what was not selected is of no interest
    return one.name, "no" if tests.returncode else "yes", release, seen[1], seconds, note


def _build_cache(work: Path) -> Path:
    """Return a cache of digits with two augmented variants and a column of patients, made now or by an earlier run."""
    photos, cache = work / "digits", work / "cache"
    if not photos.exists():
        write_digits(photos)
    paths = sorted(photos.rglob("*.png"), key=lambda path: path.name)
    with (photos / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "patient"])
        rows.writerows(
            [path.relative_to(photos), path.parent.name, f"p{at // SAMPLES_A_PATIENT}"] for at, path in enumerate(paths)
        )
    options = ("--label-col", "label", "--size", "32", "--variants", "2")
    _run(sys.executable, "-m", "tpucache", "warmup", photos / "train.csv", cache, *options, check=True)
    return cache


def _run(*command: Any, check: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=environment, check=check, capture_output=True, text=True)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "ended without output"


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = [one.name for one in INTEGRATIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the environments there, for the next run")
    arguments = parser.parse_args()
    if arguments.work:
        arguments.work.mkdir(parents=True, exist_ok=True)
        arguments.work = arguments.work.absolute()
    return arguments
