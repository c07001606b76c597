"""Code that a file names."""

from __future__ import annotations

import json
import shutil

import torch

from scripts.checks.misuse.lab import Lab
from scripts.checks.misuse.outcome import Outcome, Wrong, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row


@row
def a_run_whose_model_is_a_function_of_python(lab: Lab) -> Outcome:
    for code in ("os:_exit", "faulthandler:_sigsegv"):
        run = lab.folder / code.replace(":", "_")
        shutil.copytree(lab.shared.run(), run)
        content = torch.load(run / "best.pt", weights_only=True)
        content["settings"]["model"] = code
        torch.save(content, run / "best.pt")
        done = lab.command("predict", run, lab.shared.cache(), "-o", lab.folder / "p.csv", "--backend", "torch")
        outcome = refused(done, code, "--trust", status=2)
    return outcome


@row
def a_repair_of_a_cache_whose_manifest_names_other_code(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.augmented())
    left = lab.folder / "left"
    (lab.folder / "trap.py").write_text(f"open({str(left)!r}, 'w')\n")
    manifest = cache / "manifest.json"
    manifest.write_text(manifest.read_text().replace("lab_module:invert", "trap:invert"))
    (cache / "v01-00000.lmdb").unlink()
    outcome = refused(lab.command("verify", cache, "--repair", lab.shared.photos()), "trap:invert", "--augment")
    if left.exists():
        raise Wrong("the module was imported")
    return outcome


@row
def weights_of_a_run_in_other_types(lab: Lab) -> Outcome:
    cases = {"mean": [0.0] * 7, "std": [0.0] * 3, "model": [1, 2], "classes": 7, "fields": "none", "outputs": -1}
    for number, (name, value) in enumerate(cases.items()):
        run = lab.copy(lab.shared.run(), f"run{number}")
        content = torch.load(run / "best.pt", weights_only=True)
        torch.save({**content, name: value}, run / "best.pt")
        words = ("predict", run, lab.shared.cache(), "-o", lab.folder / "p.csv", "--backend", "torch")
        outcome = refused(lab.command(*words, "--trust", "lab_module:tiny"), r"best\.pt", name)
    return outcome


@row
def texts_of_a_run_that_nest_deeply_or_are_too_large(lab: Lab) -> Outcome:
    for number, text in enumerate(("[" * 100_000, '{"seconds": {"training": 1e308}}')):
        for name in ("run.json", "report.json"):
            run = lab.copy(lab.shared.run(), f"run{number}{name}")
            (run / name).write_text(text)
            outcome = refused(lab.command("report", run, "-o", lab.folder / "page.html"), name)
    return outcome


def _without_compiler() -> None:
    """Have torch.compile make its graphs, and leave out the C++ compiler, which takes minutes."""
    compile_ = torch.compile
    torch.compile = lambda function, **options: compile_(function, backend="eager", **options)  # type: ignore[assignment]


@row
def the_fifth_model_of_a_process_is_compiled_too(lab: Lab) -> Outcome:
    """Each fold of five has graphs of its own."""
    table = lab.folder / "five.csv"
    photos = lab.shared.photos()
    lines = [
        f"{path.relative_to(photos)},{path.parent.name},{n % 5}" for n, path in enumerate(sorted(photos.rglob("*.png")))
    ]
    table.write_text("\n".join(["path,label,fold", *lines]))
    words = ("--label-col", "label", "--fold-col", "fold", "--root", photos)
    succeeded(lab.warmup(table, lab.folder / "five", *words))
    succeeded(lab.train(lab.folder / "five", lab.folder / "folds", "--folds", "--compile", before=_without_compiler))
    reports = [json.loads(path.read_text()) for path in sorted((lab.folder / "folds").glob("fold-*/report.json"))]
    equal("folds", len(reports), 5)
    true("each fold compiled graphs", all(report["pace"]["graphs"] > 0 for report in reports))
    return correct(f"graphs of each fold: {[report['pace']['graphs'] for report in reports]}")
