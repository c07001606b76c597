"""The wheel that goes with a cache installs where nothing else is, and is what runs here."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tpucache
from tpucache import DependencyError
from tpucache.publish import wheel

PACKAGE = Path(tpucache.__file__).parent


@pytest.mark.slow
def test_the_wheel_installs_offline_and_is_the_package_that_runs(tmp_path):
    path = wheel.write_wheel(tmp_path)
    assert path.name == f"tpucache-{tpucache.__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, path]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    mine = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.suffix in (".py", ".pyi", ".typed")}
    theirs = {file.relative_to(site / "tpucache") for file in (site / "tpucache").rglob("*") if file.suffix != ".pyc"}
    assert (
        theirs - {file for file in theirs if file.parts[-1] == "__pycache__" or (site / "tpucache" / file).is_dir()}
        == mine
    )
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nimport tpucache; print(tpucache.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(site / "tpucache" / "__init__.py")
    assert (site / "bin" / "tpucache").exists()


def test_the_record_tells_every_file_rightly(tmp_path):
    with zipfile.ZipFile(wheel.write_wheel(tmp_path)) as archive:
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
    path = wheel.write_wheel(tmp_path)
    assert path.read_bytes() == wheel.write_wheel(tmp_path / "again").read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    assert {(member.date_time, member.compress_type) for member in members} == {((1980, 1, 1, 0, 0, 0), 0)}


def test_a_package_that_was_never_installed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "_NAME", "tpucache-never-installed")
    with pytest.raises(DependencyError, match="pip install"):
        wheel.write_wheel(tmp_path)


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
    "publish/wheel.py.orig",
    "publish/.wheel.py.swp",
    ".ipynb_checkpoints/recipe-checkpoint.py",
    "private/__init__.py",
    "private/keys.py",
    "store/py.typed",
    "data/cache.lmdb",
]


def test_nothing_that_merely_lies_in_the_package_is_published(littered, tmp_path):
    with zipfile.ZipFile(wheel.write_wheel(tmp_path)) as archive:
        names = set(archive.namelist())
        assert not names & {f"tpucache/{name}" for name in LITTER}
        assert not any(b"secret'" in archive.read(name) for name in names)
        assert names >= {
            "tpucache/__init__.py",
            "tpucache/__main__.py",
            "tpucache/py.typed",
            "tpucache/store/copying.py",
        }
