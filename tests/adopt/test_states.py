"""A folder is listed in torchvision's order, and its state is another one once a picture changes."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from writing import write_picture

from tpucache.adopt.states import EXTENSIONS, PictureFolderSource, at_rest, list_pictures
from tpucache.errors import SourceError

ODD = (
    "10/1.png", "9/1.png", "9/10.png", "9/2.PNG", "a/x.jpg", "a-b/x.jpg", "a/z/x.jpg", "a/z-y/x.jpg", "a/z.y/x.jpg",
    "a/z/q/x.jpg", ".hidden/1.png", "B/é.webp", "b/note.txt", "b/1.gif", "b/2.tiff", "b/.png", "b/c/d/e.ppm",
    "loose.png",
)  # fmt: skip


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Pictures whose order depends on how they are sorted, and files that are not pictures."""
    for name in ODD:
        write_picture(tmp_path / "odd" / name)
    (tmp_path / "odd" / "b" / "linked").symlink_to(tmp_path / "odd" / "9")
    return tmp_path / "odd"


def documented(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Return classes and samples by the rule that torchvision documents: `find_classes` and `make_dataset`."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for number, name in enumerate(classes):
        for folder, _, names in sorted(os.walk(root / name, followlinks=True)):
            samples += [
                (os.path.join(folder, each), number) for each in sorted(names) if each.lower().endswith(EXTENSIONS)
            ]
    return classes, samples


def listed(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    listing = list_pictures(str(root)).listing
    return list(listing.classes), [(os.path.join(root, each.path), each.label) for each in listing.samples]


def test_the_order_is_the_documented_one(odd: Path) -> None:
    assert listed(odd) == documented(odd)
    assert [name for name, _ in documented(odd)[1]][:2] == [str(odd / ".hidden/1.png"), str(odd / "10/1.png")]


def test_the_order_is_that_of_torchvision(odd: Path) -> None:
    datasets = pytest.importorskip(
        "torchvision.datasets", reason="needs torchvision: `python -m scripts.checks integrations`"
    )
    theirs = datasets.ImageFolder(str(odd))
    assert datasets.folder.IMG_EXTENSIONS == EXTENSIONS
    assert listed(odd) == (theirs.classes, theirs.samples)


def state(root: Path) -> str:
    return list_pictures(str(root), allow_empty=True).state


def rewritten(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchanged(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def linked_elsewhere(root: Path) -> None:
    (root / "cat").rename(root.parent / "cat")
    shutil.copytree(root.parent / "cat", root.parent / "dog")  # with the same times
    (root / "cat").symlink_to(root.parent / "cat")
    state(root)
    (root / "cat").unlink()
    (root / "cat").symlink_to(root.parent / "dog")


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda root: write_picture(root / "9" / "z.png"),
    "removed": lambda root: (root / "9" / "a.png").unlink(),
    "renamed": lambda root: (root / "9" / "a.png").rename(root / "9" / "0.png"),
    "in another class": lambda root: (root / "9" / "b.png").rename(root / "cat" / "b.png"),
    "of equal size and date": lambda root: rewritten(root / "9" / "a.png"),
    "exchanged": lambda root: exchanged(root / "9" / "a.png", root / "10" / "a.png"),
    "classes exchanged": lambda root: exchanged(root / "9", root / "10"),
    "linked elsewhere": linked_elsewhere,
    "an empty class": lambda root: (root / "empty").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_makes_another_state(root: Path, change: str) -> None:
    before = state(root)
    CHANGES[change](root)
    assert state(root) != before


def test_a_state_stays_while_no_picture_changes(root: Path) -> None:
    before = state(root)
    (root / "9" / "a.png").read_bytes()
    write_picture(root / "loose.png")
    (root / "9" / "notes.txt").write_text("no picture")
    (root / "9" / "again").symlink_to(root)  # a link that leads back up
    assert state(root) == before


def test_what_cannot_be_listed_is_told(tmp_path: Path, root: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere: No such file or directory"):
        list_pictures(str(tmp_path / "nowhere"))
    with pytest.raises(SourceError, match="has no folders"):
        list_pictures(str(root / "9"))
    (root / "empty").mkdir()
    with pytest.raises(SourceError, match=r"without a picture: 'empty'.*allow_empty=True"):
        list_pictures(str(root))
    assert list_pictures(str(root), allow_empty=True).listing.classes == ("10", "9", "cat", "empty")


def test_what_was_just_written_is_looked_at_once_the_clock_has_ticked() -> None:
    def look(at: int) -> int:
        """When a changed file is looked at."""

        def status() -> Any:
            return SimpleNamespace(st_ctime_ns=at, asked=time.time_ns())

        found: Any = at_rest(lambda: [("a.png", status())])
        return int(found[0][1].asked)

    written = time.time_ns() | 1
    assert look(written) >= written + 20_000_000
    ahead = written + 500 * 10**9  # another machine's clock
    assert look(ahead) < ahead


def test_workers_are_sent_no_listing(root: Path) -> None:
    source = PictureFolderSource(str(root), list_pictures(str(root)).listing)
    sample = source.list().samples[0]
    assert (sample.path, sample.label) == ("10/a.png", 0)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.load(sample).fields == {"image": (root / "10" / "a.png").read_bytes()}
    assert len(pickle.dumps(source)) < 700
