"""What a training step is made of, on one backend: `python -m step_parts BACKEND CORES FILE` writes what comes out."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tpucache.ondevice.draws import draw
from tpucache.ondevice.modules import Augment, decoder
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, MASK, Field
from tpucache.training.device import Device, open_device
from tpucache.training.model import UNet
from tpucache.training.settings import TASKS
from tpucache.training.tasks.find import make_task

MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)
BATCH, SIDE = 16, 8
MOVES = AugmentSettings(flip=True, vertical_flip=True, shift=3, rotate=True)
MIXES = AugmentSettings(
    flip=True, vertical_flip=True, shift=3, rotate=True, brightness=0.4, contrast=0.4, saturation=0.4, erase=0.5,
    mixup=0.4, cutmix=1.0, views=2,
)  # fmt: skip
#: What makes whole numbers of pixels, of which a few may be cut off on the other side of one.
OPERATIONS = {
    "rand": AugmentSettings(rand_augment=2, magnitude=20, views=2),
    "trivial": AugmentSettings(trivial_augment=True),
}
ALL = dataclasses.replace(MIXES, tilt=20, crop=True, zoom=0.3, hue=0.2, blur=1.0, grey=0.2)


def augment(device: Device) -> dict[str, Any]:
    """What moves alone, and all together in steps that mix and steps that cut, with and without autocast."""
    rng = np.random.default_rng(0)
    images = device.put(torch.from_numpy(rng.integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)))
    masks = device.put(torch.from_numpy(rng.integers(0, 256, (BATCH, SIDE, SIDE, 1), np.uint8)))
    targets = device.put(torch.from_numpy(rng.random((BATCH, 3), np.float32)))
    found: dict[str, Any] = {}
    for name, settings in {"moves": MOVES, "all": ALL}.items():
        aug = Augment(settings, MEAN, STD, SIDE, SIDE, device.torch_device)
        for step in range(4):
            draws = device.put(torch.from_numpy(draw(settings, 7, step, BATCH, (SIDE, SIDE))))
            with device.autocast(step % 2 == 1):
                fields = aug.fields({IMAGE: images, MASK: masks}, draws)
                mixed = aug.mix(fields[IMAGE], aug.views(targets), draws)
                found[f"{name} {step}"] = [fields[IMAGE], fields[MASK], *mixed]
            device.step_end()
    return found


def operations(device: Device) -> dict[str, Any]:
    """RandAugment and TrivialAugment of images and masks that are not square; and how many graphs were compiled."""
    rng = np.random.default_rng(3)
    images = device.put(torch.from_numpy(rng.integers(0, 256, (BATCH, 11, 14, 3), np.uint8)))
    masks = device.put(torch.from_numpy(rng.integers(0, 256, (BATCH, 11, 14, 1), np.uint8)))
    found: dict[str, Any] = {}
    for name, settings in OPERATIONS.items():
        aug = Augment(settings, [0.0] * 3, [1.0] * 3, 11, 14, device.torch_device)
        compiles = []
        for step in range(4):
            draws = device.put(torch.from_numpy(draw(settings, 7, step, BATCH, (11, 14))))
            fields = aug.fields({IMAGE: images, MASK: masks}, draws)
            found[f"{name} {step}"] = [fields[IMAGE], fields[MASK]]
            device.step_end()
            compiles.append(device.counters().compiles)
        found[f"{name} compiles"] = compiles
    return found


def sizes(device: Device) -> dict[str, Any]:
    """Images of another size, and crops, of each kind of packed image; and how many graphs were compiled."""
    rng = np.random.default_rng(2)
    found: dict[str, Any] = {}
    for codec, quality in (("dct-zstd", 90), ("yuv420", None)):
        field = Field("image", codec, "|u1", (24, 32, 3), quality, quality and "420")
        holder = SimpleNamespace(manifest=SimpleNamespace(fields=[field]))
        whole = decoder(holder, 16).to(device.torch_device)
        crops = decoder(holder, 16, crop=True).to(device.torch_device)
        compiles = []
        for step in range(3):
            batch = device.put(torch.from_numpy(rng.integers(0, 16, (BATCH, *field.packed.shape), np.uint8)))
            draws = device.put(torch.from_numpy(draw(ALL, 7, step, BATCH, (24, 32))))
            found[f"{codec} {step}"] = [whole(batch), crops(batch, draws[:, : draws.shape[1] // 2])]
            device.step_end()
            compiles.append(device.counters().compiles)
        found[f"{codec} compiles"] = compiles
    return found


def tasks(device: Device) -> dict[str, Any]:
    """Each task's losses, gradients and predictions, and a mask's confusion, under autocast."""
    rng = np.random.default_rng(1)
    labels = {
        "classes": rng.integers(0, 3, BATCH),
        "multilabel": rng.integers(0, 2, (BATCH, 3)).astype(np.float32),
        "regression": rng.random((BATCH, 3), np.float32),
        "mask": rng.choice([0, 1, 2, 255], (BATCH, 4, 5)).astype(np.uint8),
    }
    found = {}
    for name in TASKS:
        task, known = make_task(name, 3), device.put(torch.from_numpy(labels[name]))
        shape = (BATCH, 3, 4, 5) if name == "mask" else (BATCH, 3)
        scores = device.put(torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32))).requires_grad_()
        with device.autocast(True):
            targets = task.targets(known, 0.0 if name == "regression" else 0.1)
            loss = task.loss(scores, targets)
            loss.backward()
            found[name] = [loss, scores.grad, task.losses(scores, known), task.predictions(scores)]
            if name == "mask":
                found[name].append(task.confusion(scores, known))
                found[name].append(task.confusion(scores + device.put(not_finite(shape)), known).nan_to_num(-1))
    return found


def not_finite(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros, but for one sample each with NaN, an infinite score, a class that is impossible, and no possible class."""
    added = torch.zeros(shape)
    added[0, 1, 0, 0], added[1, 2, 1, 1], added[2, 0], added[3, :, 2, 2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    return added


def scores(device: Device) -> dict[str, Any]:
    """How often the device compiled for the scores of one batch of masks after another."""
    rng, task, compiles = np.random.default_rng(4), make_task("mask", 3), []
    for _ in range(3):
        outputs = device.put(torch.from_numpy(rng.random((BATCH, 3, 4, 5), np.float32)))
        labels = device.put(torch.from_numpy(rng.integers(0, 3, (BATCH, 4, 5), np.uint8)))
        kept = device.fetch_rows(task.scores(outputs, labels))
        device.step_end()
        compiles.append(device.counters().compiles)
        del kept
    return {"compiles": compiles}


def models(device: Device) -> dict[str, Any]:
    """What a small U-Net gives, with sides that do not halve."""
    torch.manual_seed(0)
    model = UNet(3, (4, 8, 8)).to(device.torch_device).eval()
    with torch.no_grad():
        return {"unet": model(device.put(torch.randn(BATCH, 3, 13, 10)))}


def run(device: Device) -> dict[str, Any]:
    """Return everything, on the host."""
    found: dict[str, Any] = _to_host(
        {
            "augment": augment(device),
            "operations": operations(device),
            "sizes": sizes(device),
            "tasks": tasks(device),
            "scores": scores(device),
            "models": models(device),
        }
    )
    return found


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    return [_to_host(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    torch.save(run(open_device(sys.argv[1], int(sys.argv[2]))), sys.argv[3])
