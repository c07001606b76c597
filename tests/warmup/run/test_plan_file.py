"""What an unfinished build says of itself is read as strictly as what comes from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tpucache import Recipe, build_cache
from tpucache.errors import BuildError, SampleError
from tpucache.store.format import WORK_NAME


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"before": "", "before": "x"}', "the key 'before' is there twice"),
        ('{"before": ', "cannot be read"),
        ("[]", "it is a list"),
    ],
)
def test_a_plan_that_cannot_be_read_is_a_build_error(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "b.png").write_bytes(b"no image")
    with pytest.raises(SampleError):
        build_cache(tmp_path / "images", tmp_path / "cache", Recipe(size=8), jobs=1)
    (tmp_path / "cache" / WORK_NAME / "plan.json").write_text(text)
    with pytest.raises(BuildError, match=reason):
        build_cache(tmp_path / "images", tmp_path / "cache", Recipe(size=8), jobs=1)
