"""What versions of a cache cost: bytes sent for a change, the rate of reading, and the time to open one of 200.

    python -m scripts.bench versions
    python -m scripts.bench versions --images 400 --size 32 --versions 20 --rounds 3

A cache is made of photographs that are made up, and sent to a folder, to a bucket (moto's server on this machine) and
to the stand-in for Kaggle (scripts/kaggle_server.py); what is not installed is left out. Then 1 % of samples are added,
1 % deleted and all labels changed, and the cache is sent again: the first rows say which share of the pictures' bytes
is sent, and how much else. At Kaggle that is an add-on, which is mounted with the first dataset and joined with it.
Each copy is verified, and its first epoch compared with the cache's. Then the cache, and the one joined at Kaggle, are
read in turns with a fresh one of the same photographs. Last, `--versions` versions are made of the fresh one, half of
them by deleting a sample and half by another column, and opened in turns with a cache of one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from scripts.bench.table import as_markdown, as_text, machine, machine_line
from scripts.commands import CommandError, say
from scripts.kaggle_server import KaggleServer
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache, verify_cache
from tpucache.loading.find import find_version
from tpucache.publish.addition import plan_addition, send_addition
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import Manifest
from tpucache.store.remote.draft import Draft, in_memory, of_file
from tpucache.store.remote.kaggle import KaggleDataset
from tpucache.store.remote.url_folder import Remote
from tpucache.warmup import TableOptions, delete_samples, relabel_cache, set_columns

_CLASSES: Final = 10
_DATASET: Final = "ann/made-up-photographs"
_KEYS: Final = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
_OPENINGS: Final = 20  # a turn
_PATIENCE: Final = 60.0


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="photographs in the cache (%(default)s)")
    parser.add_argument("--size", type=int, default=96, help="their height and width in pixels (%(default)s)")
    parser.add_argument("--codec", default="jpeg", help="of the cache (%(default)s)")
    parser.add_argument("--versions", type=int, default=200, help="how many one cache gets in the end (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="medians are over these (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpucache-versions-") as folder:
        found = measure(Path(folder), options)
    rows = [
        ["what", "figure", "bound"],
        *(
            [f"pictures sent to {place}, of all", f"{100 * sent['share']:.2f} %", "1.5 %"]
            for place, sent in found["sent"].items()
        ),
        *([f"all else sent to {place}", f"{sent['other'] / 1e6:.2f} MB", ""] for place, sent in found["sent"].items()),
        *(
            [f"rate of reading {what}, of a fresh cache's", f"{rate:.3f}", "0.97"]
            for what, rate in found["rate"].items()
        ),
        [f"opening one of {found['versions']} versions, of one's", f"{found['opening']:.2f}", "1.20"],
    ]
    say(as_text(rows))
    say(as_markdown(rows))
    say(machine_line(found["machine"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures. Raises CommandError where a copy is not what it should be."""
    source, cache, recipe = folder / "photos", folder / "cache", Recipe(size=options.size, codec=options.codec)
    say(f"versions: {options.images:,} photographs of {options.size}x{options.size}")
    draw(source, range(options.images), options.size)
    build_cache(source, cache, recipe)
    few = max(1, options.images // 100)
    with contextlib.ExitStack() as stack:
        places = {"a folder": str(folder / "there")}
        with contextlib.suppress(CommandError):
            places["S3"] = stack.enter_context(serve_bucket())
        for place in places.values():
            push_cache(cache, place)
        kaggle = stack.enter_context(KaggleServer().running()) if find_spec("kagglesdk") else None
        if kaggle is None:
            say("versions: kagglesdk is not installed: Kaggle is left out")
        else:
            create_dataset(kaggle, cache, folder / "journal.json")
        pictures = sum(path.stat().st_size for path in cache.glob("*.lmdb"))
        draw(source, range(options.images, options.images + few), options.size)
        build_cache(source, cache, recipe)
        gone = CachedDataset(cache).paths[:: options.images // few][:few]
        delete_samples(cache, paths=gone)
        change_labels(cache, folder / "labels.csv")
        sent = {}
        for name, place in places.items():
            with counting() as bytes_sent:
                push_cache(cache, place)
            sent[name] = shares(bytes_sent, pictures)
            fetch_cache(place, folder / "fetched")
            check(folder / "fetched", cache)
            shutil.rmtree(folder / "fetched")
        read = {"the cache": cache}
        if kaggle is not None:
            sent["Kaggle"] = shares(send_new(kaggle, cache), pictures)
            read["the one joined at Kaggle"] = mount(kaggle, folder / "mounted", Manifest.load(cache).number)
            check(read["the one joined at Kaggle"], cache)
    for path in gone:
        (source / path).unlink()
    fresh = folder / "fresh"
    build_cache(source, fresh, recipe)
    rate = reading(read, fresh, options.rounds)
    opening = opened(folder, fresh, options)
    here = machine()
    return {"sent": sent, "rate": rate, "opening": opening, "versions": options.versions, "machine": here}


def shares(sent: Mapping[str, int], pictures: int) -> dict[str, float]:
    """Return the bytes that were sent, given those of each file: of pictures, as a share of all pictures', and else."""
    of_pictures = sum(size for file, size in sent.items() if file.endswith(".lmdb"))
    return {"pictures": of_pictures, "share": of_pictures / pictures, "other": sum(sent.values()) - of_pictures}


def create_dataset(server: KaggleServer, cache: Path, journal: Path) -> None:
    """Send a whole cache as a new dataset, by the calls that `publish` makes."""
    manifest = Manifest.load(cache)
    with as_user(server), contextlib.closing(KaggleDataset(_DATASET)) as dataset:
        draft = Draft(dataset, journal)
        contents = {entry.name: of_file(cache, entry) for entry in manifest.files}
        contents[MANIFEST_NAME] = in_memory(manifest.text.encode())
        for name, content in contents.items():
            draft.send(name, content)
        draft.commit(contents, _DATASET.partition("/")[2], "", _PATIENCE)


def send_new(server: KaggleServer, cache: Path) -> dict[str, int]:
    """Publish what the dataset lacks as an add-on; return the bytes of its files, as they arrived."""
    metadata = Metadata(_DATASET, "Made-up photographs", "CC0-1.0")
    before = server.received
    with as_user(server):
        addition = plan_addition(cache, metadata, "1 % new, 1 % deleted, other labels")
        send_addition(addition, metadata, PublishOptions())
    arrived = {name: len(data) for name, data in server.files(addition.dataset_id).items()}
    if sum(arrived.values()) != server.received - before:
        raise CommandError(f"{server.received - before:,} bytes were sent for an add-on of {sum(arrived.values()):,}")
    return arrived


def mount(server: KaggleServer, folder: Path, number: int) -> Path:
    """Write all datasets as Kaggle mounts them, and return the folder that joins one version of the cache."""
    for dataset_id in server.datasets:
        place = folder / "datasets" / dataset_id
        place.mkdir(parents=True)
        for name, data in server.files(dataset_id).items():
            (place / name).write_bytes(data)
    os.environ["TPUCACHE_DIR"] = str(folder / "links")
    return find_version(f"kaggle:{_DATASET}", number, [folder / "datasets"])


@contextlib.contextmanager
def as_user(server: KaggleServer) -> Iterator[None]:
    """Go to the stand-in, with the key of its user, meanwhile."""
    before = dict(os.environ)
    os.environ.update(server.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def draw(source: Path, numbers: range, size: int) -> None:
    """Write pictures with detail at several scales, in classes by turns."""
    for number in numbers:
        rng = np.random.default_rng(number)
        whole = np.zeros((size, size, 3))
        for cells, spread in ((3, 70), (12, 35), (size, 8)):
            points = rng.normal(0, spread, (min(cells, size), min(cells, size), 3))
            part = Image.fromarray(np.clip(points + 128, 0, 255).astype(np.uint8)).resize((size, size))
            whole += np.asarray(part, np.float64) - 128
        path = source / f"class {number % _CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(whole + 128, 0, 255).astype(np.uint8)).save(path, quality=90)


def change_labels(cache: Path, table: Path) -> None:
    """Give every sample another class."""
    rows = [f"{path},kind {number % 7}" for number, path in enumerate(CachedDataset(cache).paths)]
    table.write_text("\n".join(["path,kind", *rows]) + "\n")
    relabel_cache(cache, table, TableOptions(label_cols=("kind",)))


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the bytes that are sent to any place meanwhile, by the names of their files."""
    counted: Counter[str] = Counter()
    write, put = Remote.write, Remote.put

    def counted_write(self: Remote, name: str, source: Path, advance: Callable[[int], None]) -> None:
        counted[name] += source.stat().st_size
        write(self, name, source, advance)

    def counted_put(self: Remote, name: str, data: bytes) -> None:
        counted[name] += len(data)
        put(self, name, data)

    Remote.write, Remote.put = counted_write, counted_put  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Remote.write, Remote.put = write, put  # type: ignore[method-assign]


@contextlib.contextmanager
def serve_bucket() -> Iterator[str]:
    """Run moto's server, and give the URL of a folder in a bucket there. Raises CommandError where it does not run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    before = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address, until = f"http://127.0.0.1:{port}", time.monotonic() + _PATIENCE
            while True:
                try:
                    urllib.request.urlopen(
                        urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=10
                    ).close()
                    break
                except OSError as error:
                    if process.poll() is not None or time.monotonic() > until:
                        say("versions: moto's server does not run here: S3 is left out")
                        raise CommandError("moto's server does not run here") from error
                    time.sleep(0.1)
            os.environ.update(_KEYS, AWS_ENDPOINT_URL=address)
            yield "s3://bucket/cache"
        finally:
            os.environ.clear()
            os.environ.update(before)
            process.kill()


def check(copy: Path, cache: Path) -> None:
    """Raise CommandError unless a copy is whole, and gives the batches of the cache in their order."""
    if damages := verify_cache(copy):
        raise CommandError(f"{copy}: {damages[0].name} {damages[0].reason}")
    datasets = CachedDataset(copy), CachedDataset(cache)
    if datasets[0].digest != datasets[1].digest:
        raise CommandError(f"{copy} has other samples than {cache}")
    for one, other in zip(*(CachedLoader(each, 64, shuffle=True, seed=1) for each in datasets), strict=True):
        if not all(torch.equal(*pair) for pair in zip(one, other, strict=True)):
            raise CommandError(f"{copy} gives other batches than {cache}")


def reading(caches: Mapping[str, Path], fresh: Path, rounds: int) -> dict[str, float]:
    """Return the rate at which each cache is read, of a fresh one's: medians of rounds in which all take turns."""
    loaders = [CachedLoader(CachedDataset(each), 64, shuffle=True, seed=1) for each in (*caches.values(), fresh)]

    def seconds(loader: CachedLoader) -> float:
        began = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - began

    for loader in loaders:
        seconds(loader)
    taken = [[seconds(loader) for loader in loaders] for _ in range(rounds)]
    return {name: statistics.median(each[-1] / each[at] for each in taken) for at, name in enumerate(caches)}


def opened(folder: Path, fresh: Path, options: argparse.Namespace) -> float:
    """Return how long opening takes with many versions, in multiples of one version's."""
    many = Path(shutil.copytree(fresh, folder / "many"))
    for number in range(options.versions - 1):
        if number % 2:
            delete_samples(many, paths=CachedDataset(many).paths[:1])
        else:
            set_columns(many, {"round": np.full(len(CachedDataset(many)), number)})

    def seconds(cache: Path) -> float:
        began = time.perf_counter()
        for _ in range(_OPENINGS):
            with CachedDataset(cache) as dataset:
                dataset[0]
        return time.perf_counter() - began

    taken = [[seconds(many), seconds(fresh)] for _ in range(options.rounds)]
    return statistics.median(of_many / of_one for of_many, of_one in taken)


if __name__ == "__main__":
    main()
