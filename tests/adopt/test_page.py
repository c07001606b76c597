"""The blocks of docs/adopt.md run as they are shown, those of frameworks where these are installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from thorough import thorough

PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
FRAMEWORKS = ("timm", "keras", "lightning")


def blocks(framework: str = "") -> list[str]:
    """Return the blocks that import a framework, or those that import none."""
    found = {
        name: [text for text in BLOCKS if re.search(rf"^import {name}\b", text, re.MULTILINE)] for name in FRAMEWORKS
    }
    return (
        found[framework] if framework else [text for text in BLOCKS if all(text not in each for each in found.values())]
    )


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small photographs in two classes, where the page has them."""
    for number in range(4):
        path = tmp_path / "photos" / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 12, 3), 50 * number, np.uint8)).save(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text: str) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text.replace("num_workers=2", "num_workers=0"), str(PAGE), "exec"), space)
    return space


def needs(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}: `python -m scripts.checks integrations` installs it and runs this")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_blocks_of_torch_alone_run(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks()) == 4
    for text in blocks():
        run(text)
    assert "torch.Size([3, 32, 32]) bright" in capsys.readouterr().out


@pytest.mark.slow
def test_the_line_for_timm_makes_its_data_set_ours(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("timm")
    import timm.data
    import timm.data.dataset_factory as factory

    monkeypatch.setattr(factory, "ImageFolder", factory.ImageFolder)
    (text,) = blocks("timm")
    ours = run(text)["tpucache"].ImageFolder
    dataset = timm.data.create_dataset("torch/image_folder", root="photos", split="train")
    assert type(dataset) is ours
    loader = timm.data.create_loader(dataset, (3, 32, 32), 2, use_prefetcher=False, num_workers=0)
    images, labels = next(iter(loader))
    assert (images.shape, labels.tolist()) == ((2, 3, 32, 32), [0, 0])


@pytest.mark.slow
def test_the_batches_for_keras_are_those_of_a_whole_epoch(photos: Path) -> None:
    needs("keras")
    (text,) = blocks("keras")
    space = run(text.replace(", 32)", ", 2)"))
    batches = space["train"]
    assert len(batches) == 2
    assert sorted(label for at in range(2) for label in batches[at][1].tolist()) == [0, 0, 1, 1]
    assert batches[0][0].shape == (2, 224, 224, 3)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["a stand-in", *thorough("lightning")])
def test_the_data_module_of_lightning_gives_each_rank_its_part(
    library: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "lightning":
        needs(library)
    else:  # importing the library takes as long as all else here
        monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(LightningDataModule=object))
    (text,) = blocks("lightning")
    module = run(text.replace(" 32,", " 1,"))["Photos"]()
    module.prepare_data()
    module.setup("fit")
    module.trainer = type("Trainer", (), {"global_rank": 1, "world_size": 2})()
    batches = list(module.train_dataloader())
    assert [images.shape for images, _ in batches] == [(1, 3, 224, 224)] * 2
