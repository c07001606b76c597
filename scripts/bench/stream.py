"""How fast a data set is read from a URL, beside LitData, MosaicML Streaming and WebDataset.

A server on this machine sends no faster than a link of a given bandwidth, and answers after its latency. In each round
everyone reads in a new process with an empty folder: an epoch, a second epoch, and, again from nothing, an epoch for a
device that takes five sixths of what the link brings. Of the cache with bands of frequencies, `1/2` reads what images
of half the side need. The peers get the records of our dct-zstd cache as plain bytes and decode nothing; `ranges` asks
for parts of a file and throws them away: that is the link.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.bench.peers.listed_source import ListedSource
from scripts.bench.photos import BANDED, BANDS, KINDS, SIZE, make_once, make_up_photographs
from scripts.bench.race import Contender, LeftOut, Track, race
from scripts.bench.shaper import COUNTS
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_notes,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from scripts.commands import ROOT, CommandError, say
from scripts.environments import Environment
from tpucache import Recipe, build_cache
from tpucache.loading.reading.views import bands_for
from tpucache.store.cache import Cache

#: MB/s and milliseconds an answer.
LINKS: Final = ((150, 20), (1000, 5))

_SPARE: Final = 1.2  # of the link's rate over that of the device
_GIGABYTES: Final = 2.0  # of each kind of cache, about
_IMAGES: Final = "*.jp*g"
_RECORDS: Final = "dct-zstd"  # whose records the peers get
_BANDED: Final = "dct-lz4-bands"

# Torch is the one of this process, in which nothing computes here: each release is large.
_PINS: Final = ("torch==2.9.0", "torchvision==0.24.0")


def _environment(name: str, *packages: str) -> Environment:
    return Environment(f"stream-{name}", (packages,), constraints=_PINS, inherits=True)


_PEERS: Final = {
    "litdata": _environment("litdata", "litdata==0.2.76", "boto3"),
    "mds": _environment("mds", "mosaicml-streaming==0.13.0"),
    "webdataset": _environment("webdataset", "webdataset==1.0.2"),
}
_OURS: Final = ("raw", "dct-lz4", "dct-zstd", _BANDED)
_SHARDS: Final = (16, 64)  # MB of a peer's files: the faster one is taken


@dataclass(frozen=True, kw_only=True)
class Entry(Contender):
    """A contender, and what it reads below the server's folder."""

    place: str
    is_local: bool = False


CONTENDERS: Final = (
    Entry("ranges", "stream.ranges", place="records.bin"),
    Entry(f"tpucache {_BANDED} 1/2", "stream.tpucache", ({"threads": 2, "part": 2},), place=f"cache-{_BANDED}"),
    Entry(
        f"local {_BANDED} 1/2", "stream.tpucache", ({"threads": 2, "part": 2},), place=f"cache-{_BANDED}", is_local=True
    ),
    *(Entry(f"tpucache {kind}", "stream.tpucache", ({"threads": 2},), place=f"cache-{kind}") for kind in _OURS),
    *(
        Entry(f"local {kind}", "stream.tpucache", ({"threads": 2},), place=f"cache-{kind}", is_local=True)
        for kind in _OURS
    ),
    *(
        Entry(
            f"{peer} {shard}",
            f"stream.{peer}",
            ({"workers": 2, "shard": shard},),
            environment,
            place=f"{peer}-{shard}",
        )
        for peer, environment in _PEERS.items()
        for shard in _SHARDS
    ),
)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    data = prepare(options.work, options.source)
    report: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "links": []}
    left_out: LeftOut = []
    track = Track(options.work)
    chosen = [each for each in CONTENDERS if not options.only or each.name.split()[0] in {*options.only, "ranges"}]
    contenders = [_write(each, track, data) for each in track.admit(chosen, left_out)]
    for rate, latency in options.links:
        rows = _race_on_a_link(track, data, contenders, rate, latency, options.rounds, left_out)
        report["links"].append({"rate": rate, "latency": latency, "rows": rows})
        say(f"{rate} MB/s, {latency} ms")
        print(as_text(to_rows(rows)), end="", flush=True)
    report |= {"versions": track.versions, "left_out": left_out}
    write_files(options, report, to_markdown(report))


def prepare(work: Path, source: Path | None) -> Path:
    """Make the caches and the peers' records, unless they are there; return their folder."""
    source = source or make_up_photographs(work / "photos")
    data = work / f"stream-{source.name}"
    files = sorted(str(path.resolve()) for path in source.rglob(_IMAGES))
    for kind in _OURS:
        make_once(data / f"cache-{kind}", functools.partial(_build, files, kind))
    if not (data / "labels.npy").exists():
        _export(data)
    return data


def _build(files: list[str], kind: str, folder: Path) -> None:
    """Build a cache of about _GIGABYTES out of some photographs, each as often as that takes."""
    codec, quality = KINDS[BANDED.get(kind, kind)]
    recipe = Recipe(size=SIZE, codec=codec, quality=quality, bands=BANDS if kind in BANDED else None)
    say(f"tpucache: building the {kind} cache")
    few, listed = folder.with_name("few"), folder.with_name("listed.json")
    shutil.rmtree(few, ignore_errors=True)
    listed.write_text(json.dumps(files[:256]))
    one = build_cache(ListedSource(listed), few, recipe, on_error="skip")
    times = max(1, round(_GIGABYTES * 1e9 * one.samples / one.total_bytes / len(files)))
    listed.write_text(json.dumps(files * times))
    folder.rmdir()
    build_cache(ListedSource(listed), folder, recipe, on_error="skip")
    shutil.rmtree(few)


def _export(data: Path) -> None:
    """Write the records of a cache one after another, for the peers to make their formats of."""
    cache = Cache.open(data / f"cache-{_RECORDS}")
    starts = [0]
    with (data / "records.bin").open("wb") as file:
        for row in cache.index.read_all():
            starts.append(starts[-1] + file.write(cache.reader.read(row)))
    np.save(data / "starts.npy", np.array(starts, np.int64))
    labels = cache.samples.labels  # none where photographs of several folders are listed together
    np.save(data / "labels.npy", np.zeros(cache.manifest.samples, np.int64) if labels is None else np.asarray(labels))


def _write(entry: Entry, track: Track, data: Path) -> Entry:
    """Have a peer write its format, unless it is there."""
    if entry.environment is None:
        return entry

    def write(folder: Path) -> None:
        say(f"{entry.name}: writing its format")
        setting = {"data": str(data), "folder": str(folder), "shard": entry.settings[0]["shard"]}
        with contextlib.closing(track.start(entry, setting, "write", entry.name)) as worker:
            worker.ask("write")

    make_once(data / entry.place, write)
    return entry


def _race_on_a_link(
    track: Track, data: Path, entries: list[Entry], rate: float, latency: float, rounds: int, left_out: LeftOut
) -> list[dict[str, Any]]:
    """Return a row for each contender; of a peer's sizes of files the one with the faster first epoch."""
    turns: dict[str, Callable[[], dict[str, Any]]] = {}
    with _serving(data, rate, latency) as url:
        for entry in entries:
            turns[entry.name] = _Turn(track, data, entry, url, rate)
        results = race(turns, rounds, left_out)
    link = statistics.median(turn["first"]["rate"] for turn in results["ranges"])
    rows = [_summarise(name, found, link, results) for name, found in results.items() if not name.startswith("local")]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        peer = row["name"] if row["name"].startswith("tpucache") else row["name"].split()[0]
        if peer not in best or row["first"]["rate"] > best[peer]["first"]["rate"]:
            best[peer] = row
    return list(best.values())


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
        self._kept = data / "kept"
        starts = np.load(data / "starts.npy")
        samples, self._needed = len(starts) - 1, int(starts[-1])  # bytes of an epoch
        setting = dict(entry.settings[0])
        setting.pop("shard", None)
        if entry.name == "ranges":
            setting["bytes"] = self._needed
        elif entry.name.startswith(("tpucache", "local")):
            cache = Cache.open(data / entry.place)
            samples, bands = cache.manifest.samples, len(cache.manifest.layouts)
            read = bands if "part" not in setting else bands_for(cache.manifest, SIZE // setting["part"])
            lengths = cache.index.read_all()["length"].astype(np.int64).reshape(bands, -1)
            self._needed = int(lengths[:read].sum())
        elif (shards := data / entry.place / "shards").exists():
            setting["shards"] = int(shards.read_text())
        self._setting = setting
        self._device = rate * 1e6 / _SPARE / self._needed * samples

    def __call__(self) -> dict[str, Any]:
        with self._opened() as ask:
            first = ask("epoch")
            second = ask("epoch") if self._entry.name != "ranges" else first
        if self._entry.name == "ranges" or self._entry.is_local:
            return {"first": first, "second": second, "paced": first}
        with self._opened() as ask:
            paced = ask(f"paced {self._device}")
        return {"first": first, "second": second, "paced": paced}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[str], dict[str, Any]]]:
        shutil.rmtree(self._kept, ignore_errors=True)
        self._kept.mkdir()
        os.sync()
        place = self._data / self._entry.place if self._entry.is_local else f"{self._url}/{self._entry.place}"
        setting = {**self._setting, "url": str(place), "folder": str(self._kept)}
        with contextlib.closing(self._track.start(self._entry, setting)) as worker:

            def ask(command: str) -> dict[str, Any]:
                before, used = _sent(self._url), worker.cpu_seconds()
                words, _, argument = command.partition(" ")
                answer = worker.ask(words, argument, patience=300.0)
                read = _sent(self._url) - before
                answer |= {"bytes": read, "needed": read / self._needed, "rate": read / answer["seconds"] / 1e6}
                answer |= {"cpu_seconds": worker.cpu_seconds() - used}
                return answer | {"images_per_second": answer["images"] / answer["seconds"]}

            yield ask
        shutil.rmtree(self._kept, ignore_errors=True)


def _sent(url: str) -> int:
    with urllib.request.urlopen(url + COUNTS, timeout=10) as answer:
        return int(json.load(answer)["bytes"])


def _summarise(
    name: str, turns: list[dict[str, Any]], link: float, results: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the medians of a contender's rounds."""

    def middle(epoch: str, figure: str) -> float:
        return float(statistics.median(turn[epoch][figure] for turn in turns))

    row: dict[str, Any] = {"name": name}
    for epoch in ("first", "second", "paced"):
        row[epoch] = {figure: middle(epoch, figure) for figure in turns[0][epoch]}
    row["share"] = row["first"]["rate"] / link
    row["waited"] = statistics.median(turn["paced"]["waited_seconds"] / turn["paced"]["seconds"] for turn in turns)
    local = results.get(name.replace("tpucache", "local")) if name.startswith("tpucache") else None
    row["of_local"] = (
        statistics.median(
            turn["second"]["images_per_second"] / other["second"]["images_per_second"]
            for turn, other in zip(turns, local, strict=True)
        )
        if local
        else None
    )
    return row


def to_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a link's table, its heading first."""
    table = [
        [
            "reader",
            "first batch, s",
            "share of the link",
            "read for each byte needed",
            "images/s",
            "2nd epoch, images/s",
            "of a local cache",
            "read in the 2nd",
            "waited",
            "CPU s a GB",
        ]
    ]
    for row in rows:
        first, second = row["first"], row["second"]
        if row["name"] == "ranges":
            table.append(["ranges (the link)", "", f"{first['rate']:,.0f} MB/s", "", "", "", "", "", "", _cpu(first)])
            continue
        table.append(
            [
                row["name"],
                f"{first['first_seconds']:.2f}",
                f"{row['share']:.2f}",
                f"{first['needed']:.2f}",
                f"{first['images_per_second']:,.0f}",
                f"{second['images_per_second']:,.0f}",
                f"{row['of_local']:.2f}" if row["of_local"] else "",
                f"{second['needed']:.2f}",
                f"{row['waited']:.1%}",
                _cpu(first),
            ]
        )
    return table


def _cpu(epoch: dict[str, Any]) -> str:
    return f"{epoch['cpu_seconds'] / max(1, epoch['bytes']) * 1e9:.2f}"


def to_markdown(report: dict[str, Any]) -> str:
    """Return the tables in Markdown, what was measured and how, and the versions."""
    parts = []
    for link in report["links"]:
        table = as_markdown(to_rows(link["rows"]), is_bold=lambda name: name.startswith("tpucache"))
        parts += [f"{link['rate']} MB/s, {link['latency']} ms an answer:", "", table]
    parts += [f"Medians of {report['rounds']} rounds. {machine_line(report['machine'])}.", "", *as_notes(report)]
    return "\n".join(parts) + "\n"


def _link(text: str) -> tuple[int, int]:
    rate, _, latency = text.partition(",")
    return int(rate), int(latency)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs; else some are made up")
    add_race_options(parser, "build/bench")
    parser.add_argument(
        "--links", type=_link, nargs="+", default=LINKS, metavar="MBPS,MS", help="links, as 150,20 (that and 1000,5)"
    )
    names = sorted({entry.name.split()[0] for entry in CONTENDERS})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of: {', '.join(names)}")
    return parse_options(parser)


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(str(error))
