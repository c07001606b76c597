"""The table and the picture of formats by their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from scripts.bench.formats import to_format, to_rows
from scripts.bench.picture import draw_formats

RATES = {
    "tpucache dct-lz4 1": [1000.0, 2000.0, 3000.0],
    "tpucache dct-lz4 2": [3000.0, 4000.0, 5000.0],
    "ffcv jpeg90 2": [100.0, 400.0, 1000.0],
}
READERS = {name: {"name": name, "rates": rates} for name, rates in RATES.items()}
FINISH = {"torch": {"dct-lz4": 1.25}, "xla": {}}
SIZES = {"tpucache dct-lz4": 24_055.3, "ffcv jpeg90": 25_000.0}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_row_has_the_bytes_the_loss_the_rates_and_their_ratios_round_by_round(tmp_path: Path) -> None:
    psnr = {"tpucache dct-lz4 2": 38.51, "tpucache dct-lz4 1": 38.51, "ffcv jpeg90 2": None}
    formats = [to_format(name, READERS, size, psnr, FINISH) for name, size in SIZES.items()]
    ours, theirs = to_rows({"formats": formats})[1:]
    assert ours[:5] == ["tpucache dct-lz4", "24.1", "38.5", "2,000", "4,000"]
    assert ours[5:] == ["10.00", "500", "1.25"]  # nothing beside raw pixels and slipstream, nor by XLA: no such columns
    assert theirs == ["ffcv jpeg90", "25.0", "exact", "", "400", "1.00", "", ""]
    draw_formats({"formats": formats, "size": 224, "batch": 256, "machine": {"cpus": 2}}, tmp_path / "formats.png")
    with Image.open(tmp_path / "formats.png") as image:
        assert image.width == 800
