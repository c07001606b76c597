"""Parts of other packages: found by their names, imported when they are used, and refused where they are wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tpucache import (
    CachedDataset,
    CachedLoader,
    DependencyError,
    Recipe,
    RecipeError,
    SourceError,
    UnknownCodecError,
    UsageError,
    build_cache,
    plugins,
)
from tpucache.cli import main
from tpucache.plugins import GROUPS
from tpucache.store.codecs import CODECS, IMAGE_CODECS
from tpucache.training import make_task, open_device

MODULE = """
from tpucache.store.codecs import Codec
from tpucache.warmup.sources import Item, Listing, Sample, SourceKind
import numpy as np

class Upside(Codec):
    name = "upside"
    is_for_images = True
    def _encode(self, field, array, quality):
        return array[::-1].tobytes()
    def _decode_into(self, field, data, out):
        out[...] = np.frombuffer(data, field.dtype).reshape(field.shape)[::-1]

class Other(Upside):
    name = "another"

class Grey:
    def list(self):
        return Listing([Sample(n, f"{n}", n % 2) for n in range(6)], ("a", "b"))
    def load(self, sample):
        return Item({"image": np.full((8, 8), 40 * sample.number, np.uint8)})

KIND = SourceKind("FILE.grey", lambda text: str(text) == "six.grey", lambda text, options: Grey())
URLS = SourceKind("gray://", lambda text: str(text).startswith("gray://"), lambda text, options: Grey())
"""

LOSSY = """
from tpucache.errors import FormatError
from tpucache.store.codecs import Codec
import numpy as np

class Coarse(Codec):
    name = "coarse"
    is_for_images = True
    quality_range = (1, 7)
    default_quality = 3
    typical_ratio = 0.5

    def check(self, field):
        if field.dtype != "|u1" or field.shape[2:] != (3,):
            raise FormatError("coarse holds uint8 (height, width, 3)")

    def stored_bytes(self, field):
        return field.nbytes

    def _encode(self, field, array, quality):
        return (array >> field.quality).tobytes()

    def _decode_into(self, field, data, out):
        out[...] = np.frombuffer(data, np.uint8).reshape(field.shape) << field.quality
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package with these entry points, "GROUP NAME" to a reference."""
    sites = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(sites)

    def add(package: str, module: str, **entries: str) -> None:
        folder = sites / f"{package}-1.5.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        lines = ("[tpucache.{}]\n{} = {}\n".format(*key.split("_"), value) for key, value in entries.items())
        (folder / "entry_points.txt").write_text("".join(lines))
        (sites / f"{package}.py").write_text(module)
        plugins.installed.cache_clear()

    yield add
    plugins.installed.cache_clear()
    for name in ("parts", "second"):
        sys.modules.pop(name, None)


def test_a_cache_is_built_and_read_by_parts_of_a_package(install, tmp_path):
    install("parts", MODULE, codecs_upside="parts:Upside", sources_grey="parts:KIND")
    assert "upside" in IMAGE_CODECS
    assert [*IMAGE_CODECS][-1] == "upside"
    manifest = build_cache("six.grey", tmp_path / "cache", Recipe(size=8, codec="upside"), jobs=1)
    assert manifest.fields[0].codec == "upside"
    assert manifest.created_by["parts"] == "1.5"
    images = [np.asarray(image) for image, _ in CachedDataset(tmp_path / "cache")]
    assert [image.tolist() for image in images] == [np.full((3, 8, 8), 40 * n).tolist() for n in range(6)]


def test_a_codec_of_one_file_and_one_line_works_in_every_command(install, tmp_path, photos, capsys):
    install("parts", LOSSY, codecs_coarse="parts:Coarse")
    cache = str(tmp_path / "cache")
    few = ["--size", "16", "--jobs", "1", "--limit", "4"]
    assert main(["warmup", str(photos), cache, "--codec", "coarse", "--quality", "2", *few]) == 0
    assert main(["verify", cache]) == 0
    capsys.readouterr()
    assert main(["inspect", cache, "--json"]) == 0
    field = json.loads(capsys.readouterr().out)["fields"][0]
    assert (field["codec"], field["quality"]) == ("coarse", 2)
    batch, _ = next(iter(CachedLoader(CachedDataset(cache), 4)))
    assert main(["warmup", str(photos), str(tmp_path / "raw"), *few]) == 0
    whole, _ = next(iter(CachedLoader(CachedDataset(tmp_path / "raw"), 4)))
    assert (batch == (whole >> 2 << 2)).all()
    assert main(["warmup", str(photos), str(tmp_path / "new"), "--codec", "coarse", *few, "--dry-run"]) == 0
    assert "coarse" in capsys.readouterr().out
    with pytest.raises(RecipeError, match=r"the mode grey needs a codec .*, not 'coarse': coarse holds uint8"):
        Recipe(codec="coarse", mode="grey")
    with pytest.raises(RecipeError, match="codec is raw or zstd for the mode keep"):
        Recipe(codec="coarse", mode="keep")
    with pytest.raises(UsageError, match="images of the codec coarse"):
        CachedDataset(cache, resolution=8)


def test_a_url_may_be_a_source_of_a_package(install, tmp_path):
    install("parts", MODULE, sources_gray="parts:URLS")
    assert build_cache("gray://bucket/six", tmp_path / "cache", Recipe(size=8), jobs=1).samples == 6
    with pytest.raises(SourceError, match=r"names the other kinds of sources, and installed packages add gray://"):
        build_cache(tmp_path / "nothing", tmp_path / "cache", Recipe(size=8), jobs=1)


def test_a_cache_without_its_codec_says_which_is_missing(install, tmp_path):
    install("parts", MODULE, codecs_upside="parts:Upside", sources_grey="parts:KIND")
    build_cache("six.grey", tmp_path / "cache", Recipe(size=8, codec="upside"), jobs=1)
    (tmp_path / "site-packages" / "parts-1.5.dist-info" / "entry_points.txt").write_text("")
    plugins.installed.cache_clear()
    with pytest.raises(UnknownCodecError, match=r"needs the codec 'upside', .* install the package that brings it$"):
        CachedDataset(tmp_path / "cache")


MISTAKES = [
    ("return array[::-1].tobytes()", "return None", DependencyError, "encodes an array as a NoneType"),
    ("out[...] =", "out[3:] =", DependencyError, "the codec 'upside' of the package parts 1.5 raised ValueError"),
    ('str(text) == "six.grey"', "text.shape", DependencyError, "the source 'grey' of the package parts 1.5 .*shape"),
    ('{"image":', '{}["image"] or {"image":', SourceError, r"0: parts.Grey.load raised KeyError\('image'\)"),
    ("return Item(", "return dict(", SourceError, "0: parts.Grey.load returned a dict, not Item"),
    ("return Listing(", "raise OSError('gone'); (", SourceError, r"parts.Grey.list raised OSError\('gone'\)"),
    ("return Listing(", "return tuple, (", SourceError, "parts.Grey.list returned a tuple, not Listing"),
    ("Sample(n,", "Sample(n + 1,", SourceError, "does not number the samples 0, 1, 2"),
    ('f"{n}"', '"all"', SourceError, "two samples with the path 'all'"),
]


@pytest.mark.parametrize(("before", "after", "error", "said"), MISTAKES)
def test_a_mistake_in_a_package_is_one_error_that_names_it(install, tmp_path, before, after, error, said):
    assert before in MODULE
    install("parts", MODULE.replace(before, after), codecs_upside="parts:Upside", sources_grey="parts:KIND")
    with pytest.raises(error, match=said):
        build_cache("six.grey", tmp_path / "cache", Recipe(size=8, codec="upside"), jobs=1)


def test_a_package_that_cannot_be_used_does_not_disturb_others(install, tmp_path, photos):
    install("parts", "raise OSError('no library')", codecs_upside="parts:Upside", sources_grey="parts:KIND")
    install("second", MODULE.replace("grey", "white"), sources_white="second:KIND")
    assert build_cache("six.white", tmp_path / "cache", Recipe(size=8), jobs=1).samples == 6
    assert build_cache(photos, tmp_path / "other", Recipe(size=8), jobs=1).samples > 6
    with pytest.raises(RecipeError, match=r"one of raw, .*, upside"):
        Recipe(codec="none")


def test_nothing_is_imported_before_it_is_used(install):
    install("parts", "raise SystemError('imported')", codecs_upside="parts:Upside", tasks_odd="parts:Odd")
    assert "upside" in CODECS
    assert "upside" in [*CODECS]
    assert "raw" in IMAGE_CODECS
    assert "parts" not in sys.modules


def test_own_names_are_never_taken_over(install):
    install("parts", MODULE, codecs_raw="parts:Upside", tasks_classes="parts:Upside", devices_torch="parts:Upside")
    assert CODECS["raw"].is_plain
    assert [*CODECS].count("raw") == 1
    assert type(make_task("classes", 2)).__name__ == "Classes"
    assert open_device("torch").name == "torch"


def test_one_name_in_two_packages_is_refused_by_both_names(install):
    install("parts", MODULE, codecs_upside="parts:Upside")
    install("second", MODULE, codecs_upside="second:Upside")
    with pytest.raises(DependencyError, match=r"parts 1.5 and second 1.5 both have the codec 'upside': uninstall one"):
        CODECS["upside"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise OSError('no library')", "OSError: no library"),
        ("", "AttributeError: .*'Upside'"),
        ("Upside = 3", "TypeError: 3 is no subclass of tpucache.store.codecs.Codec"),
        ("from tpucache.store.codecs import Codec as Upside", "TypeError: .*abstract"),
        (MODULE.replace('"upside"', '"down"'), "TypeError: the entry point 'upside' leads to a codec named 'down'"),
    ],
)
def test_a_part_that_is_wrong_is_named_with_its_package(install, module, said):
    install("parts", module, codecs_upside="parts:Upside")
    with pytest.raises(DependencyError, match=f"the codec 'upside' of the package parts 1.5 raised {said}"):
        CODECS["upside"]


def test_tables_and_groups_are_one_list():
    assert {*GROUPS} == {f"tpucache.{name}" for name in ("codecs", "sources", "tasks", "devices")}
