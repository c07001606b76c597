"""The commands `train` and `predict`, and their options of devices. The table `COMMANDS` in `plugins.py` names them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache import process, progress
from tpucache.cli.parser import (
    CACHE_OR_URL,
    KEEPING,
    at_least,
    augmentation,
    augmentation_options,
    cache_or_url,
    command,
    config,
    fields_of,
    flag,
    from_options,
    keeping,
    local_path,
    note,
    positive,
    reading,
    say_now,
    seconds,
    section,
    show,
    value,
    with_changes,
)
from tpucache.errors import UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import options_of
from tpucache.plugins import call, is_there
from tpucache.progress import note as show_note
from tpucache.runs import INFO_NAME
from tpucache.text import size_text
from tpucache.training.options import PredictOptions, RunOptions
from tpucache.training.pace import Account
from tpucache.training.settings import AUTO, TrainSettings
from tpucache.training.source import SOURCE, SourceArguments, is_source, refuse

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.store.manifest import Manifest
    from tpucache.training.device import Choice
    from tpucache.training.interrupt import StopRequest
    from tpucache.training.run.report import FoldsReport, TrainReport


def device_options(target: Any) -> None:
    from tpucache.training.device import BACKENDS, BACKENDS_HELP, DEVICES, backend_of

    names = BACKENDS.names("auto")
    for add in (
        value("--backend", None, BACKENDS_HELP, backend_of, "auto", choices=names),
        value("--device", None, "device of the backend torch", default="auto", choices=DEVICES),
        flag("--compile", "compile the model by torch.compile; for the backend torch"),
        value("--cores", "N", "number of cores: 1, or all, which is the default", positive),
        value(
            "--processes",
            "N",
            "use N processes of this host: one for each GPU, or several on a CPU; for the backend torch",
            positive,
        ),
    ):
        add(target)


def choose_backend(label: str, options: argparse.Namespace) -> str:
    from tpucache.training.device import choose_backend as choose

    choice = choose(options.backend, options.device, compile=options.compile, processes=options.processes)
    options.backend = choice.backend
    _announce(label, choice)
    return choice.why


def _announce(label: str, choice: Choice) -> None:
    """Print a line on standard error that names the chosen backend, and says that torch is being imported.

    Importing torch takes seconds. Print nothing if the user named the backend and torch is imported already.
    """
    loading = f"loading torch{' and torch_xla' * (choice.backend == 'xla')}" if "torch" not in sys.modules else ""
    if (choice.why or loading) and os.environ.get("RANK", "0") == "0":  # torchrun sets RANK
        progress.note(f"{label}: {'; '.join(filter(None, (choice.line(), loading)))}")


def launched(options: argparse.Namespace) -> bool:
    """Run the whole command in several processes if --processes asks for that; return whether it has been run."""
    from tpucache.training.device.base import is_launched

    if options.processes is None or process.launched() is not None:
        return False
    if is_launched():
        raise UsageError("torchrun has started several processes already: leave --processes out")
    if options.backend != "torch":
        raise UsageError(
            f"--processes is for the backend torch, and {options.backend} uses all cores of a host in one process: "
            "leave --processes out"
        )
    if options.processes == 1:
        return False
    from tpucache.training.device.launch import launch

    launch(options.arguments, options.processes, options.began)
    return True


def variants(text: str) -> str | list[int]:
    return text if text == "all" else [int(number) for number in text.split(",")]


@command(
    "runs/fold0 runs/fold1 cache/test -o predictions.csv --variants all",
    value(
        "runs",
        "RUN",
        "folders of runs, whose predictions are averaged; a run of folds counts as all of its folds",
        local_path,
        nargs="+",
    ),
    CACHE_OR_URL,
    value("-o, --output", "FILE", "the CSV to write", local_path, required=True),
    value("--variants", "0,1,2|all", "variants of each sample to predict and average", variants, "0"),
    value("--fold", "N", "predict only the samples of this fold"),
    fields_of(PredictOptions),
    value(
        "--export",
        None,
        "also write the models for other programs, with a description of preprocessing, to a folder next to the CSV "
        "(out_models for out.csv)",
        choices=("onnx", "safetensors"),
    ),
    value(
        "--trust",
        "module:name",
        "a run may call this code of yours, which it names as its model or evaluation step; may be given several times",
        default=[],
        action="append",
    ),
    device_options,
    value("--batch-size", "B", "samples in one batch, on all cores together", positive),
    reading,
    basic=("--json", "--variants", "--fold", "--flip-tta", "--export", "--batch-size"),
)
def predict(options: argparse.Namespace) -> int:
    """Predict every sample of a cache with the best weights of one run or of several.

    The predictions of several runs are averaged.
    """
    choose_backend("predict", options)
    if launched(options):
        return 0
    from tpucache.loading.columns import fold_positions
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.find import open_cache
    from tpucache.runs import OUT_OF_FOLD_NAME
    from tpucache.training.device import open_device
    from tpucache.training.prediction import Predictor
    from tpucache.training.prediction import predict as run_predict
    from tpucache.training.run.report import read_folds

    device = open_device(options.backend, options.cores, options.device, compile=options.compile)
    models = options.output.with_name(f"{options.output.stem}_models")
    if options.export is not None:
        from tpucache.training.export import check_export

        check_export(models, options.export)  # before hours of predicting
    wanted = from_options(PredictOptions, options)
    predictor = Predictor(options.runs, device, options.trust, wanted)
    processes = device.processes
    opened = open_cache(options.cache)
    size = predictor.settings.sizes.valid
    chosen = opened.manifest.variants if options.variants == "all" else options.variants
    datasets = [CachedDataset(opened, variant, resolution=size) for variant in chosen]
    if options.fold is not None:
        positions = fold_positions(datasets[0].table, options.fold)
        datasets = [dataset.select(positions) for dataset in datasets]
        seen = predictor.may_have_seen(CachedDataset(opened, 0, positions)) if processes.is_main else []
        for run in options.runs if processes.is_main else ():
            if run in seen:
                note(
                    f"{run} was trained on this cache, and not validated on the samples and labels that fold "
                    f"{options.fold} has now: it may have learned from some of them"
                )
            if read_folds(run) is not None:
                note(
                    f"if {run} was trained on this cache, all its models but one have seen fold {options.fold}: "
                    f"{run / OUT_OF_FOLD_NAME} has the predictions of the model that has not"
                )
    shares = device.cores * processes.world_size
    batch_size = options.batch_size or -(-predictor.settings.part_size // shares) * shares
    report = run_predict(predictor, datasets, options.output, batch_size, options.threads)
    if options.export is not None:
        from tpucache.training.export import export_runs

        processes.on_main(lambda: export_runs(options.runs, opened.manifest, models, options.export, options.trust))
    if processes.is_main:
        show(options, report.to_dict(), report.lines())
    return 0


FIND: Final = "find"
_EXPORTED: Final = "export"  # the folder in a run


def rate(text: str) -> float | str:
    return text if text == FIND else float(text)


def epochs(text: str) -> int | str:
    return text if text == AUTO else at_least(1)(text)


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise UsageError(f"separate numbers by commas, such as 120,110,100, not {text!r}") from error


def _kept_settings(run: Path) -> dict[str, Any]:
    from tpucache.store.files import read_file
    from tpucache.training.settings import settings_from, unusual_settings

    try:
        settings = settings_from(json.loads(read_file(run / INFO_NAME))["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the folder has no {INFO_NAME} with settings: give the folder of one run") from error
    options = {**options_of(TrainSettings), **options_of(AugmentSettings)}
    return with_changes({name: value for name, value in unusual_settings(settings).items() if name in options})


@command(
    "photos/train --run runs/first --valid 0.2",
    value(
        "cache",
        "CACHE",
        "a cache: its folder, kaggle:slug or URL; or a SOURCE as warmup takes it, whose cache the first epoch builds",
        cache_or_url,
    ),
    KEEPING,
    value(
        "--run, --run-dir",  # torchrun takes --run for its own option
        "RUN",
        "the folder that the run writes to",
        local_path,
        required=True,
    ),
    value(
        "--valid",
        "CACHE|FRACTION|fold=N",
        "what to validate on after each epoch: another cache, a fraction of this one, or one of its folds",
    ),
    value(
        "--export",
        None,
        f"when the run has ended, write its best weights for other programs to RUN/{_EXPORTED}, with a description of "
        "preprocessing",
        choices=("onnx", "safetensors"),
    ),
    flag("--folds", "train one run in RUN for each fold of the cache"),
    config("RUN", _kept_settings),
    device_options,
    fields_of(RunOptions, time_limit=seconds),
    section(
        "model, task and optimisation",
        fields_of(TrainSettings, ["threads"], can_be_off=True, epochs=epochs, lr=rate, mean=numbers, std=numbers),
    ),
    section("augmentation (computed on the device, anew for each batch)", *augmentation_options(can_be_off=True)),
    SOURCE,
    reading,
    basic=(
        "--valid",
        "--folds",
        "--resume",
        "--time-limit",
        "--config",
        "--model",
        "--weights",
        "--epochs",
        "--batch-size",
        "--lr",
        "--size",
        "--flip",
        "--crop",
        "--mixup",
    ),
)
def train(options: argparse.Namespace) -> int:
    """Train a model on a cache, or on a source."""
    from tpucache.errors import UnfinishedError
    from tpucache.training.device.base import current
    from tpucache.training.interrupt import StopRequest

    if options.folds and options.valid is not None:
        raise UsageError("--folds validates on each fold in turn: leave --valid out")
    options.source = _source(options)
    options.chosen = choose_backend("train", options)
    if launched(options):
        return 0
    account = Account(options.began)
    report: FoldsReport | TrainReport | None
    if options.export is not None:
        from tpucache.training.export import check_export

        check_export(options.run / _EXPORTED, options.export)  # before hours of training
    from tpucache.training.run import report as run_report

    try:
        # The time limit is for the whole command, with copying, the range test and compiling.
        report, manifest = _run(options, StopRequest(options.time_limit), account)
    except (UnfinishedError, KeyboardInterrupt):
        if current().world_size > 1:
            process.ignore_signals()  # torchrun sends SIGTERM when the first process ends
        report = _stopped_report(options, account) if current().is_main else None
        if options.json and report is not None:
            show(options, report.to_dict(), report.lines())
        raise
    if current().is_main:
        # The lines of the epochs were printed already.
        lines = report.lines(epochs=False) if isinstance(report, run_report.TrainReport) else report.lines()
        show(options, report.to_dict(), lines)
        if options.export is not None:
            _export(options, manifest)
    return 0


def _export(options: argparse.Namespace, manifest: Manifest) -> None:
    from tpucache.training.export import export_runs

    trust = [name for name in (options.model, options.eval_step) if name is not None]
    for path in export_runs([options.run], manifest, options.run / _EXPORTED, options.export, trust):
        note(f"exported {path}")


def _stopped_report(options: argparse.Namespace, account: Account) -> FoldsReport | TrainReport | None:
    """Return the report of a run that has to stop; None if there is none, or `--folds` does not fit the run."""
    from tpucache.runs import FOLDS_NAME
    from tpucache.training.run.report import ensure_report, read_folds_report

    if (options.run / FOLDS_NAME).exists() != options.folds:
        return None
    if options.folds:
        return read_folds_report(options.run)
    return ensure_report(options.run, options.backend, options.cores or 0, account)


def _run(
    options: argparse.Namespace, stop: StopRequest, account: Account
) -> tuple[FoldsReport | TrainReport, Manifest]:
    from tpucache.training.device import open_device
    from tpucache.training.device.base import ALONE, may_be_several

    open_chosen = functools.partial(
        open_device, options.backend, options.cores, options.device, compile=options.compile
    )
    # The device takes seconds to start, so it is opened last, unless several processes have to find each other by it.
    opened = open_chosen() if may_be_several(options.backend) else None
    processes = ALONE if opened is None else opened.processes
    others: dict[str, Any] = {"lr": None} if options.lr == FIND else {}
    settings = from_options(TrainSettings, options, **others, augment=augmentation(options))
    with account.part("staging"):
        if options.source is not None and processes.world_size == 1:
            data = _open_source(options, options.source)  # before the imports below, which take seconds
        else:
            from tpucache.loading.dataset import CachedDataset

            cache = processes.on_each_host(lambda: _finished_cache(options) or options.cache)
            data = CachedDataset(cache, **keeping(options))
    from tpucache.runs import RANGE_TEST_NAME
    from tpucache.training.folds import open_all_folds, train_folds
    from tpucache.training.loop import train as run_training
    from tpucache.training.lr_finder import find_lr

    is_growing = not data.is_finished
    train_set, valid_set = _split(data, options)
    run, folds = options.run, None
    if options.folds:
        folds = open_all_folds(run, train_set, data, options.resume)
        run, train_set = folds.folds[0].run, folds.folds[0].train_set  # the range test runs on the first fold, for all
        parts = [(f"fold {fold.name}", fold.train_set, fold.valid_set) for fold in folds.folds]
    else:
        parts = [] if valid_set is None else [("validation", train_set, valid_set)]
    if processes.is_main and not is_growing:
        _warn_of_leaks(parts)
    device = opened or open_chosen()
    account.take_out("compiling", lambda: device.counters().compile_seconds)
    if options.lr == FIND:
        with account.part("range_test"):
            settings = find_lr(run, settings, train_set, device, options.resume, stop)
        if processes.is_main:
            note(f"the highest learning rate is {settings.peak_lr:.3g}; {RANGE_TEST_NAME} in {run} shows why")
    on_epoch = show_note if options.json else say_now
    shown: dict[str, Any] = {"curves": True, "on_epoch": on_epoch, "chosen": options.chosen}
    run_options = from_options(RunOptions, options, stop=stop, account=account, time_limit=None, **shown)
    if folds is not None:
        return train_folds(folds, settings, device, run_options), data.manifest
    report = run_training(run, settings, train_set, valid_set, device, run_options)
    if is_growing and data.is_finished:  # the check reads all records
        _warn_of_leaks(parts)
    return report, data.manifest


def _source(options: argparse.Namespace) -> SourceArguments | None:
    if not is_source(options.cache):
        given = {"--cache": options.cache_of_source, "--build": options.build}
        refuse(given, f"for a source, and {options.cache} is a cache, or does not exist")
        return None
    given = {"--cache-dir": options.cache_dir, "--cache-gb": options.cache_gb}
    refuse(given, f"for a cache at a URL, and {options.cache} is a source")
    source = SourceArguments(options.cache, options.build, options.size)
    if not source.names_size:
        options.size = None  # the cache is built in this size
    options.kept = options.cache_of_source or source.default_cache(options.run.absolute().parent)
    if os.environ.get("RANK", "0") == "0":  # which torchrun sets
        note(f"{options.cache} is a source: its cache is {options.kept}, which is built while it is read")
    return source


def _open_source(options: argparse.Namespace, source: SourceArguments) -> CachedDataset:
    data = source.open(options.kept, is_named=options.cache_of_source is not None)
    if data.cache.is_growing:
        note(f"the first epoch builds the cache of {len(data):,} samples")
    else:
        note(f"{options.kept} is finished: {len(data):,} samples, {size_text(data.manifest.total_bytes)}")
    if not options.folds and options.lr != FIND:
        return data
    if data.cache.is_growing:
        note("--folds and --lr find begin when the whole cache is built")
    data.cache.wait()
    return type(data)(options.kept)


def _finished_cache(options: argparse.Namespace) -> Path | None:
    """Return the path of a source's cache, after building it if necessary; None if the command has no source."""
    if options.source is None:
        return None
    data = _open_source(options, options.source)
    if not data.is_finished:
        note("several processes begin when the whole cache is built")
        data.cache.wait()
    kept: Path = options.kept
    return kept


def _warn_of_leaks(parts: Sequence[tuple[str, CachedDataset, CachedDataset]]) -> None:
    if parts and not is_there("leak"):
        note("validation samples are not compared with training samples: tpucache.insight is missing")
        return
    for name, train_set, valid_set in parts:
        leak = call("leak", train_set, valid_set)
        if leak is not None and leak.samples:
            how = "found by comparing details" if leak.compared == "hashes" else "found by comparing records only"
            note(
                f"{name}: {leak.samples:,} of {len(valid_set):,} samples are copies of training samples ({how}), such "
                f"as {leak.path!r}: scores will be too good. `relabel CACHE --make-folds N --groups duplicates` makes "
                "folds that keep copies together"
            )


def _split(data: CachedDataset, options: argparse.Namespace) -> tuple[CachedDataset, CachedDataset | None]:
    from tpucache.loading.columns import fold_split, stratified_split
    from tpucache.loading.dataset import CachedDataset
    from tpucache.store.files import is_url

    valid = options.valid
    augmented = data.in_variant("epoch") if data.manifest.augmented else data
    if valid is None:
        return augmented, None
    if valid.startswith("fold="):
        fold = fold_split(data.table, valid.removeprefix("fold="))
        return augmented.select(fold.train), data.select(fold.valid)
    try:
        fraction = float(valid)
    except ValueError:
        # Where only one of the two caches is at a URL, --cache-dir is for that one.
        kept = keeping(options) if is_url(valid) or isinstance(options.cache, Path) else {}
        return augmented, CachedDataset(valid, **kept)
    split = stratified_split(data.labels.numpy(), fraction, options.seed)
    return augmented.select(split.train), data.select(split.valid)
