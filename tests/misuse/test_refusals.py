"""What cannot be meant is refused in one line, which says what is wrong, where, and what to do; nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpucache import CachedDataset, UsageError
from tpucache.cli import main

#: What a message says besides what is wrong and where: what to do, or what is allowed instead.
ADVICE = re.compile(
    r"\b(add|ask|begin|bring|draw|keep|build|check|choose|convert|copy|end (it|that|other)|give|install|leave|left out|"
    r"look|"
    r"make|name|open|remove|repair|restart|run|save|set|take|try|unset|use|warm|write)\b|"
    r"\b(allowed|at least|at most|between|has|invalid|is a|is an|is one of|less than|lie|looked for|must|needs?|only|"
    r"required|such as|there are|unrecognized)\b|"
    r"above 0|does not divide|leaves nothing|, not |in \w+ \(/|fails on|raised|could be used|--[a-z]",
    re.IGNORECASE,
)


def assert_telling(message: str, said: str) -> None:
    assert "\n" not in message
    assert len(message) >= 20
    assert re.search(said, message, re.IGNORECASE), message
    assert ADVICE.search(message), f"this does not say what to do: {message}"


WARMUP = "warmup {photos} new"
TRAIN = "train {cache} --run new --backend torch --model cnn --batch-size 8 --epochs 1"

#: The status of a command, how it begins, and how it ends: an option out of range, which the message names.
OPTIONS = [
    (1, WARMUP, "--size=0 --size=99999 --size=1x2x3 --variants=-1 --variants=9999 --seed=-1 --quality=0 --shard-mb=0"),
    (2, WARMUP, "--size=4x --jobs=0 --max-boxes=0 --white-level=0 --target=s3"),
    (2, TRAIN, "--lr=nan --lr=-1 --lr=0 --epochs=0 --batch-size=0 --smoothing=2 --smoothing=nan --ema=1"),
    (2, TRAIN, "--clip=-1 --clip=nan --mixup=-1 --mixup=nan --weight-decay=nan --weight-decay=-1 --seed=-1"),
    (2, TRAIN, "--accumulate=3 --threads=0 --checkpoint-every=0 --cores=0"),
    (2, f"{TRAIN} --augment", "cutmix=inf brightness=nan brightness=-1 saturation=inf erase=2 shift=-1 shift=inf"),
]
#: And other commands, each with what the message says.
LINES = [
    (1, f"{WARMUP} --variants 1 --augment nosuch", "augment"),
    *((1, f"warmup {{photos}} {place}", place) for place in ("file", "file/new", "/proc/new")),
    *(
        (2, f"{TRAIN} --valid={valid}", "fold|fraction")
        for valid in ["fold=0", "fold=", "0", "1", "1.5", "-0.2", "nan"]
    ),
    (1, f"{TRAIN} --valid nowhere", "nowhere"),
    (2, "train {cache} --run mine --backend torch --model cnn", "history"),
    *((2, f"{TRAIN} --model {model}", "nosuch") for model in ("nosuch", "os:nosuch", "nosuch:tiny")),
    (2, "report {cache} -o {cache}/manifest.json", "manifest.json"),
    (1, "fetch file:///nosuch new", "nosuch"),
    (2, "fetch nosuch://bucket/x new", "nosuch"),
    (2, "push {cache} {cache}", "itself"),
    (2, "publish {cache} --out {cache} --id ann/many-birds --title Many-birds --license CC0-1.0 --dry-run", "cache"),
]


def command_lines() -> Iterator[tuple[int, str, str]]:
    for status, begins, options in OPTIONS:
        for option in options.split():
            name = option.strip("-").partition("=")[0].replace("-", ".?")
            yield status, f"{begins} {option}", f"{name}|parts|rate|at least 1"
    yield from LINES


def files_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize(("status", "line", "said"), [*command_lines()])
def test_a_command_that_cannot_be_meant_is_refused(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    status: int, line: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for name in ("file", "mine/history.csv"):
        Path(name).touch()
    before = [*tmp_path.rglob("*")], files_of(cache)
    try:
        found = main(line.format(photos=photos, cache=cache).split())
    except SystemExit as end:  # argparse has said why
        found = end.code
    *_, last = (each for each in capsys.readouterr().err.splitlines() if not each.startswith("see "))
    assert found == status, last
    assert last.startswith(("tpucache", "python -m tpucache"))
    assert_telling(last.partition(": ")[2], said)
    assert ([*tmp_path.rglob("*")], files_of(cache)) == before


#: What selects no samples of a dataset of 150.
INDICES: list[Any] = [
    1.0, "3", True, np.float64(2), [0.0, 1.0], ["a"], [None], {1, 2}, np.array([1.7]), torch.tensor([1.0]),
    [[0], [1]], [True, False], np.zeros(151, bool), np.zeros((150, 1), bool), [150], [-151], [2**62],
    np.array([2**64 - 1], np.uint64), torch.ones(4, requires_grad=True), torch.ones(4, device="meta").long(),
    torch.ones(4).to_sparse(),
]  # fmt: skip
#: Values of arguments of CachedDataset, and what the message says.
ARGUMENTS: list[tuple[str, list[Any], str]] = [
    ("variant", [4, -1, "every", "Epoch", True, 1.0, "1", None], "variants"),
    ("indices", [*INDICES, [0, -1]], ""),
    ("in_memory", ["no", 1, None, "Auto"], "in_memory"),
]
WAYS: list[tuple[Callable[[CachedDataset, Any], object], list[Any], str]] = [
    (CachedDataset.__getitem__, [*INDICES, None], ""),
    (CachedDataset.select, [*INDICES, None], ""),
    *((lambda dataset, value, name=name: CachedDataset(dataset.directory, **{name: value}), values, said)
      for name, values, said in ARGUMENTS),
]  # fmt: skip


@pytest.mark.parametrize(("use", "values", "said"), WAYS)
def test_what_a_dataset_cannot_show_is_refused(
    cache: Path, use: Callable[[CachedDataset, Any], object], values: list[Any], said: str
) -> None:
    dataset = CachedDataset(cache)
    for value in values:
        with pytest.raises(UsageError) as caught:
            use(dataset, value)
        assert_telling(str(caught.value), said)
