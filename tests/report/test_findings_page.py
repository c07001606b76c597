"""The page of findings has what was found, as data that no cache can turn into markup or a script."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tpucache import CachedDataset, UsageError, report_findings
from tpucache.cli import main
from tpucache.insight import page as findings_page
from tpucache.redact import to_cell

#: What the page of findings has besides what a cache's page has.
MORE_TAGS = {"nav", "select", "option", "output", "button", "datalist", "script", "noscript", "kbd"}


class Found(HTMLParser):
    """The data of a page, and its sprites."""

    def __init__(self, page):
        super().__init__()
        self._within, self.texts = "", {"data": [], "sprite": []}
        self.feed(page.html)
        self.data = json.loads("".join(self.texts["data"]))
        self.sections = {each["title"]: each for each in self.data["sections"]}

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        self._within = "data" if names.get("id") == "data" else "sprite" if names.get("class") == "sprite" else ""

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        if self._within:
            self.texts[self._within].append(data)

    def paths(self, title):
        """Return the paths of the samples of each card of a section."""
        return [[self.data["samples"][one][2] for one in card[0]] for card in self.sections[title]["cards"]]


def write_predictions(path, dataset, probabilities, names):
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "path", "label", "prediction", *map(to_cell, names)])
        for row, (number, each) in enumerate(zip(dataset.table.numbers.tolist(), probabilities, strict=True)):
            label, best = names[int(dataset.labels[row])], names[int(np.argmax(each))]
            writer.writerow([number, to_cell(dataset.paths[row]), to_cell(label), to_cell(best), *each])
    return path


@pytest.fixture(scope="module")
def copies(tmp_path_factory, copies_cache):
    return copies_cache(tmp_path_factory.mktemp("copies") / "copies", classes=("ant", "bee"))


@pytest.fixture(scope="module")
def found(copies):
    return Found(report_findings(copies))


def test_copies_are_told_apart_by_their_labels(found):
    paths = [f"folder/{number:04d}.png" for number in range(10)]
    assert found.paths("look alike, different label") == [[paths[0], paths[8]]]
    assert found.paths("look alike, same label") == [[paths[1], paths[9]]]
    ((_, proposed, text),) = found.sections["look alike, different label"]["cards"]
    assert proposed == ["bee", "ant"]
    share, bits = re.fullmatch(r"(\d+)% alike: (\d+) of 256 bits differ, copies by their details", text).groups()
    assert abs(int(share) - (100 - 100 * int(bits) / 128)) <= 0.5
    assert found.sections["look alike, same label"]["cards"][0][2].endswith("differ, mirrored, copies by their details")
    assert "leaks" not in found.sections


def test_a_picture_of_a_card_is_the_sample_that_it_names(found, copies):
    data, dataset = found.data, CachedDataset(copies)
    (geometry,) = data["sets"]
    sprites = [Image.open(io.BytesIO(base64.b64decode(text))) for text in found.texts["sprite"]]
    assert len(sprites) == 1
    for _, tile, path, label, _ in data["samples"]:
        place = tile % geometry["each"]
        left, top = (
            place % geometry["across"] * geometry["tileWidth"],
            place // geometry["across"] * geometry["tileHeight"],
        )
        shown = sprites[tile // geometry["each"]].crop((left, top, left + geometry["width"], top + geometry["height"]))
        image, expected = dataset[dataset.paths.index(path)]
        assert np.abs(np.asarray(shown, int) - image.permute(1, 2, 0).numpy()).mean() < 40
        assert label == dataset.classes[expected]


def test_leaks_are_the_pictures_of_both_caches(copies, copies_cache, tmp_path):
    other = copies_cache(tmp_path / "other", samples=4, classes=("ant", "bee"))
    page = Found(report_findings(copies, against=other))
    pairs = {tuple(paths) for paths in page.paths("leaks")}
    assert ("folder/0000.png", "folder/0000.png") in pairs
    assert ("folder/0009.png", "folder/0001.png") in pairs  # its mirror image
    assert {page.data["samples"][card[0][1]][0] for card in page.sections["leaks"]["cards"]} == {1}
    assert [each["name"] for each in page.data["sets"]] == ["copies", "other"]
    assert [each["first"] for each in page.data["sets"]] == [0, 1]


def test_suspects_come_with_the_class_that_was_predicted(copies, tmp_path):
    dataset = CachedDataset(copies)
    probabilities = np.full((10, 2), 0.5)
    labels = dataset.labels.numpy()
    probabilities[3] = [0.0, 1.0] if labels[3] == 0 else [1.0, 0.0]
    probabilities[5] = [0.2, 0.8] if labels[5] == 0 else [0.8, 0.2]
    table = write_predictions(tmp_path / "out_of_fold.csv", dataset, probabilities, ("ant", "bee"))
    page = Found(report_findings(copies, predictions=table))
    assert page.paths("suspects")[:2] == [[dataset.paths[3]], [dataset.paths[5]]]
    (_, proposed, text), *_ = page.sections["suspects"]["cards"]
    assert proposed == ["ant" if labels[3] == 1 else "bee"]
    assert text == f"p(label) 0.000, {proposed[0]} 1.000"


def test_predictions_of_other_samples_are_refused(copies, copies_cache, tmp_path):
    for name, more, part in (
        ("paths", {"paths": [f"other/{number}.png" for number in range(10)]}, "another path"),
        ("more", {"samples": 12}, "has the sample 10, which"),
    ):
        dataset = CachedDataset(copies_cache(tmp_path / name, classes=("ant", "bee"), **more))
        table = write_predictions(tmp_path / f"{name}.csv", dataset, np.full((len(dataset), 2), 0.5), ("ant", "bee"))
        with pytest.raises(UsageError, match=part):
            report_findings(copies, predictions=table)


def test_extremes_are_of_what_is_known_and_blank_images_are_among_them(found, copies_cache, tmp_path):
    assert found.sections["extremes"]["cards"] == []
    cache = copies_cache(tmp_path / "cache", samples=6, blank=2, source_bytes=[5, 0, 9, 2, 7, 3])
    page = report_findings(cache)
    assert "<title>findings in cache · tpucache</title>" in page.html
    assert "<dt>extremes</dt>" not in page.html  # every cache has its darkest images: nothing was found
    cards = Found(page).sections["extremes"]["cards"]
    assert [text for _, _, text in cards] == [
        "blank: next to no contrast",
        *("smallest file: 2 bytes", "smallest file: 3 bytes", "largest file: 9 bytes", "largest file: 7 bytes"),
    ]


def test_hostile_names_are_data_and_nothing_else(copies_cache, tmp_path, hostile, parse):
    paths = [f"{hostile}{number}" for number in range(10)]
    page = report_findings(copies_cache(tmp_path / "hostile", paths=paths))
    shown = parse(page.html)
    assert not shown.foreign_tags - MORE_TAGS
    assert not shown.scripts
    assert shown.loaded == []
    assert page.html.count("<script") == 1
    data = Found(page).data
    assert {path for _, _, path, *_ in data["samples"]} <= set(paths)
    assert hostile in data["sets"][0]["classes"]
    (policy,) = [value for name, value in shown.attributes if name == "content" and "script-src" in value]
    assert re.fullmatch(
        r"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='", policy
    )
    page.html.encode()


@pytest.mark.parametrize(
    ("labels", "classes", "text"),
    [
        (None, (), ""),
        (np.linspace(0, 1, 10, dtype=np.float32)[:, None], (), "0.111111"),
        (np.tile(np.float32([1, 0, 1]), (10, 1)), ("a", "b", "c"), "a;c"),
        (np.array([0, -1] * 5), ("a", "b"), ""),
    ],
    ids=["none", "numbers", "several", "unknown"],
)  # fmt: skip
def test_labels_are_written_as_relabel_reads_them(labels, classes, text, copies_cache, tmp_path, parse):
    cache = copies_cache(tmp_path / "cache", labels=labels, classes=classes)
    page = report_findings(cache)
    data = Found(page).data
    assert next(label for _, _, path, label, _ in data["samples"] if path.endswith("1.png")) == text
    assert data["sets"][0]["isNumber"] == (labels is not None and not classes)
    command = f"relabel {shlex.quote(str(cache))} cache-labels.csv"
    assert (command in parse(page.html).text) == (labels is not None) == data["sets"][0]["canCorrect"]


def test_what_there_is_no_room_for_is_left_out_and_said(copies, monkeypatch):
    monkeypatch.setattr(findings_page, "_MOST", 0)
    page = Found(report_findings(copies))
    assert page.paths("look alike, same label") == []
    assert page.sections["look alike, same label"]["count"] == "1"
    assert page.sections["look alike, same label"]["note"].endswith("The first 0 of 1 are here.")
    monkeypatch.undo()
    monkeypatch.setattr(findings_page, "_BYTES", -1)
    assert not Found(report_findings(copies)).texts["sprite"]


def test_records_without_images_have_no_findings(tokens):
    with pytest.raises(UsageError, match="no images to compare, only the fields tokens"):
        report_findings(tokens)


def test_a_selection_has_its_own_findings_only(copies):
    page = Found(report_findings(CachedDataset(copies).select([0, 2, 8])))
    assert page.paths("look alike, different label") == [["folder/0000.png", "folder/0008.png"]]
    assert page.sections["look alike, same label"]["count"] == "0"


def test_the_command_writes_the_page(copies, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(copies), "--findings", "--against", str(copies), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out), "bytes": out.stat().st_size}
    assert main(["report", str(copies), "--against", str(copies), "-o", str(out)]) == 2
    assert "give --findings, too" in capsys.readouterr().err
    assert main(["report", str(copies), "--findings", "--valid", str(copies), "-o", str(out)]) == 2


def test_a_notebook_lets_the_page_run_its_script(copies):
    assert 'sandbox="allow-scripts allow-downloads"' in report_findings(copies)._repr_html_()
