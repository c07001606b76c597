"""Reading ahead, small environments, arrays and URLs."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np

from scripts.checks.misuse.lab import COUNT, Lab, without
from scripts.checks.misuse.outcome import Outcome, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset, CachedLoader, Recipe, RecipeError, build_cache
from tpucache.training import Feeder, open_device

SECONDS = 60
KEPT = """
import stat, sys
from tpucache import CachedDataset, CachedLoader
iterator = iter(CachedLoader(CachedDataset(sys.argv[1], in_memory=False), 4))
stat.kept = [iterator, next(iterator)]
"""


class Waves:
    """24 arrays that can be compressed, and a class each."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, object]:
        return {"waves": np.arange(3000, dtype=np.float32) // 100 + number, "label": number % 2}


@row
def a_state_saved_while_the_feeder_reads_ahead(lab: Lab) -> Outcome:
    loader = CachedLoader(CachedDataset(lab.shared.cache()), 4)
    with Feeder(loader, open_device("torch")) as feeder:
        taken = [batch.labels.tolist() for _, batch in zip(range(2), feeder, strict=False)]
        state = feeder.state_dict()
    equal("the loader's own state", loader.state_dict(), state)
    rest = CachedLoader(CachedDataset(lab.shared.cache()), 4)
    rest.load_state_dict(state)
    taken += [labels.tolist() for _, labels in rest]
    whole = [labels.tolist() for _, labels in CachedLoader(CachedDataset(lab.shared.cache()), 4)]
    equal("the labels of both parts", taken, whole)
    return correct("2 batches of 6 are counted as seen, and the other 4 follow")


@row
def files_that_are_open_when_the_interpreter_ends(lab: Lab) -> Outcome:
    words = [sys.executable, "-c", KEPT, str(lab.shared.cache())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    equal("exit status, output and errors", (done.returncode, done.stdout, done.stderr), (0, "", ""))
    return correct("ends without a word")


@row
def the_report_of_a_run_without_pillow(lab: Lab) -> Outcome:
    succeeded(lab.command("report", lab.shared.run(), "-o", "run.html", before=without("PIL", "matplotlib")))
    page = Path("run.html").read_text()
    true("the page says why there are no pictures", "The pictures are left out" in page or "No sample is wrong" in page)
    return correct("a page with curves and figures, which says that Pillow draws the pictures")


@row
def arrays_in_zstd(lab: Lab) -> Outcome:
    sizes = {}
    for codec in ("raw", "zstd"):
        manifest = build_cache(Waves(), lab.folder / codec, Recipe(codec=codec), jobs=1)
        equal(f"codecs of the fields for {codec}", {field.codec for field in manifest.fields}, {codec})
        equal("an array", np.asarray(CachedDataset(lab.folder / codec)[5]["waves"]), Waves()[5]["waves"])
        sizes[codec] = manifest.total_bytes
    true("zstd takes less than a third of raw", sizes["zstd"] < sizes["raw"] / 3)
    return correct(f"{sizes['zstd']:,} bytes in zstd, {sizes['raw']:,} raw")


@row
def variants_and_jpeg_of_arrays(lab: Lab) -> Outcome:
    messages = []
    for recipe in (Recipe(variants=2), Recipe(codec="jpeg")):
        try:
            build_cache(Waves(), lab.folder / "cache", recipe, jobs=1)
        except RecipeError as error:
            messages.append(str(error))
    equal("refusals", len(messages), 2)
    true("messages show no address", not any(" object at 0x" in message for message in messages))
    return Outcome("refused", messages[1])


@row
def a_url_as_source(lab: Lab) -> Outcome:
    return refused(lab.warmup("s3://bucket/train", "cache"), "s3://bucket/train is a URL", "aws s3 cp", status=2)


@row
def a_url_as_the_folder_of_a_run(lab: Lab) -> Outcome:
    outcome = refused(lab.train(lab.shared.cache(), Path("run"), "--run", "gs://bucket/run"), "is a URL", status=2)
    equal("folders that were made", [path.name for path in Path().iterdir()], [])
    return outcome


@row
def the_next_epoch_of_a_cache_without_variants(lab: Lab) -> Outcome:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # for this row
    logging.getLogger("tpucache").addHandler(handler)
    dataset, plain = CachedDataset(lab.shared.cache(), "epoch"), CachedDataset(lab.shared.cache())
    CachedDataset(lab.shared.cache(), "epoch")
    dataset.set_epoch(3)
    equal("an image", dataset[5][0].tolist(), plain[5][0].tolist())
    equal("warnings of it", sum("has no augmented variants" in text for text in said), 1)
    return correct("the clean images, and one warning")
