"""Whom the read benchmark compares: releases found to work together, and settings of which the fastest is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.photos import BANDED, BANDS
from scripts.bench.rounds import Contender
from scripts.bench.worker import Setting
from scripts.environments import Environment
from tpucache.store.manifest import Manifest

LIMIT: Final = "gather"
OURS: Final = "tpucache"
REFERENCE: Final = "tpucache in memory 2"
#: Kinds of our caches that contenders read (`scripts.bench.photos`).
KINDS_READ: Final = ("raw", "jpeg", "yuv420", "dct-zstd", "dct-lz4")
#: Kinds whose formats are compared by the bytes of an image: the same quality everywhere.
KINDS_COMPARED: Final = ("raw", "jpeg90", "yuv420", "dct-zstd", "dct-lz4")

#: The parts of the side in which images in bands are read: all of it, half, a quarter.
PARTS: Final = (1, 2, 4)

# All are for Python 3.11; every peer that needs torch gets the same one.
_TORCH: Final = "torch==2.13.0"
_NUMPY: Final = "numpy==2.2.6"
_PILLOW: Final = "pillow==12.0.0"

FFCV: Final = Environment(
    "ffcv",
    (
        (
            "numpy==1.26.4",
            "numba==0.61.2",
            _TORCH,
            _PILLOW,
            "opencv-python-headless==4.11.0.86",
            "tqdm",
            "setuptools",
        ),
        ("--no-build-isolation", "--no-deps", "ffcv==1.0.2", "pytorch-pfn-extras==0.9.0"),
    ),
    debian=("g++", "pkg-config", "libopencv-dev", "libturbojpeg0-dev"),
    pkg_config=("opencv4", "libturbojpeg"),
)
_GRAIN: Final = Environment("grain", ((_NUMPY, "grain==0.2.18", "array-record==0.8.6"),))
_LITDATA: Final = Environment("litdata", ((_TORCH, _NUMPY, "litdata==0.2.76"),))
_MDS: Final = Environment("mds", ((_TORCH, "numpy==2.1.3", "mosaicml-streaming==0.13.0"),))
_WEBDATASET: Final = Environment("webdataset", ((_TORCH, _NUMPY, "webdataset==1.0.2"),))
_TFDATA: Final = Environment("tfdata", ((_NUMPY, "tensorflow-cpu==2.21.0"),))
_PLAIN_TORCH: Final = Environment("torch", ((_TORCH, _NUMPY, _PILLOW),))

_PACKED: Final = ("yuv420", "dct-zstd", "dct-lz4")
_WORKERS: Final = ({"workers": 0}, {"workers": 2})


def _peer(name: str, module: str, environment: Environment | None, *settings: Setting) -> Contender:
    return Contender(name, f"read.{module}", settings, environment)


def _ours(name: str, **setting: Any) -> Contender:
    return _peer(f"tpucache {name}", "tpucache", None, setting)


def _packed(kind: str, threads: int) -> Contender:
    return _ours(f"{kind} {threads}", kind=kind, threads=threads, finish="device")


def _ffcv(kind: str, threads: int) -> Contender:
    orders = ({"kind": kind, "threads": threads, "order": order} for order in ("RANDOM", "QUASI_RANDOM"))
    return _peer(f"ffcv {kind} {threads}", "ffcv", FFCV, *orders)


def _grain(threads: int) -> Contender:
    places = ({"threads": threads, "batch": place} for place in ("in the threads", "after the threads"))
    return _peer(f"grain {threads}", "grain", _GRAIN, *places)


CONTENDERS: Final = (
    *(_peer(f"gather {n}", "gather", None, {"threads": n}) for n in (1, 2)),
    *(_ours(f"in memory {n}", kind="raw", threads=n, memory=True) for n in (1, 2)),
    _ours("jpeg in memory 2", kind="jpeg", threads=2, memory=True),
    *(_ours(f"{kind} {n}", kind=kind, threads=n) for kind in ("raw", "jpeg") for n in (1, 2)),
    *(_packed(kind, 2) for kind in _PACKED),
    *(_ffcv(kind, n) for kind in ("raw", "jpeg") for n in (1, 2)),
    _grain(2),
    _peer("litdata", "litdata", _LITDATA, *_WORKERS),
    _peer("mds", "mds", _MDS, *_WORKERS),
    _peer("webdataset", "webdataset", _WEBDATASET, *_WORKERS),
    _peer("tf.data", "tfdata", _TFDATA, {"parse": "samples"}, {"parse": "batches"}),
    _peer("memmap", "memmap", _PLAIN_TORCH, {"workers": 0}),
    _peer("torch.save", "torchsave", _PLAIN_TORCH, {"workers": 2}),
    _peer("jpeg folder", "jpegfolder", _PLAIN_TORCH, {"workers": 2}),
)


def _banded(kind: str, part: int, threads: int) -> Contender:
    """Return what reads images of a part of the stored side, out of the bands that these need."""
    return _ours(f"{kind} 1/{part} {threads}", kind=kind, part=part, threads=threads, finish="device")


#: What is compared by the bytes of an image: batches of packed images are handed over as they are.
FORMATS: Final = (
    *(_ours(f"{kind} {n}", kind=kind, threads=n) for kind in ("raw", "jpeg90") for n in (1, 2)),
    *(_packed(kind, n) for kind in _PACKED for n in (1, 2)),
    *(_banded(kind, part, n) for kind in BANDED for part in PARTS for n in (1, 2)),
    *(_ffcv(kind, n) for kind in ("raw", "jpeg90") for n in (1, 2)),
)


def slipstream(python: Path) -> list[Contender]:
    """Return slipstream's 4:2:0, run by an interpreter that has it."""
    settings = ({"kind": "yuv420", "threads": n} for n in (1, 2))
    return [
        Contender(f"slipstream yuv420 {setting['threads']}", "read.slipstream", (setting,), python=python)
        for setting in settings
    ]


def files_of(contender: Contender, data: Path) -> list[Path]:
    """Return the files that hold the images that a contender reads, none where its format is not one of these."""
    kind = contender.settings[0].get("kind")
    folder = data / f"cache-{kind}" if contender.peer == OURS else data / "peer" / contender.peer
    if kind in BANDED:
        bands = len(BANDS) - PARTS.index(contender.settings[0]["part"])
        return [folder / entry.name for entry in Manifest.load(folder).shards if entry.band < bands]
    patterns = {OURS: "*.lmdb", "ffcv": f"{kind}.beton", "slipstream": f"cache/**/*_{kind}.bin"}
    return list(folder.glob(patterns[contender.peer])) if contender.peer in patterns else []


def choose(contenders: Sequence[Contender], only: list[str] | None) -> list[Contender]:
    """Return those of some names or peers; the limit and the reference always take part, as ratios need them."""
    return [
        contender
        for contender in contenders
        if not only
        or contender.name == REFERENCE
        or contender.peer == LIMIT
        or contender.name in only
        or contender.peer in only
    ]


def threads_of(setting: Setting) -> int:
    """Return how many threads or processes a setting reads with; one without such an option takes both."""
    return max(1, int(setting.get("threads") or setting.get("workers", 2)))
