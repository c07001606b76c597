"""predict: apply trained models to the samples of a cache."""

from __future__ import annotations

import argparse
from typing import Any

from tpucache.cli.arguments import (
    add_cache_or_url,
    add_command,
    add_options,
    add_reading,
    from_options,
    keeping,
    local_path,
    positive,
)
from tpucache.cli.terminal import note, show
from tpucache.training.commands.device import add_device, choose_backend, launched
from tpucache.training.options import PredictOptions


def predict(options: argparse.Namespace) -> int:
    """Predict every sample of a cache with the best weights of one run or of several.

    The predictions of several runs are averaged.
    """
    choose_backend("predict", options)
    if launched(options):
        return 0
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.find import open_cache
    from tpucache.loading.split import fold_positions
    from tpucache.runs import OUT_OF_FOLD_NAME
    from tpucache.training.device import open_device
    from tpucache.training.prediction import predict as run_predict
    from tpucache.training.predictor import Predictor
    from tpucache.training.run.folds import read_folds

    device = open_device(options.backend, options.cores, options.device, compile=options.compile)
    models = options.output.with_name(f"{options.output.stem}_models")
    if options.export is not None:
        from tpucache.training.export import check_export

        check_export(models, options.export)  # before hours of predicting
    wanted = from_options(PredictOptions, options)
    predictor = Predictor(options.runs, device, options.trust, wanted)
    processes = device.processes
    opened = open_cache(options.cache, **keeping(options))
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


def variants(text: str) -> str | list[int]:
    """Parse "all", or numbers such as 0,1,2."""
    return text if text == "all" else [int(number) for number in text.split(",")]


def add(commands: Any) -> None:
    """Add the command predict."""
    command = add_command(
        commands,
        predict,
        "runs/fold0 runs/fold1 cache/test -o predictions.csv --variants all",
        ("--json", "--variants", "--fold", "--flip-tta", "--export", "--batch-size"),
    )
    command.add_argument(
        "runs",
        metavar="RUN",
        type=local_path,
        nargs="+",
        help="folders of runs, whose predictions are averaged; a run of folds counts as all of its folds",
    )
    add_cache_or_url(command)
    command.add_argument("-o", "--output", metavar="FILE", type=local_path, required=True, help="the CSV to write")
    command.add_argument(
        "--variants",
        metavar="0,1,2|all",
        type=variants,
        default="0",
        help="variants of each sample to predict and average",
    )
    command.add_argument("--fold", metavar="N", help="predict only the samples of this fold")
    add_options(command, PredictOptions)
    command.add_argument(
        "--export",
        choices=("onnx", "safetensors"),
        help="also write the models for other programs, with a description of preprocessing, to a folder next to the "
        "CSV (out_models for out.csv)",
    )
    command.add_argument(
        "--trust",
        metavar="module:name",
        action="append",
        default=[],
        help="a run may call this code of yours, which it names as its model or evaluation step; may be given several "
        "times",
    )
    add_device(command)
    command.add_argument("--batch-size", type=positive, metavar="B", help="samples in one batch, on all cores together")
    add_reading(command)
