"""Code that a file names."""

from __future__ import annotations

import torch
from refusals import assert_refused
from signed import signed


def test_code_that_the_user_does_not_name_in_full(lab):
    cache = lab.copy(lab.shared.augmented)
    left = lab.folder / "left"
    (lab.folder / "trap.py").write_text(f"open({str(left)!r}, 'w')\n")
    manifest = cache / "manifest.json"
    manifest.write_text(signed(manifest.read_text().replace("lab_module:invert", "trap:invert")))
    (cache / "v01-00000.lmdb").unlink()
    assert_refused(lab.command("verify", cache, "--repair", lab.shared.photos), "trap:invert", "--augment")
    assert_refused(
        lab.train(lab.shared.cache, lab.folder / "run", "--train-step", "trap"), "'trap'", "module:name", status=2
    )
    assert not left.exists()


def test_weights_of_a_run_in_other_types(lab):
    cases = {"mean": [0.0] * 7, "std": [0.0] * 3, "model": [1, 2], "classes": 7, "fields": "none", "outputs": -1}
    for number, (name, value) in enumerate(cases.items()):
        run = lab.copy(lab.shared.run, f"run{number}")
        content = torch.load(run / "best.pt", weights_only=True)
        torch.save({**content, name: value}, run / "best.pt")
        words = ("predict", run, lab.shared.cache, "-o", lab.folder / "p.csv", "--backend", "torch")
        assert_refused(lab.command(*words, "--trust", "lab_module:tiny"), r"best\.pt", name)


def test_texts_of_a_run_that_nest_deeply_or_are_too_large(lab):
    for number, text in enumerate(("[" * 100_000, '{"seconds": {"training": 1e308}}')):
        for name in ("run.json", "report.json"):
            run = lab.copy(lab.shared.run, f"run{number}{name}")
            (run / name).write_text(text)
            assert_refused(lab.command("report", run, "-o", lab.folder / "page.html"), name)
