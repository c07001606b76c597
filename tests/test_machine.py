"""What the machine has to give, read from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache.machine import available_memory

GB = 1 << 30


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """A /proc/meminfo of 16 GiB, of which 10 are available, and an empty cgroup."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\nHugePages_Total: 0\n")
    return meminfo, tmp_path / "cgroup"


def write(cgroup: Path, **files: str) -> None:
    cgroup.mkdir(parents=True)
    for name, text in files.items():
        (cgroup / name.replace("memory_", "memory.", 1)).write_text(text)


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
