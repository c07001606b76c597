"""Run the notebooks of docs/ as on Kaggle, on a CPU and on scanned digits, and keep their outputs in them.

`/kaggle` is a link to a work folder meanwhile, so this takes a machine on which one may be made, such as a container.
Needs `pip install .[docs,report,jax] flax optax scikit-learn`.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

from scripts.commands import ROOT, CommandError, say
from scripts.digits import write_digits

FOLDER: Final = ROOT / "docs" / "notebooks"
KAGGLE: Final = Path("/kaggle")

#: The values that are not those of the notebook's own parameters, which are for larger data and a TPU.
SMALL: Final[Mapping[str, Mapping[str, Any]]] = {
    "01-warmup.ipynb": {"SIZE": 32, "VARIANTS": 3},
    "02-train.ipynb": {"MODEL": "cnn"},
    "03-train-jax.ipynb": {"EPOCHS": 3, "BATCH": 64, "WIDTH": 16},
    "04-competition.ipynb": {"SIZE": 32, "VARIANTS": 2, "MODEL": "cnn"},
}

#: The cell that says which run made the outputs.
NOTE: Final = "outputs"

#: How a command that was wrong begins what it prints.
WRONG: Final = re.compile(r"^(?:python -m )?tpucache[ \w]*: .*", re.MULTILINE)

_STEP: Final = re.compile(r"\x1b\[A|\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+")


def run_notebook(path: Path, values: Mapping[str, Any]) -> None:
    """Run a notebook from top to bottom with some of its parameters changed, and write its outputs into it.

    Raises CommandError where one of its commands prints an error.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source += "\n" + "\n".join(f"{name} = {value!r}" for name, value in values.items())
        if cell.cell_type == "code":  # what %pip installs is here already
            cell.source = re.sub(r"^%pip .*$", "pass", cell.source, flags=re.MULTILINE)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(KAGGLE)}})
    client.execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        if cell.id == NOTE:
            changed = ", ".join(f"`{name} = {value!r}`" for name, value in values.items())
            cell.source = f"The outputs below come from a small run on a CPU, on 1,797 scanned digits, with {changed}."
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = shortened(cell.outputs)
            if wrong := WRONG.search("".join(output.get("text", "") for output in cell.outputs)):
                raise CommandError(f"{path}: {wrong[0]}")
    notebook.metadata.language_info = {"name": "python"}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def shortened(outputs: list[Any]) -> list[Any]:
    """Return a cell's outputs, with what was printed as a terminal shows it in the end, and pictures once."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    printed = printed.replace(str(KAGGLE.resolve()), str(KAGGLE))  # the link's target
    others = [output for output in outputs if output.output_type != "stream"]
    for output in others:
        if "image/jpeg" in output.get("data", {}):
            output.data.pop("image/png", None)
    shown = screen(printed)
    return ([nbformat.v4.new_output("stream", name="stdout", text=shown)] if shown else []) + others


def screen(text: str) -> str:
    """Return what is left of a text that moves a terminal's cursor up and to the left, without blank lines."""
    lines, row, column = [""], 0, 0
    for step in _STEP.findall(text):
        if step == "\x1b[A":
            row = max(0, row - 1)
        elif step == "\r":
            column = 0
        elif step == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif not step.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + step + line[column + len(step) :]
            column += len(step)
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


@contextmanager
def kaggle(work: Path) -> Iterator[None]:
    """Have `/kaggle` with the folders of a session meanwhile. Raises CommandError where there is one already."""
    if KAGGLE.exists() or KAGGLE.is_symlink():
        raise CommandError(f"{KAGGLE} is there already: run this where it is not")
    shutil.rmtree(work, ignore_errors=True)
    for name in ("input/my-photos", "input/my-competition/train", "input/my-competition/test", "working"):
        (work / name).mkdir(parents=True)
    KAGGLE.symlink_to(work)
    try:
        yield
    finally:
        KAGGLE.unlink()


def write_competition(digits: Path, folder: Path) -> None:
    """Make a competition's files of scanned digits: every eighth is to be predicted."""
    train: list[tuple[str, str]] = []
    test: list[tuple[str, str]] = []
    for number, path in enumerate(sorted(digits.glob("*/*.png"))):
        rows, part = (test, "test") if number % 8 == 0 else (train, "train")
        rows.append((path.stem, path.parent.name))
        shutil.copy(path, folder / part)
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "label"), *train])
    classes = sorted({label for _, label in train})
    with (folder / "sample_submission.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("id", *classes), *((name, *[1 / len(classes)] * len(classes)) for name, _ in test)]
        )


def main() -> None:
    """Run the notebooks that the command line names, in their order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/kaggle"), help="where files are made (%(default)s)")
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with kaggle(options.work.resolve()):
        digits = KAGGLE / "input" / "my-photos" / "train"
        write_digits(digits)
        write_competition(digits, KAGGLE / "input" / "my-competition")
        for name, values in SMALL.items():
            say(name)
            run_notebook(FOLDER / name, values)
            working = KAGGLE / "working"
            published = working / "cache.publish"
            if published.exists():
                published.rename(KAGGLE / "input" / "my-cache")
            shutil.rmtree(working)  # each notebook is a session of its own
            working.mkdir()


if __name__ == "__main__":
    main()
