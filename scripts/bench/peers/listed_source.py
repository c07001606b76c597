"""A source of listed photographs, each as often as the list has it: a small set is long enough to be measured."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.bench.peers.building import read_list
from tpucache.warmup.sources.folder import read_file
from tpucache.warmup.sources.source import Item, Listing, Sample


class ListedSource:
    """The photographs of a list, named by their place in it."""

    def __init__(self, listed: Path) -> None:
        """Take a JSON file of absolute paths; nothing is read yet."""
        self._listed = listed

    def list(self) -> Listing:
        """Return a sample a line of the list, with the sizes of their files, as a folder does."""
        files = read_list(self._listed)
        return Listing(
            [Sample(number, f"{number}:{file}", None, os.stat(file).st_size) for number, file in enumerate(files)]
        )

    def load(self, sample: Sample) -> Item:
        """Return the bytes of a sample's file. Raises SampleError."""
        return Item({"image": read_file(Path(sample.path.partition(":")[2]), sample.path)})
