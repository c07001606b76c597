"""Trainers that save a loader's state continue in the middle of an epoch with exactly the samples not yet seen."""

from __future__ import annotations

import pytest
import torch

from tpucache import CachedDataset, CachedLoader

pytestmark = pytest.mark.filterwarnings("ignore")  # they warn of themselves


def tell_apart(images: torch.Tensor) -> list[bytes]:
    """Return the samples' bytes: all images of the cache differ."""
    return [image.contiguous().numpy().tobytes() for image in images]


def make_loader(cache, epoch: int = 0) -> CachedLoader:
    loader = CachedLoader(CachedDataset(cache), 32, shuffle=True)
    loader.set_epoch(epoch)
    return loader


def test_lightning_resumes_inside_an_epoch(cache, needs, tmp_path):
    needs("lightning")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[bytes] = []

        def training_step(self, batch, step):
            self.seen += tell_apart(batch[0])
            return self.weight * 1.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(epochs, checkpoint=None):
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=[saving],
            accelerator="cpu",
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Recorder()
        trainer.fit(model, make_loader(cache), ckpt_path=checkpoint)
        return model.seen

    before = run(2)[: 150 + 2 * 32]  # five batches an epoch: the seventh is the second epoch's second
    after = run(3, tmp_path / "step=7.ckpt")
    loaders = [make_loader(cache, epoch) for epoch in range(3)]
    assert before + after == [sample for loader in loaders for images, _ in loader for sample in tell_apart(images)]


def test_accelerate_keeps_the_place_in_the_epoch(cache, needs, tmp_path):
    needs("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = make_loader(cache, 1)
    accelerator.register_for_checkpointing(loader)
    assert accelerator.prepare(loader) is loader
    batches = iter(loader)
    before = [sample for _ in range(2) for sample in tell_apart(next(batches)[0])]
    accelerator.save_state(str(tmp_path / "state"))
    rest = [sample for images, _ in batches for sample in tell_apart(images)]
    loader.set_epoch(0)
    accelerator.load_state(str(tmp_path / "state"))
    again = [sample for images, _ in loader for sample in tell_apart(images)]
    assert rest == again
    assert len(set(before + again)) == 150
