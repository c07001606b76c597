"""The wheels that go with a cache: tpucache's own is what runs here, and pip finds the others, here in a folder."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

import tpucache
from tpucache import DependencyError, PublishError, Recipe, UsageError, build_cache
from tpucache.cli import main
from tpucache.kaggle import MAX_FILES
from tpucache.publish import wheels
from tpucache.publish.bundle import make_bundle
from tpucache.publish.rules import Metadata, breaches
from tpucache.publish.wheels import download_wheels, needed_packages, wheel_bytes, wheel_name
from tpucache.store.manifest import Manifest

PACKAGE = Path(tpucache.__file__).parent
METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")


def write_own(folder: Path) -> Path:
    """Write tpucache's own wheel."""
    path = folder / wheel_name()
    path.write_bytes(wheel_bytes())
    return path


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_installs_offline_and_is_the_package_that_runs(tmp_path):
    path = write_own(tmp_path)
    assert path.name == f"tpucache-{tpucache.__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, path]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    mine = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    theirs = {file.relative_to(site / "tpucache") for file in (site / "tpucache").rglob("*") if file.suffix != ".pyc"}
    assert (
        theirs - {file for file in theirs if file.parts[-1] == "__pycache__" or (site / "tpucache" / file).is_dir()}
        == mine
    )
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nimport tpucache; print(tpucache.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.strip() == str(site / "tpucache" / "__init__.py")
    assert (site / "bin" / "tpucache").exists()


def test_the_record_tells_every_file_rightly(tmp_path):
    with zipfile.ZipFile(write_own(tmp_path)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert sorted(rows) == sorted(names)
        assert rows.pop(record) == ["", ""]
        for name, (digest, size) in rows.items():
            data = archive.read(name)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={sha256}", len(data))
        info = record.removesuffix("RECORD")
        metadata = archive.read(f"{info}METADATA").decode()
        assert f"\nVersion: {tpucache.__version__}\n" in metadata
        assert "Root-Is-Purelib: true\nTag: py3-none-any" in archive.read(f"{info}WHEEL").decode()
        assert f"{info}entry_points.txt" in names
        assert not [name for name in names if "direct_url" in name or "__pycache__" in name or "__editable__" in name]


def test_the_same_package_makes_the_same_bytes(tmp_path):
    (tmp_path / "again").mkdir()
    path = write_own(tmp_path)
    assert path.read_bytes() == write_own(tmp_path / "again").read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    assert {(member.date_time, member.compress_type) for member in members} == {((1980, 1, 1, 0, 0, 0), 0)}


def test_a_package_that_was_never_installed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "_NAME", "tpucache-never-installed")
    with pytest.raises(DependencyError, match="pip install"):
        write_own(tmp_path)


@pytest.fixture
def littered(tmp_path, monkeypatch):
    """A copy of the package with files in it that are not its own."""
    package = shutil.copytree(PACKAGE, tmp_path / "site" / "tpucache")
    for name in LITTER:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("TOKEN = 'secret'")
    monkeypatch.setattr(tpucache, "__file__", str(package / "__init__.py"))
    return package


LITTER = [
    ".env",
    "credentials.json",
    "id_rsa",
    "notes.txt",
    "my_secrets.py",
    "publish/scratch.py",
    "publish/templates/notes.md",
    "report/templates/page.html.orig",
    "publish/wheels.py.orig",
    "publish/.wheels.py.swp",
    ".ipynb_checkpoints/recipe-checkpoint.py",
    "private/__init__.py",
    "private/keys.py",
    "store/py.typed",
    "data/cache.lmdb",
]


def test_nothing_that_merely_lies_in_the_package_is_published(littered, tmp_path):
    with zipfile.ZipFile(write_own(tmp_path)) as archive:
        names = set(archive.namelist())
        assert not names & {f"tpucache/{name}" for name in LITTER}
        assert not any(b"secret'" in archive.read(name) for name in names)
        assert names >= {
            "tpucache/__init__.py",
            "tpucache/__main__.py",
            "tpucache/py.typed",
            "tpucache/publish/templates/card.md.jinja",
            "tpucache/report/templates/page.css",
            "tpucache/store/copying.py",
        }


def write_wheel(folder: Path, package: str, tag: str, platform: str = "manylinux2014_x86_64") -> Path:
    """Write a wheel of nothing but its metadata."""
    path, info = folder / f"{package}-9.9-{tag}-{tag}-{platform}.whl", f"{package}-9.9.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\nLicense: BSD\n",
        "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-{platform}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(f"{info}/{name}", text)
    return path


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for wheels: zstandard and lz4 for Python 3.12, zstandard for macOS, too."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())  # pip takes several, with spaces between them
    write_wheel(folder, "zstandard", "cp312")
    write_wheel(folder, "lz4", "cp312", "manylinux_2_28_x86_64")
    write_wheel(folder, "zstandard", "cp313", "macosx_11_0_arm64")
    return folder


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that needs lz4."""
    cache = tmp_path_factory.mktemp("packed") / "cache"
    build_cache(photos, cache, Recipe(size=16, codec="dct-lz4"), jobs=1)
    return cache


@pytest.mark.slow
def test_the_wheel_goes_with_the_cache_and_the_card_says_what_it_is(
    packed: Path, links: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, name = tmp_path / "out", "lz4-9.9-cp312-cp312-manylinux_2_28_x86_64.whl"
    words = ["--id", METADATA.dataset_id, "--title", METADATA.title, "--license", METADATA.license_name]
    assert main(["publish", str(packed), *words, "--out", str(out), "--dry-run", "--json", "--wheels", "cp312"]) == 0
    printed = capsys.readouterr()
    digest = hashlib.sha256((links / name).read_bytes()).hexdigest()
    assert json.loads(printed.out)["wheels"] == [{"name": name, "license": "BSD", "sha256": digest}]
    assert f"{name} is under BSD" in printed.err
    assert (out / name).read_bytes() == (links / name).read_bytes()
    card = (out / "README.md").read_text()
    assert digest in card
    install = f"--find-links $(dirname $(find /kaggle/input -name '{wheel_name()}' | head -n 1)) tpucache lz4\n"
    assert f"pip install --no-deps --no-index {install}" in card
    assert "numpy, lz4 and torch" in card
    assert breaches(out) == []
    # Without the option, and then with it again, the folder is still publish's own.
    assert name not in make_bundle(packed, METADATA, out).files
    assert name in make_bundle(packed, METADATA, out, "cp312").files


@pytest.mark.slow
def test_a_tag_without_wheels_is_refused_and_the_folder_is_not_made(packed: Path, links: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"no wheel of lz4 for cp313 on Linux x86-64: .*PIP_FIND_LINKS"):
        make_bundle(packed, METADATA, tmp_path / "out", "cp313")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PublishError, match="no wheel of zstandard for cp313"):  # there is one, of another system
        download_wheels(["zstandard"], "cp313")


@pytest.mark.parametrize("tag", ["3.12", "cp312t", "py3", "cp3", "cp312 --index-url x"])
def test_what_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="such as cp312"):
        download_wheels(["lz4"], tag)


@pytest.mark.slow
def test_a_raw_cache_needs_no_wheel(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert needed_packages(Manifest.load(stored)) == ()
    made = make_bundle(stored, METADATA, wheels="cp312")
    assert "no wheel is added" in caplog.text
    assert made.wheels == ()
    assert made.files == make_bundle(stored, METADATA).files


@pytest.mark.slow
def test_a_cache_with_as_many_files_as_a_dataset_may_have_gets_no_wheel(
    photos: Path, links: Path, tmp_path: Path
) -> None:
    source = tmp_path / "photos"
    source.mkdir()
    shutil.copy(next((photos / "ant").iterdir()), source)
    cache = tmp_path / "cache"
    build_cache(source, cache, Recipe(size=8, variants=MAX_FILES - 6, codec="dct-lz4", augment="flip"), jobs=1)
    with pytest.raises(PublishError, match=rf"with the wheels of lz4 there would be {MAX_FILES + 1} files"):
        make_bundle(cache, METADATA, wheels="cp312")
    assert len(make_bundle(cache, METADATA).files) == MAX_FILES


def test_a_python_without_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DependencyError, match="needs pip"):
        download_wheels(["lz4"], "cp312")
