"""What only a GPU can do, asked of the processor."""

from __future__ import annotations

from scripts.checks.misuse.lab import Lab, files_of
from scripts.checks.misuse.outcome import Outcome, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row


@row
def float16_on_the_processor(lab: Lab) -> Outcome:
    done = lab.train(lab.shared.cache(), lab.folder / "run", "--device", "cpu", "--precision", "fp16")
    equal("lines on stderr", len(done.err.strip().splitlines()), 1)
    true("no run is begun", not (lab.folder / "run").exists())
    return refused(done, "fp16", "--precision float32 or bf16", status=2)


@row
def two_precisions_at_once(lab: Lab) -> Outcome:
    for other in ("float32", "fp16"):
        done = lab.train(lab.shared.cache(), lab.folder / "run", "--bf16", "--precision", other)
        outcome = refused(done, "bf16", "contradict", status=2)
    equal("lines on stderr", len(done.err.strip().splitlines()), 1)
    return outcome


@row
def a_run_that_goes_on_in_another_precision(lab: Lab) -> Outcome:
    run = lab.folder / "run"
    succeeded(lab.train(lab.shared.cache(), run, "--precision", "bf16"))
    before = files_of(run)
    refused(lab.train(lab.shared.cache(), run, "--precision", "float32", "--resume"), "bf16, now float32", status=2)
    for words in (("--bf16", "--resume"), ("--resume",)):
        succeeded(lab.train(lab.shared.cache(), run, *words))
    equal("the run", files_of(run), before)
    return correct("float32 is refused; bf16 by its other name, or by no name, is the same run")
