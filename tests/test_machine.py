"""What the machine has to give, read from the kernel's files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader
from tpucache.machine import (
    Cores,
    Memory,
    Tpu,
    available_memory,
    count_cores,
    find_tpu,
    measure_memory,
    measure_space,
    network_file_system,
)

GB = 1 << 30


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """A /proc/meminfo of 16 GiB, of which 10 are available, and an empty cgroup."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\nHugePages_Total: 0\n")
    return meminfo, tmp_path / "cgroup"


def write(cgroup: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(f"{text}\n")


V1 = "memory/memory."
NO_LIMIT = 9223372036854771712
#: Files of a container; its limit and what is available, in GiB.
CONTAINERS: list[tuple[dict[str, object], int | None, float]] = [
    ({}, None, 10),
    ({"memory.max": 4 * GB, "memory.current": 3 * GB, "memory.stat": f"anon 5\nfile {2 * GB}"}, 4, 3),
    ({"memory.max": 4 * GB, "memory.current": 3 * GB}, 4, 1),  # nothing of what is used counts as free
    ({"memory.max": "max", "memory.current": 1, "memory.stat": "file 0"}, None, 10),
    ({"memory.max": GB, "memory.current": 2 * GB, "memory.stat": "file 0"}, 1, 0),
    ({"memory.max": "max", "memory.high": 2 * GB, "memory.current": GB, "memory.stat": "file 0"}, 2, 1),
    # Files in shared memory are part of the page cache, and are not free.
    ({"memory.max": 4 * GB, "memory.current": 3 * GB, "memory.stat": f"file {2 * GB}\nshmem {GB}"}, 4, 2),
    ({V1 + "limit_in_bytes": 2 * GB, V1 + "usage_in_bytes": GB, V1 + "stat": "cache 1\ntotal_cache 0"}, 2, 1),
    ({V1 + "limit_in_bytes": NO_LIMIT, V1 + "usage_in_bytes": 0}, None, 10),
]


@pytest.mark.parametrize(("files", "limit", "available"), CONTAINERS)
def test_a_container_has_its_limit_less_what_it_holds_beside_the_page_cache(files, limit, available, kernel):
    meminfo, cgroup = kernel
    write(cgroup, files)
    expected = Memory(16 * GB, None if limit is None else limit * GB, available * GB)
    assert measure_memory(meminfo, cgroup) == expected


def test_where_nothing_can_be_learnt_there_is_nothing(tmp_path):
    assert measure_memory(tmp_path / "none", tmp_path) == Memory(0, None, 0)
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "what"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_processor_time_is_read_from_either_version_of_cgroups(files, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cores(tmp_path).quota == quota


@pytest.mark.parametrize(
    ("cores", "usable"),
    [(Cores(8, 8, None), 8), (Cores(8, 2, None), 2), (Cores(8, 8, 1.5), 2), (Cores(8, 8, 0.2), 1), (Cores(8, 2, 6), 2)],
)
def test_usable_cores_are_the_fewest_of_affinity_and_quota(cores, usable):
    assert cores.usable == usable


def test_space_is_that_of_the_file_system_under_a_folder(tmp_path):
    space = measure_space(tmp_path)
    assert space is not None
    assert 0 < space.free < space.total
    assert measure_space(tmp_path / "none") is None


def test_tpu_chips_are_found_on_the_bus_and_by_their_files(tmp_path):
    sys, dev = tmp_path / "sys", tmp_path / "dev"
    assert find_tpu(sys, dev) is None
    cards = [("0x1ae0", "0x0063")] * 8 + [("0x8086", "0x0063"), ("0x1ae0", "0x0042")]
    for number, (vendor, device) in enumerate(cards):
        card = sys / "bus/pci/devices" / f"0000:00:{number:02d}.0"
        card.mkdir(parents=True)
        (card / "vendor").write_text(f"{vendor}\n")
        (card / "device").write_text(f"{device}\n")
    (dev / "vfio").mkdir(parents=True)
    for name in ("0", "1", "vfio"):
        (dev / "vfio" / name).touch()
    assert find_tpu(sys, dev) == Tpu("v5e", 8, (f"{dev}/vfio/0", f"{dev}/vfio/1"))


def test_chips_that_only_their_files_tell_of_count(tmp_path):
    files = [tmp_path / f"accel{number}" for number in range(4)]
    for file in files:
        file.touch()
    assert find_tpu(tmp_path / "none", tmp_path) == Tpu("unknown", 4, tuple(map(str, files)))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("narrow", ["", "a", "a/b", "a/b/c"])
def test_the_narrowest_of_nested_containers_counts(version, narrow, kernel, tmp_path):
    meminfo, cgroup = kernel
    own = tmp_path / "own"
    own.write_text("0::/a/b/c\n" if version == 2 else "9:cpuset:/x\n8:hugetlb,memory:/a/b/c\n0::/\n")
    cgroup = cgroup if version == 2 else cgroup / "memory"
    for path in ("", "a", "a/b", "a/b/c"):
        limit, used = (3 * GB, 2 * GB) if path == narrow else (9 * GB, 4 * GB)
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        write(cgroup / path, dict(zip((f"memory.{name}" for name in names), (limit, used), strict=True)))
    cgroup = cgroup if version == 2 else cgroup.parent
    assert available_memory(meminfo, cgroup, own) == GB
    assert measure_memory(meminfo, cgroup, own).limit == 3 * GB


@pytest.mark.parametrize("text", ["", "0::/../other\n", "4:memory:/../../x\n", "what\n", "1:memory\n"])
def test_a_container_whose_place_is_not_visible_gets_the_limit_of_its_root(text, kernel, tmp_path):
    meminfo, cgroup = kernel
    own = tmp_path / "own"
    own.write_text(text)
    write(cgroup, {"memory.max": 4 * GB, "memory.current": GB})
    assert available_memory(meminfo, cgroup, own) == 3 * GB


@pytest.mark.parametrize("narrow", ["", "a", "a/b"])
def test_the_narrowest_quota_of_nested_containers_counts(narrow, tmp_path):
    own = tmp_path / "own"
    own.write_text("3:cpu,cpuacct:/a/b\n0::/a/b\n")
    for path in ("", "a", "a/b"):
        for name, text in (("cpu.cfs_quota_us", "200000" if path == narrow else "-1"), ("cpu.cfs_period_us", "100000")):
            (tmp_path / "one/cpu" / path).mkdir(parents=True, exist_ok=True)
            (tmp_path / "one/cpu" / path / name).write_text(text)
        (tmp_path / "two" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / path / "cpu.max").write_text("150000 100000" if path == narrow else "300000 100000")
    assert count_cores(tmp_path / "one", own).quota == 2
    assert count_cores(tmp_path / "two", own).quota == 1.5


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("bucket/cache", "fuse.gcsfuse"),
        ("bucket", "fuse.gcsfuse"),
        ("bucket two", "nfs4"),
        ("Bücket", "nfs4"),
        ("buckets", None),
        ("bucket/local", None),
        ("overlay", None),
    ],
)
def test_a_file_system_across_a_network_is_known_by_its_mount(place, kind, tmp_path):
    mounts, top = tmp_path / "mounts", str(tmp_path).replace(" ", "\\040")
    lines = [
        "/dev/vda / ext4 rw 0 0",
        f"bucket {top}/bucket fuse.gcsfuse ro 0 0",
        f"tmpfs {top}/bucket/local tmpfs rw 0 0",
        f"there:/x {top}/bucket\\040two nfs4 rw 0 0",
        f"there:/y {top}/Bücket nfs4 rw 0 0",
        f"overlay {top}/overlay fuse.fuse-overlayfs rw 0 0",
        "torn",
    ]
    mounts.write_text("\n".join(lines))
    assert network_file_system(tmp_path / place, mounts) == kind
    assert network_file_system(tmp_path / place, tmp_path / "none") is None


#: What macOS lacks of what the package uses.
MACOS = """
import importlib.abc, os, sys, fcntl

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "lmdb", "PIL", "tqdm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

for name in ("posix_fadvise", "memfd_create", "sched_getaffinity", "RWF_NOWAIT"):
    for module in (os, sys.modules["posix"]):
        delattr(module, name) if hasattr(module, name) else None
del fcntl.F_OFD_SETLK
sys.meta_path.insert(0, Hide())
sys.addaudithook(refuse)

from tpucache import CachedDataset, CachedLoader, verify_cache

assert verify_cache(sys.argv[1]) == []
for in_memory in ("auto", False):
    data = CachedDataset(sys.argv[1], variant="epoch", in_memory=in_memory)
    for images, labels in CachedLoader(data, 32, shuffle=True, seed=3, threads=2):
        print(hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_cache_is_read_where_calls_of_linux_are_missing(cache: Path) -> None:
    data = CachedDataset(cache, variant="epoch", in_memory=False)
    batches = CachedLoader(data, 32, shuffle=True, seed=3, threads=2)
    expected = [hashlib.sha256(each.numpy().tobytes() + of.numpy().tobytes()).hexdigest() for each, of in batches]
    words = [sys.executable, "-c", f"import hashlib{MACOS}", cache]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == expected * 2


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted there")
def test_freed_blocks_are_used_again_without_new_pages():
    code = """
import ctypes, resource
from tpucache.machine import keep_freed_blocks

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
