"""What the machine has to give, read from the kernel's files."""

from __future__ import annotations

import hashlib
import os
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


def write(cgroup: Path, **files: str) -> None:
    cgroup.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (cgroup / name.replace("memory_", "memory.", 1)).write_text(text)


def test_a_system_that_does_not_say_what_is_free_has_half_of_its_memory(tmp_path, monkeypatch):
    nothing = tmp_path / "meminfo"
    assert available_memory(nothing) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available_memory(nothing) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    monkeypatch.delattr(os, "sysconf")
    assert available_memory(nothing) == 0


def test_without_a_container_it_is_the_machines(kernel):
    assert available_memory(*kernel) == 10 * GB


def test_a_container_gets_its_limit_less_what_it_holds_beside_the_page_cache(kernel):
    meminfo, cgroup = kernel
    write(cgroup, memory_max=f"{4 * GB}\n", memory_current=f"{3 * GB}\n", memory_stat=f"anon 5\nfile {2 * GB}\n")
    assert available_memory(meminfo, cgroup) == 3 * GB


def test_the_first_version_of_cgroups_counts_too(kernel):
    meminfo, cgroup = kernel
    write(
        cgroup / "memory",
        memory_limit_in_bytes=str(2 * GB),
        memory_usage_in_bytes=str(GB),
        memory_stat="cache 1\ntotal_cache 0\n",
    )
    assert available_memory(meminfo, cgroup) == GB


def test_a_container_without_a_limit_gets_the_machines(kernel):
    meminfo, cgroup = kernel
    write(cgroup, memory_max="max\n", memory_current="1\n", memory_stat="file 0\n")
    assert available_memory(meminfo, cgroup) == 10 * GB


def test_a_container_over_its_limit_has_nothing(kernel):
    meminfo, cgroup = kernel
    write(cgroup, memory_max="10", memory_current="20", memory_stat="file 0")
    assert available_memory(meminfo, cgroup) == 0


def test_where_nothing_can_be_learnt_there_is_nothing(tmp_path):
    assert available_memory(tmp_path / "none", tmp_path) == 0


def test_this_machine_has_some():
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
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


def test_memory_has_the_limit_of_its_container_where_there_is_one(kernel):
    meminfo, cgroup = kernel
    assert measure_memory(meminfo, cgroup) == Memory(16 * GB, None, 10 * GB)
    write(cgroup / "memory", memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="0")
    assert measure_memory(meminfo, cgroup).limit is None
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(str(2 * GB))
    assert measure_memory(meminfo, cgroup).limit == 2 * GB


def test_memory_that_is_not_reported_is_zero(tmp_path):
    assert measure_memory(tmp_path / "none", tmp_path) == Memory(0, None, 0)


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
    for number in range(4):
        (tmp_path / f"accel{number}").touch()
    found = find_tpu(tmp_path / "none", tmp_path)
    assert found is not None
    assert (found.generation, found.chips) == ("unknown", 4)


def test_files_in_shared_memory_are_not_free(kernel):
    meminfo, cgroup = kernel
    statistics = f"anon 5\nfile {2 * GB}\nshmem {GB}\n"
    write(cgroup, memory_max=f"{4 * GB}\n", memory_current=f"{3 * GB}\n", memory_stat=statistics)
    assert available_memory(meminfo, cgroup) == 2 * GB
    statistics = f"cache 7\nshmem 3\ntotal_cache {3 * GB}\ntotal_shmem {2 * GB}\n"
    usage = {"memory_usage_in_bytes": str(3 * GB), "memory_stat": statistics}
    write(cgroup / "memory", memory_limit_in_bytes=str(3 * GB), **usage)
    assert available_memory(meminfo, cgroup) == GB


def test_a_limit_that_slows_down_counts_as_one(kernel):
    meminfo, cgroup = kernel
    write(cgroup, memory_max="max\n", memory_high=f"{2 * GB}\n", memory_current=f"{GB}\n", memory_stat="file 0\n")
    assert measure_memory(meminfo, cgroup) == Memory(16 * GB, 2 * GB, GB)


def test_without_statistics_nothing_of_what_is_used_counts_as_free(kernel):
    meminfo, cgroup = kernel
    write(cgroup, memory_max=str(4 * GB), memory_current=str(3 * GB))
    assert available_memory(meminfo, cgroup) == GB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("narrow", ["", "a", "a/b", "a/b/c"])
def test_the_narrowest_of_nested_containers_counts(version, narrow, kernel, tmp_path):
    meminfo, cgroup = kernel
    own = tmp_path / "own"
    own.write_text("0::/a/b/c\n" if version == 2 else "9:cpuset:/x\n8:hugetlb,memory:/a/b/c\n0::/\n")
    cgroup = cgroup if version == 2 else cgroup / "memory"
    for path in ("", "a", "a/b", "a/b/c"):
        limit, used = (3 * GB, 2 * GB) if path == narrow else (9 * GB, 4 * GB)
        if version == 2:
            write(cgroup / path, memory_max=str(limit), memory_current=str(used), memory_stat="file 0")
        else:
            names = {"memory_limit_in_bytes": str(limit), "memory_usage_in_bytes": str(used)}
            write(cgroup / path, **names, memory_stat="total_cache 0")
    cgroup = cgroup if version == 2 else cgroup.parent
    assert available_memory(meminfo, cgroup, own) == GB
    assert measure_memory(meminfo, cgroup, own).limit == 3 * GB


def test_a_limit_above_what_is_visible_counts(kernel, tmp_path):
    meminfo, cgroup = kernel
    statistics = f"hierarchical_memory_limit {2 * GB}\ntotal_cache 0\n"
    usage = {"memory_usage_in_bytes": str(GB), "memory_stat": statistics}
    write(cgroup / "memory", memory_limit_in_bytes="9223372036854771712", **usage)
    assert measure_memory(meminfo, cgroup) == Memory(16 * GB, 2 * GB, GB)


@pytest.mark.parametrize("text", ["", "0::/../other\n", "4:memory:/../../x\n", "what\n", "1:memory\n"])
def test_a_container_whose_place_is_not_visible_gets_the_limit_of_its_root(text, kernel, tmp_path):
    meminfo, cgroup = kernel
    own = tmp_path / "own"
    own.write_text(text)
    write(cgroup, memory_max=str(4 * GB), memory_current=str(GB), memory_stat="file 0")
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
