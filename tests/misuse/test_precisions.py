"""What only a GPU can do, asked of the processor."""

from __future__ import annotations

from lab import files_of
from refusals import assert_refused, succeeded


def test_float16_on_the_processor(lab):
    done = lab.train(lab.shared.cache, lab.folder / "run", "--device", "cpu", "--precision", "fp16")
    assert len(done.err.strip().splitlines()) == 1
    assert not (lab.folder / "run").exists()
    assert_refused(done, "fp16", "--precision float32 or bf16", status=2)


def test_a_run_that_goes_on_in_another_precision(lab):
    run = lab.folder / "run"
    succeeded(lab.train(lab.shared.cache, run, "--precision", "bf16"))
    before = files_of(run)
    assert_refused(
        lab.train(lab.shared.cache, run, "--precision", "float32", "--resume"), "bf16, now float32", status=2
    )
    for words in (("--precision", "bf16", "--resume"), ("--resume",)):
        succeeded(lab.train(lab.shared.cache, run, *words))
    assert files_of(run) == before
