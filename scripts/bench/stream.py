"""How fast a data set is read from a URL, compared with LitData, MosaicML Streaming and WebDataset.

A server on this machine sends no faster than a link of a given bandwidth, and answers after its latency. In each round
everyone reads in a new process with an empty folder: an epoch, a second epoch, and, again from nothing, an epoch for a
device that takes five sixths of what the link brings. The peers get the records of our dct-zstd cache as plain bytes
and decode nothing. `the link` asks for parts of a file and throws them away; `local` caches are read from a folder.
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
from scripts.commands import ROOT, CommandError, say
from scripts.environments import Environment
from tpucache import Recipe, build_cache
from tpucache.store.cache import Cache

LINKS: Final = ((150, 20), (1000, 5))  # MB/s and milliseconds an answer
LINK: Final = "the link"
_SPARE: Final = 1.2  # of the link's rate over that of the device
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
    is_local: bool = False


def _peer(peer: str, *packages: str) -> Entry:
    environment = Environment(f"stream-{peer}", (packages,), constraints=_PINS, inherits=True)
    return Entry(name=peer, peer=peer, settings=({"workers": 2},), environment=environment, place=peer)


def _ours(kind: str, is_local: bool) -> Entry:
    name = f"{'local' if is_local else 'tpucache'} {kind}"
    return Entry(name=name, peer="tpucache", settings=({"threads": 2},), place=f"cache-{kind}", is_local=is_local)


CONTENDERS: Final = (
    Entry(name=LINK, peer="limits", place="records.bin"),
    *(_ours(kind, is_local) for kind in ("raw", "dct-lz4", "dct-zstd") for is_local in (False, True)),
    _peer("litdata", "litdata==0.2.76", "boto3"),
    _peer("mosaicml", "mosaicml-streaming==0.13.0"),
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
        turns = {entry.name: _Turn(track, data, entry, url, link[0]) for entry in entries}
        results = race(turns, rounds, left_out)
    if not results.get(LINK):
        raise CommandError("the link itself was not measured: see the log")
    return [_summarise(each.name, results) for each in entries if not each.is_local and results.get(each.name)]


@contextlib.contextmanager
def _serving(folder: Path, rate: float, latency: float) -> Iterator[str]:
    command = [sys.executable, "-m", "scripts.bench.shaper", str(folder), f"--rate={rate}", f"--latency={latency}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = server.stdout.readline().strip() if server.stdout else ""
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


class _Turn:
    """What a contender does in a round."""

    def __init__(self, track: Track, data: Path, entry: Entry, url: str, rate: float) -> None:
        self._track, self._data, self._entry, self._url = track, data, entry, url
        starts = np.load(data / "starts.npy")
        self._samples, self._needed = len(starts) - 1, int(starts[-1])  # bytes of an epoch
        self._setting = dict(entry.settings[0])
        if entry.name == LINK:
            self._setting["bytes"] = self._needed
        elif entry.peer == "tpucache":
            cache = Cache.open(data / entry.place)
            self._samples = cache.manifest.samples
            self._needed = int(cache.index.read_all()["length"].astype(np.int64).sum())
        elif (shards := data / entry.place / "shards").exists():
            self._setting["shards"] = int(shards.read_text())
        self._device = rate * 1e6 / _SPARE / self._needed * self._samples

    def __call__(self) -> dict[str, Any]:
        with self._opened() as ask:
            first = ask("epoch")
            second = ask("epoch") if self._entry.name != LINK else first
        if self._entry.name == LINK or self._entry.is_local:
            return {"first": first, "second": second, "paced": first}
        with self._opened() as ask:
            return {"first": first, "second": second, "paced": ask(f"paced {self._device}")}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[str], dict[str, Any]]]:
        kept, source = self._data / "kept", self._data / self._entry.place
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        os.sync()
        read_whole([source])
        place = str(source) if self._entry.is_local else f"{self._url}/{self._entry.place}"
        setting = {**self._setting, "url": place, "folder": str(kept)}
        with contextlib.closing(self._track.start(self._entry, setting)) as worker:
            worker.ask("memory")

            def ask(command: str) -> dict[str, Any]:
                before = _sent(self._url)
                words, _, argument = command.partition(" ")
                answer = worker.ask(words, argument, patience=_PATIENCE)
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
    """Return the medians of a contender's rounds; shares are those within a round."""
    turns = results[name]

    def figures(reader: str, epoch: str, figure: str) -> list[float]:
        return [turn[epoch][figure] for turn in results.get(reader, ())]

    row: dict[str, Any] = {"name": name}
    for epoch, found in turns[0].items():
        row[epoch] = {figure: statistics.median(figures(name, epoch, figure)) for figure in found}
    row["share"] = ratio(figures(name, "first", "rate"), figures(LINK, "first", "rate"))
    local = figures(name.replace("tpucache", "local"), "second", "images_per_second")
    row["of_local"] = ratio(figures(name, "second", "images_per_second"), local) if "tpucache" in name else None
    row["waited"] = statistics.median(turn["paced"]["waited_seconds"] / turn["paced"]["seconds"] for turn in turns)
    return row


def to_rows(rows: Sequence[dict[str, Any]]) -> Rows:
    """Return the rows of a link's table, its heading first."""
    heading = [
        "reader",
        "first batch, s",
        "after the loader was made",
        "share of the link",
        "read for each byte needed",
    ]
    table = [[*heading, "images/s", "2nd epoch, images/s", "of a local cache", "read in the 2nd", "waited"]]
    for row in rows:
        first, second = row["first"], row["second"]
        if row["name"] == LINK:
            table.append([LINK, "", "", f"{first['rate']:,.0f} MB/s", *[""] * 6])
            continue
        delays = first["first_seconds"], first["first_seconds"] - first["loader_seconds"], row["share"], first["needed"]
        rates = (f"{epoch['images_per_second']:,.0f}" for epoch in (first, second))
        local = f"{row['of_local']:.2f}" if row["of_local"] else ""
        rest = [local, f"{second['needed']:.2f}", f"{row['waited']:.1%}"]
        table.append([row["name"], *(f"{each:.2f}" for each in delays), *rates, *rest])
    return table


def _link(text: str) -> tuple[int, int]:
    rate, _, latency = text.partition(",")
    return int(rate), int(latency)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs; else some are made up")
    add_race_options(parser, "build/bench")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each cache, about (%(default)s)")
    parser.add_argument(
        "--links", type=_link, nargs="+", metavar="MBPS,MS", default=LINKS, help="links (150,20 and 1000,5)"
    )
    add_choice(parser, CONTENDERS)
    return parse_options(parser, {"gigabytes": 0.01})
