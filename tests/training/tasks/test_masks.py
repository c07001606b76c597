"""Masks are read without their images, a batch at a time; what is no class counts nowhere, or is refused."""

from __future__ import annotations

import dataclasses
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import best_of, learner_on, predictor_of, train_on
from thorough import thorough

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.store.reader import ShardReader
from tpucache.training.data import check_fit, choose_task
from tpucache.training.device import CpuDevice
from tpucache.training.device.base import DeviceBatch, Processes
from tpucache.training.evaluation import evaluate
from tpucache.training.learner import Learner
from tpucache.training.prediction import predict
from tpucache.training.schedule import Rates
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task
from tpucache.training.tasks.mask import Mask

SETTINGS = TrainSettings(model="failing_code:dense", task="mask", mask_classes=3, epochs=1, batch_size=20, lr=0.01)
CLASSES = 3


@pytest.fixture(scope="module", params=["raw", *thorough("png")])
def masks(request, tmp_path_factory):
    """Images with masks of two of three classes, with pixels of no class."""
    directory = tmp_path_factory.mktemp("masks") / request.param
    build_cache("failing_data:void_squares", directory, Recipe(size=64, codec=request.param), jobs=1)
    return CachedDataset(directory)


def all_masks(dataset):
    return np.stack([dataset[number]["mask"].numpy()[..., 0] for number in range(len(dataset))])


@pytest.mark.slow
def test_checking_reads_no_image_and_takes_little_memory(masks, monkeypatch):
    task, read, scatter = make_task("mask", CLASSES), [], ShardReader.scatter

    def counted(self, rows, views, **options):
        read.append(int(rows["length"].sum()))
        scatter(self, rows, views, **options)

    many = masks.select(np.tile(np.arange(len(masks)), 15))  # 3,000 masks of 4 KiB: 12 MB
    monkeypatch.setattr(ShardReader, "scatter", counted)
    task.check_dataset(masks, is_learned=True)  # whatever is imported and opened once
    read.clear()
    tracemalloc.start()
    check_fit(SETTINGS, task, many, None, CpuDevice())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < sum(read) <= len(many) * (64 * 64 + 100)
    assert peak < 48e6  # ten masks' bytes each would be 120 MB


@pytest.mark.slow
def test_evaluation_is_plain_torchs_over_the_pixels_that_have_a_class(masks):
    learner = learner_on(SETTINGS, masks)
    images = torch.stack([masks[number]["image"] for number in range(len(masks))]).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (learner.mean, learner.std))
    with torch.no_grad():
        outputs = learner.model.eval()((images - mean) / std)
    truth = torch.from_numpy(all_masks(masks).astype(np.int64))
    each = torch.nn.functional.cross_entropy(outputs, truth, reduction="none", ignore_index=255)
    kept, predicted = truth != 255, outputs.argmax(1)
    found = evaluate(learner, masks)
    assert found["accuracy"] == pytest.approx((predicted == truth)[kept].float().mean().item(), abs=1e-6)
    assert found["loss"] == pytest.approx((each.sum((1, 2)) / kept.sum((1, 2))).mean().item(), rel=1e-4)
    ious = []
    for number in range(CLASSES):
        inside, found_inside = (truth == number)[kept], (predicted == number)[kept]
        if (inside | found_inside).any():
            ious.append(((inside & found_inside).sum() / (inside | found_inside).sum()).item())
    assert found["iou"] == pytest.approx(np.mean(ious), abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_confusion_of_outputs_that_are_not_finite_is_nan(bad):
    task, outputs = make_task("mask", 3), torch.randn(2, 3, 4, 4)
    labels = torch.randint(0, 3, (2, 4, 4))
    outputs[1, 0] = -torch.inf  # this is no failure: the class is impossible
    counts = task.scores(outputs, labels)
    assert counts.isfinite().all()
    outputs[1, 2, 3, 3] = bad
    spoiled = task.scores(outputs, labels)
    assert torch.equal(spoiled[0], counts[0])
    assert spoiled[1].isnan().all()
    assert np.isnan(list(task.metrics(spoiled.numpy(), labels.numpy()).values())).all()


@pytest.mark.slow
def test_maps_that_are_not_finite_are_refused(masks, tmp_path):
    train_on(tmp_path, SETTINGS, masks)
    best = best_of(tmp_path)
    assert predict(predictor_of(tmp_path), [masks], tmp_path / "good.csv", 16).samples == len(masks)
    best["model"]["weight"][0] = float("nan")
    torch.save(best, tmp_path / "best.pt")
    with pytest.raises(TrainingError, match="not finite"):
        predict(predictor_of(tmp_path), [masks], tmp_path / "bad.csv", 16)
    assert not (tmp_path / "bad.csv").exists()


def task_of(row):
    """Return a task that finds two masks of one row of these pixels in every dataset."""

    class Given(Mask):
        def label_batches(self, dataset):
            return iter([np.array([[row]], np.uint8)] * 2)

    return Given(3)


@pytest.mark.parametrize(
    ("masks_of", "message"),
    [
        ([0, 0, 255], r"33\.3% of the masks' pixels are 255.*1 of 3 classes.*--mask-values scale"),
        ([255], r"100\.0% of the masks' pixels are 255"),
        ([1, *[255] * 999], r"99\.9% of the masks' pixels are 255"),
    ],
)
def test_masks_that_leave_nothing_to_learn_are_refused(masks, masks_of, message):
    with pytest.raises(UsageError, match=message):
        check_fit(SETTINGS, task_of(masks_of), masks, None, CpuDevice())


@pytest.mark.parametrize("masks_of", [[0, 1, 255], [1, 255], [0, 0], [0, 1, *[255] * 97]])
def test_masks_with_pixels_of_no_class_are_trained_on(masks, masks_of):
    check_fit(SETTINGS, task_of(masks_of), masks, None, CpuDevice())


def test_nothing_counted_is_no_accuracy():
    labels = np.full((2, 3, 3), 255, np.uint8)
    scores = make_task("mask", 3).scores(torch.randn(2, 3, 3, 3), torch.from_numpy(labels))
    assert np.isnan(list(make_task("mask", 3).metrics(scores.numpy(), labels).values())).all()


def test_a_cache_of_masks_is_the_mask_task_without_being_asked(masks):
    assert choose_task(TrainSettings(mask_classes=3), masks) == make_task("mask", 3)
    with pytest.raises(UsageError, match="give --mask-classes"):
        choose_task(TrainSettings(), masks)


def test_more_classes_than_a_map_of_bytes_holds_are_refused(masks):
    assert choose_task(TrainSettings(mask_classes=255), masks).outputs == 255
    with pytest.raises(UsageError, match="at most 255 classes, 0 to 254"):
        choose_task(TrainSettings(mask_classes=256), masks)


@pytest.mark.parametrize("name", ["boxes", "keypoints"])
def test_a_cache_of_boxes_says_that_no_task_learns_them(tmp_path, name):
    build_cache(f"failing_data:{name}", tmp_path, Recipe(size=8), jobs=1)
    with pytest.raises(UsageError, match=f"the cache has {name} and no other labels, and train has no task for {name}"):
        choose_task(TrainSettings(), CachedDataset(tmp_path))


class OneOfTwo(Processes):
    """One of two processes, which is told how many pixels count in both."""

    world_size = 2

    def __init__(self, mean):
        self._mean = mean

    def mean_on_device(self, value):
        return value if self._mean is None else self._mean


def stepped(masks, rows, parts, *, count_all=False, mean=None, **settings):
    """Return how a step with these rows in so many parts changes the weights, its loss, and how many pixels counted.

    Row i has a class in (i + 1) ** 2 pixels; the last one in none.
    """
    device = CpuDevice()
    device.processes = OneOfTwo(mean) if count_all else Processes()
    learner = Learner(dataclasses.replace(SETTINGS, **settings), masks, make_task("mask", CLASSES), device)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), np.uint8))
    labels = torch.full((8, 64), 255, dtype=torch.uint8)
    for row in range(7):
        labels[row, : (row + 1) ** 2] = torch.arange((row + 1) ** 2, dtype=torch.uint8) % CLASSES
    masks_of = labels.view(8, 8, 8, 1)
    batches = [
        DeviceBatch({"image": images[chosen], "mask": masks_of[chosen]}, torch.zeros(len(chosen)))
        for chosen in torch.tensor(rows).chunk(parts)
    ]
    before = torch.cat([tensor.detach().flatten().clone() for tensor in learner.model.parameters()])
    loss = learner.step(batches, Rates(1.0, 0.9), 0)
    after = torch.cat([tensor.detach().flatten() for tensor in learner.model.parameters()])
    return SimpleNamespace(change=after - before, loss=loss, share=(labels[rows] != 255).float().mean())


@pytest.mark.parametrize("settings", [{}, {"smoothing": 0.1}, {"clip": 0.01}])
def test_parts_of_a_batch_weigh_as_many_pixels_as_have_a_class(masks, settings):
    whole = stepped(masks, [*range(8)], 1, **settings)
    for parts in (2, 4, 8):
        found = stepped(masks, [*range(8)], parts, **settings)
        torch.testing.assert_close(found.change, whole.change, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.loss, whole.loss)
    assert whole.change.abs().max() > 1e-3


@pytest.mark.parametrize("parts", [1, 2])
def test_processes_weigh_as_many_pixels_as_have_a_class(masks, parts):
    whole = stepped(masks, [*range(8)], 1)
    halves = [stepped(masks, rows, parts, count_all=True, mean=whole.share) for rows in ([*range(4)], [*range(4, 8)])]
    torch.testing.assert_close((halves[0].change + halves[1].change) / 2, whole.change, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close((halves[0].loss + halves[1].loss) / 2, whole.loss)


def test_a_step_without_any_pixel_that_has_a_class_changes_nothing(masks):
    found = stepped(masks, [7, 7], 2, weight_decay=0.0)
    assert found.loss == 0
    assert not found.change.any()
