"""The measured parts of docs/numbers.md and README's table, one after the other on this machine.

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
from pathlib import Path
from typing import Any, Final

from scripts.bench.table import as_markdown, replace_part
from scripts.commands import ROOT, CommandError, run_logged, say

PAGE, README = ROOT / "docs" / "numbers.md", ROOT / "README.md"
_IMAGES: Final = ROOT / "docs" / "images"

Figures = dict[str, Any]
#: What is run for each part of the page, as the page shows it; some parts have figures for README's table alone.
PARTS: Final = {
    "bench": "tpucache bench CACHE --in-memory yes --device-rate 7500",
    "read": "python -m scripts.bench read --source PHOTOGRAPHS",
    "loader": "python -m scripts.bench loader CACHE",
    "idle": "python -m scripts.bench idle PHOTOGRAPHS",
    "warmup": "python -m scripts.bench warmup LARGE PHOTOGRAPHS --rounds 3",
    "epochs": "python -m scripts.bench epochs PHOTOGRAPHS",
    "train": "python -m scripts.bench train SMALL_CACHE --batch-size 128 --epochs 4",
}
_PICTURES: Final = ("read", "idle")


def slower(read: Figures, *names: str) -> str:
    """Return how many times slower readers are than tpucache in memory, those that took part; NAME=ROW."""
    rows = {row["name"]: row["times_slower"] for row in read["readers"]}
    pairs = (name.split("=") for name in names)
    return ", ".join(f"{name} {rows[row]:.1f}" for name, row in pairs if rows.get(row))


def seconds_of(epochs: Figures, *texts: str) -> str:
    """Return the wall times of those contenders that took part, each in its text, `TEXT=NAME`."""
    rows = {row["name"]: row["seconds"] for row in epochs["rows"]}
    pairs = (text.split("=") for text in texts)
    return ", ".join(text.format(f"{rows[name]:.1f} s") for text, name in pairs if name in rows)


def warmup_rate(warmup: Figures) -> str:
    """Return the rate of the first source, and its ratios to those of others that took part."""
    source = warmup["sources"][0]
    rates = {row["name"]: row["images_per_second"] for row in source["contenders"]}
    ratios = {row["name"]: row["times_slower"] for row in source["contenders"]}
    others = {"seed": "one process that decodes them whole", "FFCV's writer": "FFCV's writer"}
    shown = (f", {ratios[key]:.1f} times {other}" for key, other in others.items() if ratios.get(key))
    return f"{rates['tpucache, 2 jobs']:,.0f} images/s" + "".join(shown)


#: README's table: what a row is, of which part's figures, and what it says.
ROWS: Final[tuple[tuple[str, str, Callable[[Figures], str]], ...]] = (
    (
        "reading from memory, 2 threads",
        "bench",
        lambda bench: f"{bench['images_per_second']:,.0f} images/s, {bench['ratio']:.2f} of a plain copy in memory",
    ),
    ("idle time of an accelerator that takes 7,500 images/s", "bench", lambda bench: f"{bench['idle']:.1%}"),
    (
        "other readers, times slower than tpucache in memory",
        "read",
        lambda read: slower(
            read, "FFCV=ffcv raw 2", "LitData=litdata", "WebDataset=webdataset", "a folder of JPEGs=jpeg folder"
        ),
    ),
    ("warmup of photographs of several megapixels, 2 jobs", "warmup", warmup_rate),
    (
        "three epochs of crops and flips on the CPU, start-up and building included",
        "epochs",
        lambda epochs: seconds_of(
            epochs,
            "{} with ImageFolder=tpucache, ImageFolder",
            "torchvision {}=torchvision",
            "efficio {}=efficio",
            "FFCV {}=FFCV raw",
        ),
    ),
    (
        "training, compared with a bare loop on one batch",
        "train",
        lambda train: f"{train['ratio']:.2f} of its rate, the device idle for {train['device_idle']:.1%} of the time",
    ),
)


def measure(name: str, folders: Mapping[str, Path], work: Path) -> tuple[Figures, str]:
    """Run what a part shows; return its figures and its tables in Markdown. Raises CommandError."""
    figures, tables = work / f"{name}.json", work / f"{name}.md"
    words = [str(folders.get(word, word)) for word in PARTS[name].split()]
    if words[0] == "tpucache":
        done = subprocess.run(
            [sys.executable, "-m", *words, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CommandError(done.stderr.strip().splitlines()[-1])
        figures.write_text(done.stdout)
        return json.loads(done.stdout), ""
    picture: list[str | Path] = ["--picture", _IMAGES / f"{name}.png"] if name in _PICTURES else []
    run_logged([sys.executable, *words[1:], "--json", figures, "--markdown", tables, *picture], work / f"{name}.log")
    return json.loads(figures.read_text()), tables.read_text()


def stamp() -> str:
    """Return of which commit figures are, and of which day."""
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return f"Commit {commit or 'unknown'}, {datetime.datetime.now(tz=datetime.UTC).date()}."


def readme_table(found: Mapping[str, Figures]) -> str:
    """Return README's table, of the parts that were measured."""
    rows = [["what", "measured", "printed by"]]
    rows += [[what, says(found[part]), f"`{PARTS[part]}`"] for what, part, says in ROWS if part in found]
    return as_markdown(rows)


def main() -> None:
    """Measure as the command line asks, and write page, table and pictures."""
    options = _parse()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    folders = {"PHOTOGRAPHS": options.photographs.resolve(), "CACHE": work / "cache", "SMALL_CACHE": work / "small"}
    folders["LARGE"] = (options.large or options.photographs).resolve()
    for name, size in {"CACHE": "224", "SMALL_CACHE": "64"}.items():
        words = ["warmup", folders["PHOTOGRAPHS"], folders[name], "--size", size]
        run_logged([sys.executable, "-m", "tpucache", *words], work / "warmup.log")
    measured = stamp()  # before the page changes
    found = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json")}  # of an earlier run, too
    for name, shown in PARTS.items():
        if options.only and name not in options.only:
            continue
        say(shown)
        try:
            found[name], tables = measure(name, folders, work)
        except CommandError as error:
            say(f"left out: {name}: {error}")
            continue
        if f"<!-- {name} -->" in PAGE.read_text(encoding="utf-8"):
            replace_part(PAGE, name, f"`{shown}`\n\n{tables.strip()}\n\n{measured}")
    replace_part(README, "figures", readme_table(found))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--large", type=Path, help="photographs of a camera, for warmup (default: the same)")
    parser.add_argument("--work", type=Path, default=Path("build/all"), help="where files are made (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[*PARTS], help=f"of: {', '.join(PARTS)}")
    return parser.parse_args()
