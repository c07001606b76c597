"""How long it takes from `pip install` to the first shuffled batch of a folder of photographs, with each library.

torch is installed already, as on Kaggle, on Colab and on most machines that train. Each library gets a new environment
and an empty folder, and is used as its own quick start shows. The clock runs while pip installs, and then until the
first batch of 256 photographs, 224x224 pixels, is printed; what the rest of that epoch takes is a figure of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bench.table import as_markdown, as_text, machine, replace_part
from scripts.commands import ROOT, CommandError, reason, say
from scripts.environments import Environment, Environments

PROGRAMS: Final = Path(__file__).parent / "first_result_programs"

_LIMIT: Final = 300.0  # seconds for pip, and for the program
_HEAD: Final = ("", "pip, s", "first batch after, s", "rest of the epoch, s", "words", "lines")


@dataclass(frozen=True)
class Tool:
    """A library: what is typed to install it and before the program, and the program's name."""

    name: str
    program: str
    install: str
    before: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    pkg_config: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The program, without its docstring."""
        return re.sub(r'^""".*?"""\s*', "", (PROGRAMS / f"{self.program}.py").read_text(), flags=re.DOTALL)

    @property
    def environment(self) -> Environment:
        """What is there before the clock starts: torch and numpy."""
        return Environment(f"first-{self.program}", links=("torch",), debian=self.debian, pkg_config=self.pkg_config)

    @property
    def typed(self) -> list[str]:
        """The lines that a user types."""
        program = f"python {self.program}.py"
        return [f"pip install {self.install}", *self.before, program, *filter(str.strip, self.text.splitlines())]


_VISION: Final = "torchvision==0.24.0"  # of the torch that is there

TOOLS: Final = (
    Tool("tpucache", "with_tpucache", ".[fast]", ("tpucache warmup photos cache",)),
    Tool("torchvision", "with_torchvision", _VISION),
    Tool("HF datasets", "with_datasets", f"datasets {_VISION}"),
    Tool("WebDataset", "with_webdataset", f"webdataset {_VISION}"),
    Tool("LitData", "with_litdata", f"litdata {_VISION}"),
    Tool("MosaicML Streaming", "with_streaming", f"mosaicml-streaming {_VISION}"),
    Tool("Grain", "with_grain", "grain pillow"),
    Tool(
        "FFCV",
        "with_ffcv",
        "setuptools wheel opencv-python-headless pillow numba 'numpy<2' && pip install --no-build-isolation ffcv",
        debian=("g++", "pkg-config", "libopencv-dev", "libturbojpeg0-dev"),
        pkg_config=("opencv4", "libturbojpeg"),
    ),
)


@dataclass(frozen=True)
class Result:
    """Seconds of pip, until the first batch after that, and of the rest of the epoch."""

    install: float
    first: float
    rest: float


def measure(tool: Tool, photos: Path, work: Path) -> Result:
    """Install a library into a new environment and run its program in an empty folder. Raises CommandError."""
    environment = tool.environment
    shutil.rmtree(work / "env" / environment.name, ignore_errors=True)
    python = Environments(work / "env").prepare(environment)
    folder = work / tool.program
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "photos").symlink_to(photos)
    (folder / f"{tool.program}.py").write_text(tool.text)
    log = work / f"{tool.program}.log"
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # HOME: what libraries keep for a user is not there the first time.
    surroundings = {**os.environ, "PATH": path, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    surroundings.pop("PYTHONPATH", None)

    def run(command: str, where: Path) -> None:
        with log.open("w") as file:
            done = subprocess.run(
                ["/bin/sh", "-c", command], cwd=where, env=surroundings, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, check=False, timeout=_LIMIT,
            )  # fmt: skip
        if done.returncode:
            raise CommandError(reason(log))

    began = time.monotonic()
    run(f"python -m pip install --quiet --disable-pip-version-check {tool.install}", ROOT)
    installed = time.monotonic()
    for command in tool.before:
        run(command, folder)
    first = None
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(python), f"{tool.program}.py"], cwd=folder, env=surroundings, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
        end = threading.Timer(_LIMIT, process.kill)
        end.start()
        with process:
            for line in process.stdout or ():
                if first is None and "256, " in line:
                    first = time.monotonic()
            ended = time.monotonic()
        end.cancel()
    if process.returncode or first is None:
        raise CommandError(reason(log))
    return Result(installed - began, first - installed, ended - first)


def row(tool: Tool, result: Result) -> list[str]:
    """Return a line of the table."""
    times = (f"{seconds:.1f}" for seconds in (result.install, result.first, result.rest))
    return [tool.name, *times, str(sum(len(line.split()) for line in tool.typed)), str(len(tool.typed))]


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path, help="a folder of photographs, one subfolder a class")
    parser.add_argument(
        "--work", type=Path, default=Path("build/first-result"), help="where files are made (%(default)s)"
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these libraries alone")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    work, photos = options.work.resolve(), options.photos.resolve()
    if not photos.is_dir():
        parser.error(f"{photos} is no folder")
    rows, left_out = [list(_HEAD)], []
    for tool in TOOLS:
        if options.only and tool.name not in options.only:
            continue
        say(tool.name)
        try:
            rows.append(row(tool, measure(tool, photos, work)))
        except (CommandError, subprocess.TimeoutExpired) as error:
            left_out.append(f"- left out: {tool.name}: {error}")
    print(as_text(rows))
    print(*left_out, sep="\n")
    if options.page:
        count = sum(1 for _ in photos.glob("*/*"))
        notes = f"{count:,} photographs. {machine()}."
        without_logs = [re.sub(r" \(see .*\)$", "", line) for line in left_out]  # they are on this machine alone
        replace_part(options.page, "first-result", "\n".join([as_markdown(rows), notes, "", *without_logs]))


if __name__ == "__main__":
    main()
