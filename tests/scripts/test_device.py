"""The benchmark of a device: all ways feed the same loop, and the table says where it was measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.bench import device as bench
from tpucache import UsageError
from tpucache.training.device import CpuDevice

OPTIONS = {"model": "resnet50", "batch_size": 4, "seconds": 0.05, "size": 24, "threads": 1, "workers": 0, "rounds": 2}


def tiny() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    samples = [(torch.zeros(24, 24, 3, dtype=torch.uint8), 1)] * 9
    monkeypatch.setattr(bench, "OnTheFly", lambda *_: samples)
    monkeypatch.setattr(bench, "resnet50", tiny)
    return argparse.Namespace(**OPTIONS, bf16=True, compile=False)


@pytest.mark.thorough
def test_every_way_is_measured_in_three_ways(options: argparse.Namespace, cache: Path, tmp_path: Path) -> None:
    for kind in bench.KINDS:
        (tmp_path / f"cache-{kind}").symlink_to(cache)
    device: Any = CpuDevice()
    ways = bench.open_ways(tmp_path, tmp_path, device, options)
    dataset = bench.CachedDataset(cache)
    trainer = bench.Trainer(device, dataset, options)
    paces = {name: [trainer.turn(way)] * 2 for name, way in ways.items()}
    report = bench.to_report(paces, device, len(dataset), options)
    heading, *rows = bench.to_rows(report)
    streamed, resident = [f"tpucache {kind}" for kind in bench.KINDS], ["tpucache raw, resident"]
    assert [row[0] for row in rows] == [*streamed, *resident, "tpucache dct-lz4, resident", "on the fly"]
    assert all(len(row) == len(heading) for row in rows)
    assert all(way["steps"] >= 3 and way["ceiling_images_per_second"]["min"] > 0 for way in report["ways"].values())
    assert all(0 <= way[idle] <= 1 for way in report["ways"].values() for idle in ("waited", "device_idle"))
    assert f"the processor, backend torch, torch {torch.__version__}" in bench.to_notes(report)
    assert f"ResNet-50 in bfloat16, {len(dataset)} images of 24x24, batches of 4" in bench.to_notes(report)
    options.batch_size = len(dataset) + 1
    with pytest.raises(UsageError, match=f"more than the {len(dataset)} images"):
        bench.open_ways(tmp_path, tmp_path, device, options)
