"""Packed records, unpacked by the compiled loop: the same bytes and the same damage as without it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from tpucache import DamageError
from tpucache.loading.reading.crops import compile_crop
from tpucache.native import Native, compile_loops, compiled
from tpucache.store.codecs import dct, encode, unpack_rows
from tpucache.store.fields import Field

pytest.importorskip("llvmlite", reason="the compiled loop needs it")
zstandard = pytest.importorskip("zstandard")
lz4 = pytest.importorskip("lz4")
pytest.importorskip("lz4.block")
pytestmark = pytest.mark.skipif(
    None in (dct.unpack_zstd(), dct.unpack_lz4()), reason="this system has no libzstd.so.1 or liblz4.so.1"
)

CODECS = ["dct-zstd", "dct-lz4"]
LOOPS = ["loop", "narrow"]
UNTOUCHED = 77


@functools.cache
def loops(way: str) -> Native:
    """Return the loops for this processor, or for one without AVX-512."""
    return compile_loops({} if way == "narrow" else None)


def field_of(codec: str, height: int = 24, width: int = 24) -> Field:
    return Field("image", codec, "|u1", (height, width, 3), 90, "420")


def compressed(codec: str, form: bytes) -> bytes:
    """Return bytes in the byte code of a codec."""
    return zstandard.compress(form) if codec == "dct-zstd" else lz4.block.compress(form, store_size=False)


def records_of(field: Field, count: int, seed: int = 0) -> list[bytes]:
    """Return images from smooth to noisy, encoded."""
    rng = np.random.default_rng(seed)
    images = [rng.normal(128, 12 * turn, field.shape).clip(0, 255).astype(np.uint8) for turn in range(count)]
    return [encode(field, image) for image in images]


def using(way: str) -> Any:
    return patch.object(dct, "native", lambda: None if way == "plain" else loops(way))


def unpack(field: Field, records: list[bytes], rows: np.ndarray[Any, Any], out: np.ndarray[Any, Any], way: str) -> None:
    ends = np.cumsum([len(record) for record in records])
    spans = np.stack([ends - [len(record) for record in records], ends], 1)
    block = np.frombuffer(b"".join(records), np.uint8)
    with using(way):
        unpack_rows(field, block, spans, out, rows)


def empty(field: Field, rows: int) -> np.ndarray[Any, Any]:
    return np.full((rows, field.packed.nbytes), UNTOUCHED, np.uint8)


def test_whatever_llvmlite_raises_numpy_does_the_work(monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise AttributeError("another version")

    monkeypatch.setattr("llvmlite.binding.parse_assembly", fail)
    for compile_code in (compile_loops, compile_crop):
        assert compiled(compile_code, "numpy does it") is None
    assert caplog.text.count("numpy does it; compiled loops are faster: `pip install llvmlite` (another version)") == 2


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", LOOPS)
def test_the_loop_unpacks_the_same_bytes_into_the_same_rows(codec: str, way: str) -> None:
    @settings(max_examples=25)
    @given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 6), st.integers(0, 3), st.integers(0, 1 << 30))
    def check(height: int, width: int, count: int, more: int, seed: int) -> None:
        field = field_of(codec, height, width)
        records = records_of(field, count, seed)
        rows = np.random.default_rng(seed).permutation(count + more)[:count]
        found, expected = empty(field, count + more), empty(field, count + more)
        unpack(field, records, rows, found, way)
        unpack(field, records, rows, expected, "plain")
        assert (found == expected).all()
        assert (np.delete(found, rows, axis=0) == UNTOUCHED).all()

    check()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_damaged_record_is_the_same_error_and_those_before_it_are_unpacked(codec: str, at: int) -> None:
    field = field_of(codec)
    records = records_of(field, 5)
    rows = np.array([3, 1, 4, 0, 2])
    sound = empty(field, 5)
    unpack(field, records, rows, sound, "plain")
    records[at] = records[at][:-3]
    messages = []
    for way in (*LOOPS, "plain"):
        out = empty(field, 5)
        with pytest.raises(DamageError) as caught:
            unpack(field, records, rows, out, way)
        messages.append(str(caught.value))
        assert (out[rows[:at]] == sound[rows[:at]]).all()
        assert (out[rows[at + 1 :]] == UNTOUCHED).all()
    assert len(set(messages)) == 1
    assert f"'image' does not unpack as {codec}: {len(records[at]):,} bytes do not unpack to" in messages[0]


@pytest.mark.parametrize("way", ["loop", "plain"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_record_of_more_bytes_than_an_int_counts_is_damage(codec: str, way: str) -> None:
    field = field_of(codec)
    (record,) = records_of(field, 1)
    length = (1 << 32) + len(record)  # as an int, this is the record's own
    only_touched = 0x4000  # MAP_NORESERVE, which Python 3.13 names: only pages that are touched take memory
    with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | only_touched) as memory:
        memory[: len(record)] = record
        block = np.frombuffer(memory, np.uint8)
        try:
            with using(way), pytest.raises(DamageError, match=f"{length:,} bytes"):
                unpack_rows(field, block, np.array([[0, length]]), empty(field, 1), np.array([0]))
        finally:
            del block


@pytest.mark.parametrize("codec", CODECS)
def test_threads_unpack_at_once(codec: str) -> None:
    field = field_of(codec, height=64, width=64)
    records = records_of(field, 8) * 8
    rows = np.arange(len(records))
    expected = empty(field, len(records))
    unpack(field, records, rows, expected, "plain")

    def is_right(_: int) -> bool:
        out = empty(field, len(records))
        unpack(field, records, rows, out, "loop")
        return bool((out == expected).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(32)))


def guarded(length: int) -> np.ndarray[Any, Any]:
    """Return zeros that end where a page begins which ends the process when it is touched."""
    whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), np.uint8)
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(memory.ctypes.data + whole), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return memory[whole - length : whole]


def hostile_form(rng: np.random.Generator, groups: int, *, has_nibbles: bool) -> bytes:
    """Return masks with few to all bits set, and as many values as they ask for, fewer, more or far too many."""

    def mask(length: int) -> np.ndarray[Any, Any]:
        return np.packbits(rng.random((length, 8)) < rng.choice([0, 0.1, 0.5, 0.97, 1]), axis=1)[:, 0]

    first = mask(groups)
    second = mask(int(np.unpackbits(first).sum()))
    count = int(np.unpackbits(second).sum())
    values = rng.integers(0, 256, count, np.uint8)
    if has_nibbles:
        nibbles = rng.integers(1, 16, count + count % 2) * (rng.random(count + count % 2) < rng.choice([0, 0.5, 1]))
        values = values[: np.count_nonzero(nibbles[:count] == 0)]
        values = np.concatenate([(nibbles[::2] | nibbles[1::2] << 4).astype(np.uint8), values])
    form = b"".join(part.tobytes() for part in (first, second, values))
    more = 1 << 16
    ends = (rng.integers(0, len(form) + 1), len(first) + len(second), *(len(form) + by for by in (0, 0, -1, 1, more)))
    return (form + bytes(more))[: rng.choice(ends)]


@pytest.mark.parametrize("way", LOOPS)
@pytest.mark.parametrize("codec", CODECS)
def test_no_sparse_form_leads_the_loop_out_of_its_memory(way: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and scratch memory end at pages that cannot be touched, and a full form's bytes are left in the latter."""
    scratch_for = dct.scratch_for
    monkeypatch.setattr(
        dct, "scratch_for", lambda *of: (found := scratch_for(*of))._replace(memory=guarded(len(found.memory)))
    )
    sound, has_nibbles = 0, codec == "dct-lz4"
    for seed in range(120):
        rng = np.random.default_rng(seed)
        field = field_of(codec, *rng.integers(1, 60, 2).tolist())
        groups = -(-field.packed.nbytes // 64)
        full = b"\xff" * 9 * groups + (b"\0" * 32 * groups if has_nibbles else b"") + b"\x80" * 64 * groups
        hostile = hostile_form(rng, groups, has_nibbles=has_nibbles)
        records = [compressed(codec, each) for each in (full, hostile)]
        found, expected, messages = guarded(2 * field.packed.nbytes).reshape(2, -1), empty(field, 2), []
        for out, how in ((found, way), (expected, "plain")):
            try:
                unpack(field, records, np.array([0, 1]), out, how)
                messages.append("")
            except DamageError as error:
                messages.append(str(error))
        assert messages[0] == messages[1]
        assert (found[0] == 0x80).all()
        assert messages[0] or (found == expected).all()
        sound += not messages[0]
    assert 20 < sound < 100


def test_threads_that_need_the_loops_at_once_compile_them_once() -> None:
    count = itertools.count()

    def compile_slowly() -> int:
        time.sleep(0.02)
        return next(count)

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(compiled, compile_slowly, "") for _ in range(4)]
        assert [each.result() for each in found] == [0] * 4


FORK = """
import os, threading, time
from tpucache.native import compiled
begun = threading.Event()
def compile_slowly():
    begun.set()
    time.sleep(0.1)
thread = threading.Thread(target=compiled, args=(compile_slowly, ""))
thread.start()
begun.wait()
if not (child := os.fork()):
    compiled(compile_slowly, "")
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""


@pytest.mark.slow
def test_a_process_that_is_forked_while_a_thread_compiles_waits_for_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stdout == "0\n", done.stderr
