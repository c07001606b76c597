"""Kaggle's limits, for warmup and for publishing: what `/kaggle/working` keeps, and how many files a dataset has."""

from __future__ import annotations

from typing import Final

#: What /kaggle/working keeps, in bytes.
WORKING_BYTES: Final = 20_000_000_000
#: With more files kagglehub zips all of them, and so does the web page. The metadata beside them is not uploaded.
MAX_FILES: Final = 50
#: What a published cache has beside its shards: manifest, index, samples, card, and tpucache's wheel.
COMPANIONS: Final = 5
#: The most shards that can be published.
MAX_SHARDS: Final = MAX_FILES - COMPANIONS
#: The most shards that `--target kaggle` makes: they leave room for the sheet of samples, too.
TARGET_SHARDS: Final = MAX_SHARDS - 1
