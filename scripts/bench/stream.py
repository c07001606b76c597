"""How fast a data set is read from a URL, compared with LitData and WebDataset.

A server on this machine sends no faster than a link of a given bandwidth, and answers after its latency. In each round
everyone reads two epochs in a new process with an empty folder. The peers get the records of our dct-zstd cache as
plain bytes and decode nothing. `the link` asks for parts of a file and throws them away.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.bench.photos import KINDS, SIZE, link_photographs, make_once, make_up_photographs
from scripts.bench.rounds import Contender, LeftOut, Track, add_choice, race, ratio, read_whole
from scripts.bench.shaper import COUNTS
from scripts.bench.table import Rows, add_race_options, parse_options, peer_notes, show
from scripts.commands import ROOT, CommandError, make_parser, say
from scripts.environments import Environment
from tpucache import Recipe, build_cache
from tpucache.store.cache import Cache

LINKS: Final = ((150, 20), (1000, 5))  # MB/s and milliseconds an answer
LINK: Final = "the link"
_RECORDS: Final = "dct-zstd"  # whose records the peers get
_FORMATS: Final = (".jpg", ".jpeg", ".png")
# Torch is the one of this process, in which nothing computes here: each release is large.
_PINS: Final = ("torch==2.9.0", "torchvision==0.24.0")
_PATIENCE: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Entry(Contender):
    """A contender, and what it reads below the server's folder."""

    role: str = "stream"
    place: str


def _peer(peer: str, *packages: str) -> Entry:
    environment = Environment(f"stream-{peer}", (packages,), constraints=_PINS, inherits=True)
    return Entry(name=peer, peer=peer, setting={"workers": 2}, environment=environment, place=peer)


def _ours(kind: str) -> Entry:
    return Entry(name=f"tpucache {kind}", peer="tpucache", setting={"threads": 2}, place=f"cache-{kind}")


CONTENDERS: Final = (
    Entry(name=LINK, peer="limits", place="records.bin"),
    *map(_ours, ("raw", "dct-lz4", "dct-zstd")),
    _peer("litdata", "litdata==0.2.76", "boto3"),
    _peer("webdataset", "webdataset==1.0.2"),
)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    chosen = [each for each in CONTENDERS if not options.only or {each.name, each.peer} & {*options.only, LINK}]
    kinds = {each.place.removeprefix("cache-") for each in chosen if each.peer == "tpucache"} | {_RECORDS}
    data = prepare(options.work, options.source, options.gigabytes, sorted(kinds))
    left_out: LeftOut = []
    track = Track(options.work)
    entries = track.admit(chosen, left_out)
    for entry in entries:
        if entry.environment:
            make_once(data / entry.place, functools.partial(_write, entry, track, data))
    links, tables = [], []
    for rate, latency in options.links:
        rows = _race_on_a_link(track, data, entries, (rate, latency), options.rounds, left_out)
        links.append({"rate": rate, "latency": latency, "rows": rows})
        tables.append((f"{rate} MB/s, {latency} ms an answer:", to_rows(rows)))
        say(f"{rate} MB/s, {latency} ms: done")
    notes = [f"medians of {options.rounds} rounds.", *peer_notes(track.versions, left_out)]
    show(options, {"links": links, "versions": track.versions}, tables, notes)


def prepare(work: Path, source: Path | None, gigabytes: float, kinds: Sequence[str]) -> Path:
    """Make caches of some kinds, each of about this many GB, and the peers' records; return their folder."""
    source = source or make_up_photographs(work / "photos")
    data = work / f"stream-{source.name}-{gigabytes:g}"
    files = sorted(path.resolve() for path in source.rglob("*") if path.suffix.lower() in _FORMATS)
    for kind in kinds:
        make_once(data / f"cache-{kind}", functools.partial(_build, files, kind, gigabytes))
    if not (data / "labels.npy").exists():
        _export(data)
    return data


def _build(files: Sequence[Path], kind: str, gigabytes: float, folder: Path) -> None:
    """Build a cache of about this many GB from some photographs, repeating them as often as needed."""
    codec, quality = KINDS[kind]
    recipe = Recipe(size=SIZE, codec=codec, quality=quality)
    say(f"tpucache: building the {kind} cache")
    few = folder.with_name("few")
    one = build_cache(link_photographs(files, 256, few / "photographs"), few / "cache", recipe, on_error="skip")
    count = round(gigabytes * 1e9 * one.samples / one.total_bytes)
    build_cache(link_photographs(files, count, few / f"{count}-photographs"), folder, recipe, on_error="skip")
    shutil.rmtree(few)


def _export(data: Path) -> None:
    """Write the records of a cache one after another, for the peers to make their formats of."""
    cache = Cache.open(data / f"cache-{_RECORDS}")
    starts = [0]
    with (data / "records.bin").open("wb") as file:
        for row in cache.index.read_all():
            starts.append(starts[-1] + file.write(cache.reader.read(row)))
    np.save(data / "starts.npy", np.array(starts, np.int64))
    np.save(data / "labels.npy", np.zeros(cache.manifest.samples, np.int64))


def _write(entry: Entry, track: Track, data: Path, folder: Path) -> None:
    """Have a peer write its format."""
    say(f"{entry.name}: writing its format")
    setting = {"data": str(data), "folder": str(folder)}
    with contextlib.closing(track.start(entry, setting, "write", entry.name)) as worker:
        worker.ask("write")


def _race_on_a_link(
    track: Track, data: Path, entries: Sequence[Entry], link: tuple[int, int], rounds: int, left_out: LeftOut
) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    with _serving(data, *link) as url:
        turns = {entry.name: _Turn(track, data, entry, url) for entry in entries}
        results = race(turns, rounds, left_out)
    if not results.get(LINK):
        raise CommandError("the link itself was not measured: see the log")
    return [_summarise(each.name, results) for each in entries if results.get(each.name)]


@contextlib.contextmanager
def _serving(folder: Path, rate: float, latency: float) -> Iterator[str]:
    command = [sys.executable, "-m", "scripts.bench", "shaper", str(folder), f"--rate={rate}", f"--latency={latency}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = server.stdout.readline().strip() if server.stdout else ""
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


class _Turn:
    """What a contender does in a round."""

    def __init__(self, track: Track, data: Path, entry: Entry, url: str) -> None:
        self._track, self._data, self._entry, self._url = track, data, entry, url
        starts = np.load(data / "starts.npy")
        self._samples, self._needed = len(starts) - 1, int(starts[-1])  # bytes of an epoch
        self._setting = dict(entry.setting)
        if entry.name == LINK:
            self._setting["bytes"] = self._needed
        elif entry.peer == "tpucache":
            cache = Cache.open(data / entry.place)
            self._samples = cache.manifest.samples
            self._needed = int(cache.index.read_all()["length"].astype(np.int64).sum())
        elif (shards := data / entry.place / "shards").exists():
            self._setting["shards"] = int(shards.read_text())

    def __call__(self) -> dict[str, Any]:
        with self._opened() as ask:
            return {"first": ask(), "second": {} if self._entry.name == LINK else ask()}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[], dict[str, Any]]]:
        kept, source = self._data / "kept", self._data / self._entry.place
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        os.sync()
        read_whole([source])
        setting = {**self._setting, "url": f"{self._url}/{self._entry.place}", "folder": str(kept)}
        with contextlib.closing(self._track.start(self._entry, setting)) as worker:
            worker.ask("memory")

            def ask() -> dict[str, Any]:
                before = _sent(self._url)
                answer = worker.ask("epoch", patience=_PATIENCE)
                read, seconds = _sent(self._url) - before, answer["seconds"]
                images = self._samples if self._entry.name == LINK else answer["images"]
                rates = {"rate": read / seconds / 1e6, "images_per_second": images / seconds}
                return answer | rates | {"needed": read / self._needed}

            yield ask
        shutil.rmtree(kept, ignore_errors=True)


def _sent(url: str) -> int:
    with urllib.request.urlopen(url + COUNTS, timeout=10) as answer:
        return int(json.load(answer)["bytes"])


def _summarise(name: str, results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of a contender's rounds; the share of the link is that within a round."""
    turns = results[name]
    row: dict[str, Any] = {"name": name}
    for epoch, found in turns[0].items():
        row[epoch] = {figure: statistics.median(turn[epoch][figure] for turn in turns) for figure in found}
    row["share"] = ratio(*([turn["first"]["rate"] for turn in each] for each in (turns, results[LINK])))
    return row


def to_rows(rows: Sequence[dict[str, Any]]) -> Rows:
    """Return the rows of a link's table, its heading first."""
    heading = ["reader", "first batch, s", "MB/s", "share of the link", "read for each byte needed", "images/s"]
    table = [[*heading, "2nd epoch, images/s", "read in the 2nd"]]
    for row in rows:
        first, second = row["first"], row["second"]
        cells = (
            f"{first['first_seconds']:.2f}",
            f"{first['rate']:,.0f}",
            f"{row['share']:.2f}",
            f"{first['needed']:.2f}",
        )
        rates = f"{first['images_per_second']:,.0f}", f"{second.get('images_per_second', 0):,.0f}"
        table.append([row["name"], *cells, *rates, f"{second.get('needed', 0):.2f}"])
    return table


def _link(text: str) -> tuple[int, int]:
    rate, _, latency = text.partition(",")
    return int(rate), int(latency)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--source", type=Path, help="a folder of photographs; else some are made up")
    add_race_options(parser, "build/bench")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each cache, about (%(default)s)")
    parser.add_argument(
        "--links", type=_link, nargs="+", metavar="MBPS,MS", default=LINKS, help="links (150,20 and 1000,5)"
    )
    add_choice(parser, CONTENDERS)
    return parse_options(parser, {"gigabytes": 0.01})
