"""What the pages show is run as shown, with a shorter measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for layouts


@pytest.fixture(scope="session", autouse=True)
def measurements_are_short(short_runs: None) -> None:
    """Of `bench` and of runs: that they answer is tested, not what."""


@pytest.fixture
def without(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return the environment in which importing these libraries fails, in every Python that is started with it."""

    def make(*libraries: str) -> dict[str, str]:
        folder = tmp_path / "without"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({libraries}))\n")
        path = os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path.strip(os.pathsep)}

    return make


#: What reading and training never need.
EXTRAS = (
    "PIL", "albumentations", "cv2", "cykooz", "google_crc32c", "joblib", "llvmlite", "lmdb", "lz4", "matplotlib",
    "numba", "pandas", "pyarrow", "pydicom", "safetensors", "simplejpeg", "tensorboard", "timm", "torch_xla",
    "torchvision", "tqdm", "zstandard",
)  # fmt: skip


#: Has a fork import tpucache anew, with numpy and torch alone.
FORGETTING = f"""
import sys
libraries = {(*EXTRAS, "jax", "flax", "optax")}
for name in list(sys.modules):
    if name.split(".")[0] in ("tpucache", *libraries):
        del sys.modules[name]
sys.modules.update(dict.fromkeys(libraries))  # None is what makes an import fail
"""


@pytest.fixture
def run_torch_alone(torch_forks: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The function `run_torch_alone(code, *arguments, **environment)`: what a Python does with numpy and torch alone.

    It has imported torch before. Its working folder is the test's.
    """

    def run(code: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "alone.py").write_text(f"{FORGETTING}\nsys.path.append({str(Path(__file__).parent)!r})\n{code}")
        words = ["alone.py", *map(str, arguments)]
        done: subprocess.CompletedProcess[str] = torch_forks.run(
            words, {**os.environ, **more}, cwd=tmp_path, finalise=True
        )
        return done

    return run


@pytest.fixture
def jax_alone(without: Callable[..., dict[str, str]]) -> dict[str, str]:
    """An environment of numpy and JAX, on four simulated devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    return {**without(*EXTRAS, "torch"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
