"""Whatever a library raises where tpucache calls it, a command ends with one line that says what to do."""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from tpucache.cli import main

pytestmark = pytest.mark.slow

HTTP = "http.client.HTTPConnection"


class LibraryError(Exception):
    """An error of a kind that nobody knows."""


class ShyError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        return ""


TEXTS = st.text(max_size=40) | st.just("first line\nsecond line\n\x1b[31mred")
KINDS = (
    *(Exception, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, OSError),
    *(NotImplementedError, AssertionError, StopIteration, EOFError, PermissionError, TimeoutError, ConnectionError),
    *(FileNotFoundError, UnicodeError, LibraryError, ShyError),
)


class Place(NamedTuple):
    """What is there for commands: photographs, a table of parquet, a cache, an empty folder, and a silent server."""

    photos: Path
    table: Path
    cache: Path
    empty: Path
    port: int


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("boundaries")
    generator = np.random.default_rng(0)
    pictures = []
    for number in range(6):
        path = root / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(path)
        pictures.append({"bytes": path.read_bytes(), "path": None})
    pq.write_table(pa.table({"image": pictures, "label": [0, 1] * 3}), root / "table.parquet")
    assert run("warmup", root / "photos", root / "cache", "--size", "16", "--jobs", "1")[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Place(root / "photos", root / "table.parquet", root / "cache", root / "empty", server.getsockname()[1])


def run(*words: object) -> tuple[int, str]:
    """Run a command in this process; return its status and what it says on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, said.getvalue()


def raising(error: Exception, calls: list[object]) -> Callable[..., Any]:
    """Return what stands for a library's function: it notes each call, and raises an error."""

    def call(*_: object, **__: object) -> Any:
        calls.append(error)
        raise error

    return call


def build(place: Place, *_: object) -> list[object]:
    return ["warmup", place.photos, place.empty, "--size", "16", "--jobs", "1"]


def build_table(place: Place) -> list[object]:
    return ["warmup", place.table, place.empty, "--size", "16", "--jobs", "1"]


def build_file(place: Place, name: str, data: bytes) -> list[object]:
    """Write one file; return what builds a cache of it."""
    path = place.photos.with_name("files") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return ["warmup", path, place.empty, "--size", "16", "--jobs", "1"]


def build_image(place: Place, name: str, data: bytes) -> list[object]:
    """Write one image; return what builds a cache of its folder."""
    build_file(place, name, data)
    return ["warmup", place.photos.with_name("files"), place.empty, "--include", name, "--size", "16", "--jobs", "1"]


def photograph() -> bytes:
    """Return a JPEG file."""
    target = io.BytesIO()
    Image.new("RGB", (24, 24)).save(target, "JPEG")
    return target.getvalue()


def compressed(place: Place, codec: str) -> Path:
    """Return a cache whose records are compressed."""
    cache = place.photos.with_name(codec)
    if not cache.exists():
        assert run("warmup", place.photos, cache, "--size", "16", "--jobs", "1", "--codec", codec)[0] == 0
    return cache


def draw(place: Place, cache: Path) -> list[object]:
    return ["preview", cache, "-o", place.photos.with_name("sheet.png")]


def write_page(place: Place) -> list[object]:
    return ["report", place.cache, "-o", place.photos.with_name("page.html")]


def send_to_kaggle(place: Place) -> list[object]:
    return ["warmup", place.photos, "kaggle:ann/six-pictures", "--size", "16", "--jobs", "1", "--keep-local", "no"]


def export(place: Place, kind: str) -> list[object]:
    """Train a run; return what exports it."""
    path = place.photos.with_name("run")
    if not path.exists():
        assert run(*train(place, "--model", "cnn", "--epochs", "1"), "--run", path)[0] == 0
    output = place.photos.with_name("out.csv")
    return ["predict", path, place.cache, "-o", output, "--backend", "torch", "--export", kind]


def safetensors(place: Place) -> Path:
    """Write a file that is called as one of safetensors."""
    path = place.photos.with_name("weights.safetensors")
    path.touch()
    return path


def weights(place: Place) -> Path:
    """Write a file of weights."""
    path = place.photos.with_name("weights.pt")
    if not path.exists():
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("weights/data.pkl", b"")
    return path


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library timm that knows each model, and makes none."""
    optim = SimpleNamespace(list_optimizers=lambda: ["lamb"], get_optimizer_info=None, get_optimizer_class=None)
    stub = SimpleNamespace(is_model=lambda name: True, create_model=None, get_pretrained_cfg=None, optim=optim)
    monkeypatch.setitem(sys.modules, "timm", stub)
    monkeypatch.setitem(sys.modules, "timm.optim", optim)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of clusters, that do nothing."""
    ray = {"is_initialized": bool, "init": dict, "cluster_resources": dict, "remote": None, "shutdown": dict}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**ray))
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=MagicMock(), as_completed=None))


def build_on(place: Place, backend: str) -> list[object]:
    return [*build(place)[:-2], "--backend", backend, "--scheduler", "127.0.0.1:9"]


def build_saved(place: Place) -> list[object]:
    """Make a folder that looks as if save_to_disk had written it; return what builds a cache of it."""
    folder = place.photos.with_name("saved")
    folder.mkdir(exist_ok=True)
    for name in ("dataset_info.json", "state.json"):
        (folder / name).write_text("{}")
    return ["warmup", folder, place.empty, "--size", "16", "--jobs", "1"]


def train(place: Place, *words: object) -> list[object]:
    return ["train", place.cache, "--run", place.empty, "--backend", "torch", "--batch-size", "2", *words]


#: The library's function, by its module and its name, and the command that calls it.
BOUNDARIES: dict[str, tuple[str, str, Callable[[Place], list[object]]]] = {
    "fsspec opens a URL": ("fsspec.core", "url_to_fs", lambda place: ["inspect", "memory://boundaries"]),
    "fsspec lists": ("fsspec.implementations.memory.MemoryFileSystem", "ls", lambda place: push(place, "memory://new")),
    "fsspec opens": ("fsspec.implementations.memory.MemoryFileSystem", "open", lambda place: ["inspect", MEMORY]),
    "lmdb opens": ("lmdb", "open", build),
    "pyarrow opens": ("pyarrow.parquet", "ParquetFile", build_table),
    "pyarrow reads rows": ("pyarrow.parquet.ParquetFile", "iter_batches", build_table),
    "Pillow opens": ("PIL.Image", "open", build),
    **{
        f"obstore: {name}": ("obstore", name, command)
        for name, command in (
            ("get", lambda place: ["inspect", "s3://bucket/cache"]),
            ("list_with_delimiter", lambda place: push(place, "s3://bucket/cache")),
            ("list", lambda place: ["warmup", "s3://bucket/photos", place.empty, "--size", "16"]),
        )
    },
    "obstore opens a URL": ("obstore.store", "from_url", lambda place: ["inspect", "s3://bucket/cache"]),
    **{
        f"http.client: {name}": (HTTP, name, lambda place: ["inspect", f"http://127.0.0.1:{place.port}/cache"])
        for name in ("connect", "getresponse")
    },
    "ssl begins": ("ssl", "create_default_context", lambda place: ["inspect", f"https://127.0.0.1:{place.port}/cache"]),
    "pydicom reads": ("pydicom", "dcmread", lambda place: build_image(place, "image.dcm", bytes(128) + b"DICM")),
    "pillow-heif begins": (
        "pillow_heif",
        "register_heif_opener",
        lambda place: build_image(place, "image.heic", bytes(4) + b"ftypheic" + bytes(99)),
    ),
    "simplejpeg reads": ("simplejpeg", "decode_jpeg", lambda place: build_image(place, "image.jpg", photograph())),
    "joblib counts": ("joblib", "cpu_count", lambda place: build(place)[:-2]),
    "yaml reads": (
        "yaml",
        "load",
        lambda place: [*build(place), "--variants", "1", "--augment", build_file(place, "augment.yaml", b"")[1]],
    ),
    "protobuf begins": (
        "google.protobuf.text_format",
        "Parse",
        lambda place: build_file(place, "a.tfrec", bytes.fromhex("0200000000000000 78270b34 0a00 39818bab")),
    ),
    "kagglesdk asks": ("kagglesdk.kaggle_http_client.KaggleHttpClient", "call", send_to_kaggle),
    "zstandard packs": ("zstandard", "ZstdCompressor", lambda place: [*build(place), "--codec", "zstd"]),
    "albumentations composes": (
        "tpucache.warmup.records.augment",
        "_albumentations",  # importing it takes seconds
        lambda place: [*build(place), "--variants", "1"],
    ),
    "jinja2 fills": ("jinja2.Template", "render", write_page),
    "Pillow draws": ("PIL.ImageDraw", "Draw", lambda place: draw(place, place.cache)),
    "Pillow writes a sheet": ("PIL.Image.Image", "save", lambda place: draw(place, place.cache)),
    "torch loads": ("torch", "load", lambda place: train(place, "--weights", weights(place))),
    "safetensors writes": ("safetensors.torch", "save", lambda place: export(place, "safetensors")),
    "safetensors reads": (
        "safetensors.torch",
        "load_file",
        lambda place: train(place, "--weights", safetensors(place)),
    ),
    "timm makes a model": ("timm", "create_model", lambda place: train(place, "--model", "timm:resnet18")),
    "datasets opens": ("datasets", "load_from_disk", build_saved),
    **{
        f"{backend}: {name}": (owner, name, lambda place, backend=backend: build_on(place, backend))
        for backend, owner, name in (
            *(("ray", "ray", name) for name in ("init", "remote")),
            *(("dask", "distributed", name) for name in ("Client", "as_completed")),
        )
    },
    "the hub's cache": (
        "huggingface_hub",
        "try_to_load_from_cache",
        lambda place: train(place, "--weights", "hub:owner/name"),
    ),
    "the hub opens": ("huggingface_hub.HfFileSystem", "open", lambda place: ["inspect", "hf://datasets/a/b/cache"]),
}
MEMORY = "memory://boundaries"
#: What a library says in this way: that nothing is there, or that another one has to look at it.
EXPECTED = {"fsspec lists": FileNotFoundError, "simplejpeg reads": ValueError}


def push(place: Place, url: str) -> list[object]:
    return ["push", place.cache, url]


def forget_libraries() -> None:
    """Have warmup look up libraries and open places anew."""
    for module in [each for name, each in sys.modules.items() if name.startswith("tpucache.warmup.")]:
        for found in vars(module).values():
            if hasattr(found, "cache_clear") and not isinstance(found, type):
                found.cache_clear()


@pytest.fixture
def bare(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that keeps nothing and tries nothing again, with a cache in its memory, and a profile of AWS.

    Libraries are looked up anew.
    """
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setenv("KAGGLE_API_TOKEN", "a")
    monkeypatch.chdir(tmp_path)
    forget_libraries()
    files = fsspec.filesystem("memory")
    for path in place.cache.iterdir():
        if path.is_file():
            files.pipe_file(f"/boundaries/{path.name}", path.read_bytes())
    yield
    for name in ("boundaries", "new"):
        if files.exists(f"/{name}"):
            files.rm(f"/{name}", recursive=True)
    forget_libraries()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.generate],  # a smaller example says no more
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(kind=st.sampled_from(KINDS), text=TEXTS)
def test_an_error_of_a_library_is_one_line(
    bare: None, timm: None, clusters: None, place: Place, boundary: str, kind: type[Exception], text: str
) -> None:
    assume(not issubclass(kind, EXPECTED.get(boundary, ())))
    calls: list[object] = []
    owner, name, command = BOUNDARIES[boundary]
    with pytest.MonkeyPatch.context() as patch:
        if boundary.startswith("obstore"):
            patch.delenv("AWS_PROFILE")
            patch.setenv("AWS_ACCESS_KEY_ID", "a")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        forget_libraries()
        shutil.rmtree(place.empty, ignore_errors=True)
        words = command(place)
        patch.setattr(f"{owner}.{name}", raising(kind(text), calls))
        status, said = run(*words)
    assert calls, said
    assert status in (1, 2), (status, said)
    assert "Traceback" not in said
    last = said.rstrip("\n").rpartition("\n")[2]
    assert last.startswith("tpucache: "), said
    assert last.isprintable()
