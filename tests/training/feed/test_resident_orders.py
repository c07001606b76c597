"""Resident data gives the streamed batches in every order and packed form, on plain torch and on XLA's cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resident_orders
from once import once
from resident_orders import BATCH, CODECS, SAMPLES, check_device, make_caches
from thorough import thorough

from tpucache.training.device import CpuDevice

pytestmark = pytest.mark.slow

ON_XLA = """
import json, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from resident_orders import check_device
from tpucache.training.device import open_device

cores = int(sys.argv[3])
print(json.dumps(check_device(Path(sys.argv[2]), open_device("xla", cores), cores)))
"""


#: Of each codec: what compiled in an epoch after all records were uploaded, and the bytes that were received in it.
ROWS_ALONE = {codec: [0, SAMPLES // BATCH * BATCH * 4] for codec in CODECS}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "resident-orders", make_caches)


@pytest.mark.thorough
def test_batches_are_the_streamed_ones_on_plain_torch(caches: Path) -> None:
    assert check_device(caches, CpuDevice(), 1) == ROWS_ALONE


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, *thorough(8)])
def test_batches_are_the_streamed_ones_on_cores_of_xla_which_receive_row_numbers_alone(
    python: Any, caches: Path, tmp_path: Path, cores: int
) -> None:
    script = tmp_path / "orders.py"
    script.write_text(ON_XLA)
    done = python(script, Path(resident_orders.__file__).parent, caches, cores, devices=cores)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ROWS_ALONE
