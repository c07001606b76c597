"""Reading works where what Linux has is missing: a process from which it is hidden reads what all others read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys

import pytest
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader, DependencyError, system
from tpucache.store.lock import check_locks
from tpucache.system import open_memory_file, preadv

#: What macOS and Windows lack, as far as the package uses it: modules, and names in `os` and `fcntl`.
MACOS = {"os": ["posix_fadvise", "memfd_create", "sched_getaffinity", "RWF_NOWAIT"], "fcntl": ["F_OFD_SETLK"]}
WINDOWS = {
    "modules": ["fcntl", "resource"],
    "os": [
        *MACOS["os"],
        *("pread", "preadv", "readv", "writev", "statvfs", "sysconf", "register_at_fork", "fork", "getuid", "fchmod"),
        *("O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW"),
    ],
}

HIDE = """
import ctypes, importlib.abc, json, os, sys

hidden = json.loads(sys.argv[2])

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in (*hidden.get("modules", ()), "torch", "lmdb", "PIL", "tqdm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

for name in hidden.get("modules", ()):
    sys.modules.pop(name, None)
for name in hidden["os"]:
    for module in [os] + [sys.modules[each] for each in ("posix", "nt") if each in sys.modules]:
        if hasattr(module, name):
            delattr(module, name)
if "fcntl" in hidden:
    import fcntl
    for name in hidden["fcntl"]:
        delattr(fcntl, name)
if hidden.get("modules"):
    load = ctypes.CDLL
    def load_named(name, *rest, **named):
        if name is None:
            raise TypeError("a library has a name there")
        return load(name, *rest, **named)
    ctypes.CDLL = load_named
sys.meta_path.insert(0, Hide())
sys.addaudithook(refuse)

import hashlib
from tpucache import CachedDataset, CachedLoader, verify_cache
from tpucache.cli import main

assert verify_cache(sys.argv[1]) == []
found = []
for in_memory in ("auto", False):
    data = CachedDataset(sys.argv[1], variant="epoch", in_memory=in_memory)
    image, label = data[7]
    digest = hashlib.sha256(image.tobytes() + bytes([int(label)]))
    for images, labels in CachedLoader(data, 32, shuffle=True, seed=3, threads=2):
        digest.update(images.tobytes() + labels.tobytes())
    found.append(digest.hexdigest())
print(json.dumps(found))
sys.exit(main(["inspect", sys.argv[1], "--json"]))
"""


def expected(cache):
    """The digest of the same samples, read by this process."""
    data = CachedDataset(cache, variant="epoch", in_memory=False)
    image, label = data[7]
    digest = hashlib.sha256(image.numpy().tobytes() + bytes([int(label)]))
    for images, labels in CachedLoader(data, 32, shuffle=True, seed=3, threads=2):
        digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [MACOS, WINDOWS], ids=["as macOS", "as Windows"])
def test_a_cache_is_read_where_calls_of_linux_are_missing(cache, tmp_path, hidden):
    script = tmp_path / "hide.py"
    script.write_text(HIDE)
    done = subprocess.run(
        [sys.executable, script, cache, json.dumps(hidden)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n")
    assert json.loads(first) == [expected(cache)] * 2
    assert json.loads(rest)["samples"] == 150


def test_reading_at_a_position_without_the_call_gives_the_same(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    with path.open("rb") as file:
        for offset, sizes in ((0, [3, 5]), (90, [4, 20]), (200, [1])):
            real, ours = ([bytearray(size) for size in sizes] for _ in range(2))
            assert system._preadv(file.fileno(), ours, offset) == preadv(file.fileno(), real, offset)
            assert ours == real
        monkeypatch.setattr(system, "pread", system._pread)
        assert system._preadv(file.fileno(), [bytearray(7)], 96) == 4


def test_a_file_in_memory_has_no_name_on_any_system(monkeypatch):
    for _ in range(2):
        number = open_memory_file()
        os.write(number, b"bytes")
        assert os.pread(number, 9, 0) == b"bytes"
        os.close(number)
        monkeypatch.delattr(os, "memfd_create", raising=False)


def test_what_needs_locks_says_so(monkeypatch):
    check_locks("staging", of_open_files=True)
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    check_locks("staging")
    with pytest.raises(DependencyError, match="streaming needs locks of open files, which only Linux has"):
        check_locks("streaming", of_open_files=True)


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted there")
def test_freed_blocks_are_used_again_without_new_pages():
    code = """
import ctypes, resource
from tpucache.system import keep_freed_blocks

libc = ctypes.CDLL(None)
if not hasattr(libc, "gnu_get_libc_version"):
    raise SystemExit(0)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(20 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_blocks()
faults()
assert faults() < 100
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
