"""Weights are adapted to a model of timm as timm itself adapts them."""

from __future__ import annotations

import pytest
import torch

from tpucache.training.learn.model import adapt_channels, load_matching

timm = pytest.importorskip("timm", reason="needs timm: `python -m scripts.checks integrations`")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 4), (3, 8), (4, 3), (1, 3)])
def test_channels_are_adapted_as_timm_does(before, after):
    adapt = timm.models._manipulate.adapt_input_conv
    for dtype in (torch.float32, torch.float16):
        weight = torch.randn(4, before, 3, 3).to(dtype)
        assert torch.equal(adapt_channels(weight, after), adapt(after, weight, base_chans=before))


@pytest.mark.slow
def test_a_position_embedding_is_adapted_to_another_image_size_as_timm_does():
    small, large = (timm.create_model("test_vit", num_classes=2, img_size=side) for side in (64, 96))
    weights = small.state_dict()
    expected = timm.layers.resample_abs_pos_embed(weights["pos_embed"], (6, 6), verbose=False)
    matched = load_matching(large, {f"module.{name}": tensor for name, tensor in weights.items()}, "file")
    assert [name for name, *_ in matched.adapted] == ["pos_embed"]
    assert (matched.resized, matched.missing, matched.trouble) == ([], [], "")
    torch.testing.assert_close(large.pos_embed, expected)


@pytest.mark.slow
def test_what_timm_cannot_adapt_is_created_anew_and_says_why():
    wide, square = (timm.create_model("test_vit", num_classes=2, img_size=size) for size in ((48, 64), 64))
    before = square.pos_embed.detach().clone()
    matched = load_matching(square, wide.state_dict(), "file")
    assert [name for name, *_ in matched.resized] == ["pos_embed"]
    assert torch.equal(square.pos_embed, before)
    assert "timm could not adapt them: RuntimeError" in str(matched)
