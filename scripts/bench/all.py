"""Every figure of docs/numbers.md and of README's table, measured one after the other on this machine.

Each part of the page is what one benchmark printed, with its command, the machine, the commit and the day. README's
table and the pictures are made of the same figures. A quiet machine needs one to two hours for all of it.

    python -m scripts.bench all PHOTOGRAPHS --large LARGE_PHOTOGRAPHS
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench.table import as_markdown, machine, machine_line, replace_part
from scripts.commands import ROOT, CommandError, run_logged, say

PAGE, README = ROOT / "docs" / "numbers.md", ROOT / "README.md"

Figures = dict[str, Any]
#: What a row of README's table says, of the figures of some parts.
Sentence = Callable[..., str]


@dataclass(frozen=True)
class Part:
    """A part of the page: the words after `python -m`, in which names in braces are the folders that it measures.

    The page shows tpucache as the command that it is, too.
    """

    name: str
    command: str
    prints_json: bool = False  # instead of writing files

    def words(self, folders: Mapping[str, Path]) -> list[str]:
        """Return the command for these folders."""
        return [word.format(**{name: str(path) for name, path in folders.items()}) for word in self.command.split()]

    @property
    def shown(self) -> str:
        """The command as the page shows it."""
        words = self.command.format(photographs="PHOTOGRAPHS", large="LARGE", cache="CACHE", small="SMALL_CACHE")
        return words if words.startswith("tpucache ") else f"python -m {words}"


PARTS: Final = (
    Part("bench", "tpucache bench {cache} --in-memory yes --device-rate 7500 --json", prints_json=True),
    Part("bench-1", "tpucache bench {cache} --in-memory yes --threads 1 --json", prints_json=True),
    Part("bench-files", "tpucache bench {cache} --in-memory no --json", prints_json=True),
    Part("bench-28000", "tpucache bench {cache} --device-rate 28000 --json", prints_json=True),
    Part("loader", "scripts.bench loader {cache}"),
    Part("read", "scripts.bench read --source {photographs}"),
    Part("read-once", "scripts.bench read --source {photographs} --passes 1 --only tpucache ffcv gather memmap"),
    Part("formats", "scripts.bench formats --source {photographs}"),
    Part("formats-512", "scripts.bench formats --source {photographs} --size 512 --rounds 3"),
    Part("sizes", "scripts.bench sizes {photographs} --threads 1"),
    Part("sizes-xla", "scripts.bench sizes {photographs} --backend xla --only finishing"),
    Part("idle", "scripts.bench idle {photographs}"),
    Part("warmup", "scripts.bench warmup {large} {photographs} --rounds 3"),
    Part("epochs", "scripts.bench epochs {photographs}"),
    Part("epochs-large", "scripts.bench epochs {large}"),
    Part("train", "scripts.bench train {small} --batch-size 128 --epochs 4"),
    Part("feeds", "scripts.bench feeds"),
)


@dataclass(frozen=True)
class Row:
    """A row of the table at the top: what it is, of which parts' figures, and what it says."""

    what: str
    parts: tuple[str, ...]
    says: Sentence
    is_in_readme: bool = False


def slower(read: Figures, *names: str) -> str:
    """Return how many times slower some readers are than tpucache in memory, those that took part."""
    rows = {row["name"]: row["times_slower"] for row in read["readers"]}
    return ", ".join(f"{name} {rows[key]:.1f}" for name, key in map(_named, names) if rows.get(key))


def seconds_of(epochs: Figures, *texts: str) -> str:
    """Return the wall times of those contenders that took part, each in its text, `TEXT=NAME`."""
    rows = {row["name"]: row["seconds"] for row in epochs["rows"]}
    pairs = (text.split("=") for text in texts)
    return ", ".join(text.format(f"{rows[name]:.1f} s") for text, name in pairs if name in rows)


def _named(text: str) -> tuple[str, str]:
    name, _, key = text.partition("=")
    return name, key or name


def _ratio(sources: list[Figures], at: int, name: str, other: str) -> str:
    found = next((each["whole"] for each in sources[at]["ratios"] if each["name"] == name), None)
    return "" if found is None else f", {found:.1f} times {other}"


def _rate(sources: list[Figures], at: int) -> float:
    found = next(row for row in sources[at]["contenders"] if row["name"] == "tpucache, 2 jobs")
    return float(found["images_per_second"])


ROWS: Final = (
    Row(
        "reading from memory, 2 threads",
        ("bench",),
        lambda bench: f"{bench['images_per_second']:,.0f} images/s, {bench['ratio']:.2f} of a plain copy in memory",
        is_in_readme=True,
    ),
    Row(
        "the same, 1 thread",
        ("bench-1",),
        lambda bench: f"{bench['images_per_second']:,.0f} images/s, {bench['ratio']:.2f} of a plain copy in memory",
    ),
    Row(
        "reading from the page cache, 2 threads",
        ("bench-files",),
        lambda bench: f"{bench['images_per_second']:,.0f} images/s, {bench['ratio']:.2f} of a plain copy in memory",
    ),
    Row(
        "idle time of an accelerator that takes 7,500 images/s",
        ("bench",),
        lambda bench: f"{bench['idle']:.1%}",
        is_in_readme=True,
    ),
    Row("the same at 28,000 images/s", ("bench-28000",), lambda bench: f"{bench['idle']:.1%}"),
    Row("first batch after making a loader", ("loader",), lambda loader: f"{loader['first_batch_seconds']:.2f} s"),
    Row(
        "opening ten million records",
        ("loader",),
        lambda loader: f"{loader['huge']['seconds']:.2f} s, {loader['huge']['resident_mb']:.0f} MB",
    ),
    Row(
        "other readers, times slower than tpucache in memory",
        ("read",),
        lambda read: slower(
            read, "FFCV=ffcv raw 2", "LitData=litdata", "WebDataset=webdataset", "a folder of JPEGs=jpeg folder"
        ),
        is_in_readme=True,
    ),
    Row(
        "warmup of photographs of several megapixels, 2 jobs",
        ("warmup",),
        lambda warmup: (
            f"{_rate(warmup['sources'], 0):,.0f} images/s"
            + _ratio(warmup["sources"], 0, "2 jobs / seed", "one process that decodes them whole")
            + _ratio(warmup["sources"], 0, "2 jobs / FFCV's writer", "FFCV's writer")
        ),
        is_in_readme=True,
    ),
    Row(
        "three epochs of crops and flips on the CPU, start-up and building included",
        ("epochs",),
        lambda epochs: seconds_of(
            epochs,
            "{} with ImageFolder=tpucache, ImageFolder",
            "torchvision {}=torchvision",
            "efficio {}=efficio",
            "FFCV {}=FFCV raw",
        ),
        is_in_readme=True,
    ),
    Row(
        "training, compared with a bare loop on one batch",
        ("train",),
        lambda train: f"{train['ratio']:.2f} of its rate, the device idle for {train['device_idle']:.1%} of the time",
        is_in_readme=True,
    ),
)


def measure(part: Part, folders: Mapping[str, Path], work: Path) -> tuple[Figures, str]:
    """Run one benchmark; return its figures and its tables in Markdown. Raises CommandError."""
    figures, tables = work / f"{part.name}.json", work / f"{part.name}.md"
    words = [sys.executable, "-m", *part.words(folders)]
    if part.prints_json:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandError(done.stderr.strip().splitlines()[-1])
        figures.write_text(done.stdout)
        return json.loads(done.stdout), ""
    run_logged([*words, "--json", figures, "--markdown", tables], work / f"{part.name}.log")
    return json.loads(figures.read_text()), tables.read_text()


def stamp() -> str:
    """Return where and when figures were measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return f"Commit {commit.stdout.strip() or 'unknown'}, {day}; {machine_line(machine())}."


def glance(found: Mapping[str, Figures], *, is_readme: bool) -> str:
    """Return the table at the top, of the parts that were measured: README's rows, or all."""
    commands = {part.name: part.shown.replace(" --json", "") for part in PARTS}
    rows = [["what", "measured", "printed by"]]
    for row in ROWS:
        if (row.is_in_readme or not is_readme) and all(name in found for name in row.parts):
            rows.append([row.what, row.says(*(found[name] for name in row.parts)), f"`{commands[row.parts[0]]}`"])
    return as_markdown(rows, left=(0, 1, 2))


def main() -> None:
    """Measure as the command line asks, and write page, table and pictures."""
    options = _parse()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    folders = {"photographs": options.photographs.resolve(), "cache": work / "cache", "small": work / "small"}
    folders["large"] = (options.large or options.photographs).resolve()
    for name, size in {"cache": "224", "small": "64"}.items():
        warmup = ["tpucache", "warmup", folders["photographs"], folders[name], "--size", size]
        run_logged([sys.executable, "-m", *warmup], work / f"{name}.log")
    measured = stamp()  # before the page changes
    found = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json")}  # of an earlier run, too
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        say(part.shown)
        try:
            found[part.name], tables = measure(part, folders, work)
        except CommandError as error:
            say(f"left out: {part.name}: {error}")
            continue
        if tables:
            replace_part(PAGE, part.name, f"`{part.shown}`\n\n{tables.strip()}\n\n{measured}")
    replace_part(PAGE, "glance", f"{glance(found, is_readme=False)}\n{measured}")
    replace_part(README, "figures", glance(found, is_readme=True))
    run_logged([sys.executable, "-m", "scripts.bench", "pictures"], work / "pictures.log")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--large", type=Path, help="photographs of a camera, for warmup (default: the same)")
    parser.add_argument("--work", type=Path, default=Path("build/all"), help="where files are made (%(default)s)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help=f"of: {', '.join(names)}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
