"""How fast a data set is read from a URL, compared with LitData, MosaicML Streaming and WebDataset.

A server on this machine sends no faster than a link of a given bandwidth, and answers after its latency. In each round
everyone reads in a new process with an empty folder: an epoch, a second epoch, and, again from nothing, an epoch for a
device that takes five sixths of what the link brings. Of the cache with bands of frequencies, `1/2` reads what images
of half the side need. The peers get the records of our dct-zstd cache as plain bytes and decode nothing; `ranges` asks
for parts of a file and throws them away: that is the link.

With --picture only first epochs are read, over links of several bandwidths and latencies: of dct-zstd with `--bands 8`,
and of its records; the peers' files are of 16 MB then.
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

from scripts.bench.peers.listed_source import ListedSource
from scripts.bench.photos import BANDED, BANDS, KINDS, SIZE, make_once, make_up_photographs
from scripts.bench.picture import draw_stream
from scripts.bench.rounds import Contender, LeftOut, Track, race, ratio, read_whole
from scripts.bench.shaper import COUNTS
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_notes,
    as_text,
    machine,
    machine_line,
    parse_options,
    replace_part,
    write_files,
)
from scripts.commands import ROOT, CommandError, say
from scripts.environments import Environment
from tpucache import Recipe, build_cache
from tpucache.loading.reading.views import bands_for
from tpucache.store.cache import Cache

#: MB/s and milliseconds an answer.
LINKS: Final = ((150, 20), (1000, 5))
#: Those of the picture: several bandwidths at one latency, and several latencies at one bandwidth.
PICTURED: Final = ((50, 20), (150, 20), (500, 20), (150, 5), (150, 100))

_SPARE: Final = 1.2  # of the link's rate over that of the device
_IMAGES: Final = "*.jp*g"
_RECORDS: Final = "dct-zstd"  # whose records the peers get
_BANDED: Final = "dct-lz4-bands"
_BLOCKED: Final = "dct-zstd-bands-8"  # many records side by side, as is recommended for a URL: `warmup --bands 8`

# Torch is the one of this process, in which nothing computes here: each release is large.
_PINS: Final = ("torch==2.9.0", "torchvision==0.24.0")


def _environment(name: str, *packages: str) -> Environment:
    return Environment(f"stream-{name}", (packages,), constraints=_PINS, inherits=True)


_PEERS: Final = {
    "litdata": _environment("litdata", "litdata==0.2.76", "boto3"),
    "mds": _environment("mds", "mosaicml-streaming==0.13.0"),
    "webdataset": _environment("webdataset", "webdataset==1.0.2"),
}
_OURS: Final = ("raw", "dct-lz4", "dct-zstd", _BANDED, _BLOCKED)
_SHARDS: Final = (16, 64)  # MB of a peer's files: the faster one is taken


@dataclass(frozen=True, kw_only=True)
class Entry(Contender):
    """A contender, and what it reads below the server's folder."""

    place: str
    is_local: bool = False

    @property
    def reader(self) -> str:
        """Its name without the size of its files, as tables show it."""
        return self.name if self.name.startswith(("tpucache", "local")) else self.name.split()[0]

    @property
    def is_pictured(self) -> bool:
        """Whether it is in the picture, too."""
        return self.name in ("ranges", f"tpucache {_BLOCKED}") or self.name.endswith(f" {_SHARDS[0]}")


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
    chosen = [
        each for each in CONTENDERS if _is_chosen(each, options.only) and (each.is_pictured or not options.picture)
    ]
    kinds = {kind for kind in _OURS if any(each.place == f"cache-{kind}" for each in chosen)} | {_RECORDS}
    data = prepare(options.work, options.source, options.gigabytes, sorted(kinds))
    report: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "links": []}
    left_out: LeftOut = []
    track = Track(options.work)
    contenders = [_write(each, track, data) for each in track.admit(chosen, left_out)]
    for rate, latency in options.links or (PICTURED if options.picture else LINKS):
        rows = _race_on_a_link(track, data, contenders, rate, latency, options, left_out)
        report["links"].append({"rate": rate, "latency": latency, "rows": rows})
        say(f"{rate} MB/s, {latency} ms")
        print(as_text(to_rows(rows)), end="", flush=True)
    report |= {"versions": track.versions, "left_out": left_out}
    if options.picture:
        draw_stream(report, options.picture)
    page = options.page or options.markdown
    picture = os.path.relpath(options.picture, page.parent) if options.picture and page else str(options.picture or "")
    markdown = to_markdown(report, picture)
    write_files(options, report, markdown)
    if options.page:
        replace_part(options.page, "stream picture" if options.picture else "stream", markdown)


def _is_chosen(entry: Entry, only: list[str] | None) -> bool:
    return not only or entry.name == "ranges" or bool({entry.name, entry.name.split()[0]} & {*only})


def prepare(work: Path, source: Path | None, gigabytes: float, kinds: Sequence[str]) -> Path:
    """Make caches of some kinds, each of about this many GB, and the peers' records, unless they exist.

    Returns their folder.
    """
    source = source or make_up_photographs(work / "photos")
    data = work / f"stream-{source.name}-{gigabytes:g}"
    files = sorted(str(path.resolve()) for path in source.rglob(_IMAGES))
    for kind in kinds:
        make_once(data / f"cache-{kind}", functools.partial(_build, files, kind, gigabytes))
    if not (data / "labels.npy").exists():
        _export(data)
    return data


def _build(files: list[str], kind: str, gigabytes: float, folder: Path) -> None:
    """Build a cache of about this many GB from some photographs, repeating them as often as needed."""
    codec, quality = KINDS[_RECORDS if kind == _BLOCKED else BANDED.get(kind, kind)]
    bands = (8,) if kind == _BLOCKED else BANDS if kind in BANDED else None
    recipe = Recipe(size=SIZE, codec=codec, quality=quality, bands=bands)
    say(f"tpucache: building the {kind} cache")
    few, listed = folder.with_name("few"), folder.with_name("listed.json")
    shutil.rmtree(few, ignore_errors=True)
    listed.write_text(json.dumps(files[:256]))
    one = build_cache(ListedSource(listed), few, recipe, on_error="skip")
    times = max(1, round(gigabytes * 1e9 * one.samples / one.total_bytes / len(files)))
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
    track: Track,
    data: Path,
    entries: list[Entry],
    rate: float,
    latency: float,
    options: argparse.Namespace,
    left_out: LeftOut,
) -> list[dict[str, Any]]:
    """Return a row for each contender; of a peer's sizes of files the one with the faster first epoch."""
    turns: dict[str, Callable[[], dict[str, Any]]] = {}
    with _serving(data, rate, latency) as url:
        for entry in entries:
            turns[entry.name] = _Turn(track, data, entry, url, rate, is_first_only=options.picture is not None)
        results = race(turns, options.rounds, left_out)
    if not results.get("ranges"):
        raise CommandError("the link itself was not measured: see the log")
    best: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry.is_local and results.get(entry.name):
            row = _summarise(entry.name, results)
            if entry.reader not in best or row["first"]["rate"] > best[entry.reader]["first"]["rate"]:
                best[entry.reader] = row
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

    def __init__(
        self, track: Track, data: Path, entry: Entry, url: str, rate: float, *, is_first_only: bool = False
    ) -> None:
        self._is_first_only = is_first_only
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
        self._setting, self._samples = setting, samples
        self._device = rate * 1e6 / _SPARE / self._needed * samples

    def __call__(self) -> dict[str, Any]:
        with self._opened() as ask:
            first = ask("epoch")
            if self._is_first_only:
                return {"first": first}
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
        read_whole([self._data / self._entry.place])
        place = self._data / self._entry.place if self._entry.is_local else f"{self._url}/{self._entry.place}"
        setting = {**self._setting, "url": str(place), "folder": str(self._kept)}
        with contextlib.closing(self._track.start(self._entry, setting)) as worker:
            worker.ask("memory")

            def ask(command: str) -> dict[str, Any]:
                before, used = _sent(self._url), worker.cpu_seconds()
                words, _, argument = command.partition(" ")
                answer = worker.ask(words, argument, patience=300.0)
                read = _sent(self._url) - before
                answer |= {"bytes": read, "needed": read / self._needed, "rate": read / answer["seconds"] / 1e6}
                answer |= {"cpu_seconds": worker.cpu_seconds() - used}
                images = self._samples if self._entry.name == "ranges" else answer["images"]
                return answer | {"images_per_second": images / answer["seconds"]}

            yield ask
        shutil.rmtree(self._kept, ignore_errors=True)


def _sent(url: str) -> int:
    with urllib.request.urlopen(url + COUNTS, timeout=10) as answer:
        return int(json.load(answer)["bytes"])


def _summarise(name: str, results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of a contender's rounds; shares are those within a round."""
    turns, links, local = results[name], results["ranges"], results.get(name.replace("tpucache", "local"))
    row: dict[str, Any] = {"name": name}
    for epoch, figures in turns[0].items():
        row[epoch] = {figure: float(statistics.median(turn[epoch][figure] for turn in turns)) for figure in figures}
    row["share"] = ratio(_figures(turns, "first", "rate"), _figures(links, "first", "rate"))
    row["waited"] = row["of_local"] = None
    if "paced" in row:
        row["waited"] = statistics.median(turn["paced"]["waited_seconds"] / turn["paced"]["seconds"] for turn in turns)
    if name.startswith("tpucache") and local and "second" in row:
        row["of_local"] = ratio(
            _figures(turns, "second", "images_per_second"), _figures(local, "second", "images_per_second")
        )
    return row


def _figures(turns: list[dict[str, Any]], epoch: str, figure: str) -> list[float]:
    return [turn[epoch][figure] for turn in turns]


def to_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a link's table, its heading first."""
    table = [
        [
            "reader",
            "first batch, s",
            "after the loader was made",
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
        first, second = row["first"], row.get("second")
        if row["name"] == "ranges":
            table.append(
                ["ranges (the link)", "", "", f"{first['rate']:,.0f} MB/s", "", "", "", "", "", "", _cpu(first)]
            )
            continue
        table.append(
            [
                row["name"],
                f"{first['first_seconds']:.2f}",
                f"{first['first_seconds'] - first['loader_seconds']:.2f}",
                f"{row['share']:.2f}",
                f"{first['needed']:.2f}",
                f"{first['images_per_second']:,.0f}",
                f"{second['images_per_second']:,.0f}" if second else "",
                f"{row['of_local']:.2f}" if row["of_local"] else "",
                f"{second['needed']:.2f}" if second else "",
                f"{row['waited']:.1%}" if row["waited"] is not None else "",
                _cpu(first),
            ]
        )
    return table


def to_pictured_rows(links: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the picture's table, its heading first: images/s, and seconds to the first batch."""
    table = [["reader", *(f"{link['rate']} MB/s, {link['latency']} ms" for link in links)]]
    names = dict.fromkeys(row["name"] for link in links for row in link["rows"])
    for name in names:
        cells = []
        for link in links:
            found = next((row["first"] for row in link["rows"] if row["name"] == name), None)
            cells.append("" if found is None else f"{found['images_per_second']:,.0f}")
            if found is not None and name != "ranges":
                cells[-1] += f" ({found['first_seconds']:.2f} s)"
        table.append(["the link" if name == "ranges" else name, *cells])
    return table


def _cpu(epoch: dict[str, Any]) -> str:
    return f"{epoch['cpu_seconds'] / max(1, epoch['bytes']) * 1e9:.2f}"


def to_markdown(report: dict[str, Any], picture: str = "") -> str:
    """Return the tables in Markdown, what was measured and how, and the versions; `picture` is where theirs is."""
    parts = []

    def is_ours(name: str) -> bool:
        return name.startswith("tpucache")

    if picture:
        parts += [f"![Images a second in the first epoch, by bandwidth and by latency of the link]({picture})", ""]
        parts += [as_markdown(to_pictured_rows(report["links"]), is_bold=is_ours)]
    for link in report["links"] if not picture else ():
        table = as_markdown(to_rows(link["rows"]), is_bold=is_ours)
        parts += [f"{link['rate']} MB/s, {link['latency']} ms an answer:", "", table]
    rounds = report["rounds"]
    medians = f"Medians of {rounds} rounds" if rounds > 1 else "One round"
    parts += [f"{medians}. {machine_line(report['machine'])}.", "", *as_notes(report)]
    return "\n".join(parts) + "\n"


def _link(text: str) -> tuple[int, int]:
    rate, _, latency = text.partition(",")
    return int(rate), int(latency)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs; else some are made up")
    add_race_options(parser, "build/bench")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each cache, about (%(default)s)")
    parser.add_argument(
        "--links",
        type=_link,
        nargs="+",
        metavar="MBPS,MS",
        help="links, as 150,20 (that and 1000,5; of the picture, five)",
    )
    names = sorted({word for entry in CONTENDERS for word in (entry.name, entry.name.split()[0])})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of: {', '.join(names)}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="read first epochs only, and draw their rates")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables into a page, between their marks")
    return parse_options(parser, {"gigabytes": 0.05})


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(str(error))
