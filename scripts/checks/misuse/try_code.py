"""Code that a file names."""

from __future__ import annotations

import shutil

import torch

from scripts.checks.misuse.lab import Lab
from scripts.checks.misuse.outcome import Outcome, refused
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
        raise AssertionError("the module was imported")
    return outcome
