"""Runs the blocks of README, docs/kaggle.md and docs/colab.md word by word, where nothing but their own lines installs.

Each notebook or machine of a page gets a new environment. It has what the image of that notebook has according to the
page; the rest comes by the `pip install` lines of the page. pip has no index: the libraries that a line asks for are
linked from those installed here just before it.

/kaggle, /content and the bucket are folders in a temporary one, photographs are generated, and scripts/kaggle_server.py
stands in for Kaggle. PAGES lists which blocks are not run, which words are replaced, and why. The check fails if a
block fails, if a block is neither run nor listed, and if PAGES lists words that no block has.

    python -m scripts.checks page_blocks
    python -m scripts.checks page_blocks kaggle
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from scripts.commands import ROOT, CommandError, make_parser
from scripts.environments import Environment, Environments, link
from scripts.kaggle_server import KaggleServer

_LIMIT: Final = 1800  # seconds of a block
PHOTOGRAPHS: Final = 6  # of each source


class Place:
    """The folders that a page names, the environment in which its blocks are run, and the server in Kaggle's place."""

    def __init__(self, root: Path, server: KaggleServer) -> None:
        self.root, self.server = root, server
        self.variables: dict[str, str] = {}
        self.checkout = root / "checkout"
        self.here = root / "here"  # where commands are run
        self.inputs, self.working = root / "kaggle" / "input", root / "kaggle" / "working"
        self.content = root / "content"
        for folder in (self.checkout, self.here, self.inputs, self.working, self.content):
            folder.mkdir(parents=True)

    def begin(self, name: str, libraries: tuple[str, ...]) -> None:
        """Make a new environment that has some libraries of those installed here."""
        self.python = Environments(self.root / "environments").prepare(Environment(name, links=libraries))
        home = self.root / "homes" / name
        home.mkdir(parents=True)
        self.variables = {
            "PATH": f"{self.python.parent}:{os.defpath}",
            "HOME": str(home),
            "PYTHONNOUSERSITE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "TPUCACHE_PATH": f"{self.inputs}:{self.working}:{self.content}",
        }
        self.variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.build_tools())}

    def build_tools(self) -> Path:
        """Return a folder with what builds tpucache's wheel, downloaded at the first call."""
        folder = self.root / "tools"
        if not folder.exists():
            tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
            words = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
            subprocess.run([sys.executable, *words, *tools], check=True, timeout=_LIMIT)
        return folder

    def run(self, language: str, text: str, where: Path | None = None) -> None:
        """Run a block. Raises CommandError with what it printed."""
        text = re.sub(r"(?<![\w.~/])/(?=(kaggle|content)\b)", f"{self.root}/", text)
        text = text.replace("gs://my-bucket", f"file://{self.root}/bucket")
        if language == "sh":
            for asked in map(required, installs(text)):
                (packages,) = self.python.parent.parent.glob("lib/python*/site-packages")
                link(asked, packages)
            words = ["bash", "-euxc", text]  # each command is shown before what it prints
        else:
            (self.root / "block.py").write_text(text)
            words = [str(self.python), str(self.root / "block.py")]
        try:
            done = subprocess.run(
                words, cwd=where or self.here, env=self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", check=False, timeout=_LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"it takes over {_LIMIT} s") from error
        if done.returncode:
            raise CommandError(f"it ends with status {done.returncode}, and prints:\n{done.stdout.strip()}")


def copy_checkout(folder: Path) -> None:
    """Copy the tracked files of this checkout."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(None, os.fsdecode(tracked).split("\0")):
        if (ROOT / name).exists():  # not removed since
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def installs(text: str) -> list[list[str]]:
    """Return the words after each `pip install` of a text."""
    lines = text.replace("\\\n", " ").splitlines()
    starts = ("pip install ", "pip wheel ")
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith(starts)]


def required(words: Sequence[str]) -> list[str]:
    """Return the names of the libraries that pip needs to install these."""
    if "--no-deps" in words:
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = []
    for word in (word for word in words if not word.startswith("-")):
        if re.fullmatch(r"\w[\w.-]*", word):
            found.append(word)
            continue
        found += project["dependencies"]  # the word is a folder or a wheel of tpucache, with extras
        extras = re.search(r"\[(.+)\]$", word)
        waiting = extras[1].split(",") if extras else []
        for extra in waiting:  # extras of extras are added as they are found
            for requirement in project["optional-dependencies"][extra]:
                own = re.match(r"tpucache\[(.+)\]", requirement)
                waiting += own[1].split(",") if own else []
                found += [] if own else [requirement]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in dict.fromkeys(found)]


def write_photographs(folder: Path, numbers: range) -> None:
    """Write smooth noise as photographs of two classes."""
    for number in numbers:
        path = folder / ("ant", "bee")[number % 2] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = np.random.default_rng(number).integers(0, 256, (8, 10, 3), np.uint8)
        Image.fromarray(coarse).resize((320, 256), Image.Resampling.BICUBIC).save(path)


def have_photographs(place: Place) -> None:
    """Have a folder of photographs where commands are run."""
    write_photographs(place.here / "photos" / "train", range(PHOTOGRAPHS))


def have_wheel(place: Place) -> None:
    """Have tpucache's wheel as an input of a notebook on Kaggle."""
    (place.inputs / "wheel").mkdir(parents=True)
    for wheel in place.checkout.glob("tpucache-*.whl"):
        shutil.copy(wheel, place.inputs / "wheel")


def have_inputs(place: Place) -> None:
    """Have a wheel, photographs and a contest as the inputs of a notebook on Kaggle, and photographs elsewhere."""
    have_photographs(place)
    photos, contest = place.inputs / "my-photos", place.inputs / "contest"
    shutil.copytree(place.here / "photos", photos)
    (contest / "images").mkdir(parents=True)
    have_wheel(place)
    with (contest / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image_id", "label", "fold"])
        for path in sorted(photos.glob("train/*/*")):
            shutil.copy(path, contest / "images")
            rows.writerow([path.stem, path.parent.name, int(path.stem) % 5])


def have_dataset(place: Place) -> None:
    """Have the published dataset and the wheel as the inputs of a notebook on Kaggle, where nothing was trained."""
    shutil.rmtree(place.inputs)
    (place.inputs / "my-cache").mkdir(parents=True)
    for file, content in place.server.files("your-name/my-cache").items():
        (place.inputs / "my-cache" / file).write_bytes(content)
    have_wheel(place)
    forget(place.working)


def have_drive(place: Place) -> None:
    """Have tpucache and photographs on Drive."""
    drive = place.content / "drive" / "MyDrive"
    shutil.copytree(place.checkout, drive / "tpucache")
    write_photographs(drive / "photos", range(PHOTOGRAPHS))


def forget(folder: Path) -> None:
    """Empty a folder that lives as long as a session."""
    shutil.rmtree(folder)
    folder.mkdir()


def put_aside(place: Place) -> None:
    """Move the cache away, as another block builds one in its place."""
    (place.working / "cache").rename(place.working / "first")


def put_back(place: Place) -> None:
    """Move the first cache back."""
    shutil.rmtree(place.working / "cache", ignore_errors=True)
    (place.working / "first").rename(place.working / "cache")


def sign_in(place: Place, name: str) -> None:
    """Set the variables of an account at the stand-in."""
    account = {"KAGGLE_USERNAME": name, "KAGGLE_KEY": f"the-key-of-{name}"}
    place.variables |= place.server.environment | account


@dataclass(frozen=True)
class Part:
    """The blocks after a heading, which share an environment.

    `libraries` are those of the image. `command` is one of the text above the blocks; it is run first, in a checkout.
    """

    heading: str
    arrange: Callable[[Place], None]
    libraries: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Page:
    """How to run the blocks of a page. The keys of all mappings are words that exactly one block has.

    `before` has what is done before that block: a step that the page leaves to its reader, or a command in the page's
    text, which is run in a checkout. `replaced` has the words that are run instead of the key. `left_out` has the
    reason why the block is not run.
    """

    path: str
    parts: tuple[Part, ...]
    before: Mapping[str, Callable[[Place], None] | str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


PAGES: Final = {
    "readme": Page(
        "README.md",
        (Part("# tpucache", have_photographs, command="pip install '.[augment,fast,train,zstd]'"),),
        left_out={
            "-from torchvision": "a change of the reader's own program",
            "make demo ": "make installs, into .venv: CI itself runs `make test`, and each release `make demo`",
            "photos ─▶": "a drawing",
        },
    ),
    "kaggle": Page(
        "docs/kaggle.md",
        (
            Part("## The first: warm up", have_inputs, command="pip wheel --no-deps ."),
            Part("## The second: train", have_dataset, libraries=("numpy", "torch", "jax")),
        ),
        before={
            "/kaggle/input/contest/train.csv": put_aside,
            "--target kaggle --dry-run": lambda place: shutil.rmtree(place.working / "cache"),
            "--license CC-BY-4.0 --dry-run": put_back,
            "kaggle:your-name/my-cache --keep-local": lambda place: sign_in(place, "your-name"),
            "kaggle:ann/my-photographs": lambda place: sign_in(place, "ann"),
            "--processes 2": lambda place: forget(place.working),
        },
        replaced={
            "    --flip": "    --epochs 1 --flip",
            "    --processes 2": "    --epochs 1 --processes 2",
            "CachedLoader(train, 1024,": "CachedLoader(train, 4,",
        },
        left_out={"python -m scripts.kaggle_server": "this check runs that server, at a free port"},
    ),
    "colab": Page(
        "docs/colab.md",
        (
            Part("## Warm up, on a CPU runtime", have_drive),
            Part("## Train, on a TPU runtime", lambda place: None, libraries=("numpy", "torch")),
        ),
        before={"gs://my-bucket": "pip install '.[remote]'"},
        replaced={"train /content/copy": "train /content/copy --epochs 1"},
        left_out={
            "from google.colab import drive": "only Colab has this module",
        },
    ),
}


@dataclass(frozen=True)
class Block:
    """A block of a page: its number, from 1, the part that it is in, what precedes it, and why it is not run."""

    number: int
    part: Part
    language: str
    text: str
    before: Callable[[Place], None] | str | None
    reason: str | None


def read_blocks(page: Page, text: str) -> list[Block]:
    """Return the blocks of a page. Raises CommandError where a block is neither run nor listed, or a rule has none."""
    found = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    starts = [text.find(f"{part.heading}\n") for part in page.parts]
    lost = [part.heading for part, start in zip(page.parts, starts, strict=True) if start < 0]
    commands = [part.command for part in page.parts] + [step for step in page.before.values() if isinstance(step, str)]
    lost += [command for command in commands if command not in " ".join(text.split())]
    for rules in (page.before, page.replaced, page.left_out):
        lost += [words for words in rules if sum(words in block[2] for block in found) != 1]
    if lost:
        raise CommandError(
            f"{page.path}: scripts/checks/page_blocks.py has a rule for {lost[0]!r}, which is not there once"
        )
    blocks = []
    for number, block in enumerate(found, 1):
        language, shown = block.groups()
        before = [step for words, step in page.before.items() if words in shown]
        reasons = [reason for words, reason in page.left_out.items() if words in shown]
        if block.start() < starts[0] or (language not in ("sh", "python") and not reasons):
            raise CommandError(f"{page.path}, block {number}, is not run, and not listed in page_blocks.py:\n\n{shown}")
        run = shown
        for words, instead in page.replaced.items():
            run = run.replace(words, instead)
        part = page.parts[sum(start <= block.start() for start in starts) - 1]
        blocks.append(Block(number, part, language, run, next(iter(before), None), next(iter(reasons), None)))
    return blocks


def check(page: Page, text: str, place: Place) -> None:
    """Run the blocks of a page, in order. Raises CommandError."""
    began, count, part = time.monotonic(), 0, None
    blocks = read_blocks(page, text)
    run = [block for block in blocks if block.reason is None]
    for block in run:
        start = time.monotonic()
        try:
            if block.part is not part:
                part = block.part
                place.begin(f"{Path(page.path).stem}-{page.parts.index(part) + 1}", part.libraries)
                place.run("sh", part.command, place.checkout)
                part.arrange(place)
            if isinstance(block.before, str):
                place.run("sh", block.before, place.checkout)
            elif block.before is not None:
                block.before(place)
            place.run(block.language, block.text)
        except CommandError as error:
            raise CommandError(f"{page.path}, block {block.number}:\n\n{block.text}\n{error}") from error
        count += len(block.text.split())
        print(f"page_blocks: {page.path}, block {block.number}: {time.monotonic() - start:.1f} s", flush=True)
    for block in blocks:
        if block.reason is not None:
            print(f"page_blocks: {page.path}, block {block.number} is not run: {block.reason}")
    took = time.monotonic() - began
    print(f"page_blocks: {page.path}: {len(run)} blocks of {count} words work, in {took:.0f} s", flush=True)


def main() -> None:
    """Run the check as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"which: {', '.join(PAGES)} (all of them)")
    options = parser.parse_args()
    if unknown := set(options.pages) - set(PAGES):
        parser.error(f"there is no page {', '.join(sorted(unknown))}: it is one of {', '.join(PAGES)}")
    for name in options.pages or PAGES:
        with tempfile.TemporaryDirectory() as folder, KaggleServer().running() as server:
            try:
                page = PAGES[name]
                place = Place(Path(folder), server)
                copy_checkout(place.checkout)
                check(page, (ROOT / page.path).read_text(), place)
            except CommandError as error:
                sys.exit(f"page_blocks: {error}")
