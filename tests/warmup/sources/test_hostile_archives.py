"""Archives that are broken or made to do harm: refused in one clear line, or a sample that does not load."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import tar_of, zip_of
from thorough import examples

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import open_source

FILES = {f"{'ab'[n % 2]}/{n}.jpg": bytes([n]) * (300 * n + 1) for n in range(6)}


WHOLE = {"zip": zip_of(FILES), "tar": tar_of(FILES)}


def _refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        open_source(path).list()
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(kind=st.sampled_from(["zip", "tar"]), at=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_flipped_or_missing_byte_never_gives_other_samples_silently(tmp_path_factory, kind, at, flip):
    whole = WHOLE[kind]
    place = int(at * len(whole))
    data = whole[:place] + (bytes([whole[place] ^ flip]) + whole[place + 1 :] if flip else b"")
    path = tmp_path_factory.getbasetemp() / f"flipped.{kind}"
    path.write_bytes(data)
    try:
        source = open_source(path)
        samples = source.list().samples
    except SourceError:
        return
    read = {}
    for sample in samples:
        try:
            read[sample.path] = source.load(sample).fields["image"]
        except SampleError:
            continue
    if kind == "zip":  # a tar has no checksums of its files, as a folder has none
        assert set(read.values()) <= set(FILES.values())
    assert flip or len(samples) == len(FILES)


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("data", [b"", b"<html>404</html>", bytes(700), b"PK\x03\x04" + bytes(60)], ids=len)
def test_what_is_no_archive_is_refused(tmp_path, kind, data):
    assert _refused(tmp_path / f"a.{kind}", data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_cut_short_is_refused_wherever_it_is_cut(tmp_path, kind):
    whole = WHOLE[kind]
    end = len(whole) if kind == "zip" else len(whole.rstrip(b"\0")) + 512
    for length in range(0, end, 97):
        assert _refused(tmp_path / f"a.{kind}", whole[:length])


@pytest.mark.parametrize("name", ["../a.jpg", "a/../../b.jpg", "/../a.jpg"])
@pytest.mark.parametrize("make", [zip_of, tar_of])
def test_names_that_lead_out_are_refused(tmp_path, name, make):
    assert "leads out" in _refused(tmp_path / f"a.{make.__name__[:3]}", make({"a/1.jpg": b"1", name: b"2"}))


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    target = io.BytesIO(tar_of({"a/1.jpg": b"1"}))
    with tarfile.open(fileobj=target, mode="a") as archive:
        archive.addfile(tarfile.TarInfo("./a/1.jpg"))
    assert "'a/1.jpg' more than once" in _refused(tmp_path / "a.tar", target.getvalue())
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("1.jpg", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("1.jpg", b"2")
    assert "more than once" in _refused(tmp_path / "a.zip", (tmp_path / "a.zip").read_bytes())


def _changed_directory(data: bytes, offset: int, value: bytes) -> bytes:
    """Change a field of the first entry in a zip's directory."""
    start = data.index(b"PK\x01\x02") + offset
    return data[:start] + value + data[start + len(value) :]


def test_encrypted_overlapping_and_impossible_entries_are_refused(tmp_path):
    whole = zip_of(FILES)
    path = tmp_path / "a.zip"
    assert "is encrypted" in _refused(path, _changed_directory(whole, 8, b"\x01\x00"))
    assert "claims 4,294,967,294 bytes" in _refused(path, _changed_directory(whole, 24, struct.pack("<I", 2**32 - 2)))
    assert "entries overlap" in _refused(path, _changed_directory(whole, 20, struct.pack("<I", 9000)))
    assert "method 14" in _refused(path, zip_of(FILES, zipfile.ZIP_LZMA))


@pytest.mark.slow
def test_a_bomb_is_unpacked_no_further_than_it_claims(tmp_path):
    """Half a gigabyte of zeros that claims to be a hundred bytes."""
    small = zipfile.ZipInfo("1.jpg")
    small.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, archive.open(small, "w") as file:
        for _ in range(16):
            file.write(bytes(1 << 20))
    data = _changed_directory((tmp_path / "a.zip").read_bytes(), 24, struct.pack("<I", 100))
    (tmp_path / "a.zip").write_bytes(data)
    source = open_source(tmp_path / "a.zip")
    with pytest.raises(SampleError, match="does not match"):
        source.load(source.list().samples[0])


def test_a_compressed_tar_says_what_to_do(tmp_path):
    for name in ("a.tar.gz", "a.tgz", "a.tar"):
        assert r"compressed as a whole (gzip)" in _refused(tmp_path / name, gzip.compress(tar_of(FILES)))


def test_two_tars_in_one_file_are_refused(tmp_path):
    assert "more data after its end" in _refused(tmp_path / "a.tar", tar_of(FILES) + tar_of({"c/9.jpg": b"9"}))


def test_sparse_files_and_links_out_of_a_tar_are_refused(tmp_path):
    sparse = bytearray(tar_of({"a/1.jpg": b"1"}))
    header = tarfile.TarInfo("a/1.jpg")
    header.type = tarfile.GNUTYPE_SPARSE
    header.size = 1
    sparse[:512] = header.tobuf(tarfile.GNU_FORMAT)
    assert "sparse" in _refused(tmp_path / "a.tar", bytes(sparse))
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "b.jpg")):
            entry = tarfile.TarInfo(f"{name[1:2]}.jpg")
            entry.type, entry.linkname = kind, name
            archive.addfile(entry)
    assert "a link to '/etc/passwd'" in _refused(tmp_path / "a.tar", target.getvalue())


def test_a_tar_with_a_negative_size_ends(tmp_path):
    header = bytearray(tarfile.TarInfo("a/1.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    start = tarfile.TarInfo("a/0.jpg").tobuf()
    assert "is negative" in _refused(tmp_path / "a.tar", start + header + bytes(1024))
