"""Where torch is not installed, batches are numpy arrays of the same shapes and values."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader

# A module that is None cannot be imported, as one that is not installed.
WITHOUT = """
import sys
sys.modules["torch"] = None
"""
PROGRAM = """
import json, zlib
import numpy as np
from tpucache import CachedDataset, CachedLoader

def shown(value):
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), zlib.crc32(array.tobytes())]

dataset = CachedDataset(CACHE, variant="epoch")
loader = CachedLoader(dataset, 32, shuffle=True, seed=1)
found = [[shown(part) for part in batch] for _ in range(2) for batch in loader]
dataset.set_epoch(2)
found += [[shown(part) for part in dataset[3]], [shown(dataset.select([5, 1]).labels)]]
print(json.dumps(found))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def shown(value: Any) -> list[Any]:
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), zlib.crc32(array.tobytes())]


@pytest.mark.slow
def test_batches_without_torch_are_those_with_it(cache: Path) -> None:
    done = run(f"{WITHOUT}CACHE = {str(cache)!r}\n{PROGRAM}")
    assert done.returncode == 0, done.stderr
    dataset = CachedDataset(cache, variant="epoch")
    loader = CachedLoader(dataset, 32, shuffle=True, seed=1)
    expected = [[shown(part) for part in batch] for _ in range(2) for batch in loader]
    dataset.set_epoch(2)
    expected += [[shown(part) for part in dataset[3]], [shown(dataset.select([5, 1]).labels)]]
    assert json.loads(done.stdout) == expected


def test_a_broken_torch_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_library_that_torch_needs\n")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport tpucache.loading.tensors")
    assert done.returncode == 1
    assert "a_library_that_torch_needs" in done.stderr.splitlines()[-1]
