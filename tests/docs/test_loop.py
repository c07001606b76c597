"""The loop in docs/loop.md runs unchanged, on plain torch and on XLA."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from thorough import thorough

PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
PLAIN = "open_device()"


@pytest.mark.slow
@pytest.mark.parametrize("device", [PLAIN, *thorough(pytest.param('open_device("xla")', marks=pytest.mark.xla))])
def test_the_loop_of_the_page_trains(cache, tmp_path, device, xla_forks, xla_flags):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert PLAIN in code
    (tmp_path / "loop.py").write_text(code.replace(PLAIN, device))
    (tmp_path / "cache").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "cache" / name).symlink_to(cache)
    done = xla_forks.run(["loop.py"], {**os.environ, "XLA_FLAGS": xla_flags, "PJRT_DEVICE": "CPU"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *epochs, accuracy = done.stdout.splitlines()
    assert len(epochs) == 5
    assert float(accuracy.split()[1]) > 0.6
    assert accuracy.endswith("of 150")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert all(tensor.device.type == "cpu" for tensor in weights.values())
