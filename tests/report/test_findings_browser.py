"""The page of findings as a browser shows it: cards are made, ticked, filtered, stepped through and downloaded."""

from __future__ import annotations

import csv
import re
import shlex

import numpy as np
import pytest

from tpucache import CachedDataset, report_findings
from tpucache.cli import main
from tpucache.redact import from_cell, printable, to_cell

pytestmark = pytest.mark.slow

#: A class that a spreadsheet would run, one with markup, one with what a CSV must quote.
NAMES = ('=HYPERLINK("x")', "</script><b>bold</b>", 'a "quoted", class')


@pytest.fixture(scope="module")
def cache(tmp_path_factory, copies_cache, hostile):
    """Copies in classes with hostile names, at hostile paths of which one is no UTF-8 and one a formula."""
    paths = [f"{hostile}{number}" for number in range(8)] + ["@SUM(A1)/8.png", "-2+3/9.png"]
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 1, 1])
    return copies_cache(tmp_path_factory.mktemp("hostile") / "copies", paths=paths, labels=labels, classes=NAMES)


@pytest.fixture(scope="module")
def saved(cache, tmp_path_factory):
    return report_findings(cache).save(tmp_path_factory.mktemp("page") / "findings.html")


@pytest.fixture
def page(browser, saved):
    """The page in a browser; it has complained of nothing and asked for nothing from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 844})
    opened = context.new_page()
    said, asked = [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("dialog", lambda dialog: said.append(dialog.message))
    opened.goto(saved.as_uri())
    opened.wait_for_function("() => document.querySelector('.card').innerText")  # cards have none before they are drawn
    yield opened
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


def rows_of(download):
    with download.path().open(encoding="utf-8", newline="") as file:
        return [tuple(map(from_cell, row)) for row in csv.reader(file, strict=True)]


def test_hostile_names_are_shown_as_text(page, hostile):
    card = page.locator(".card").first
    assert card.locator(".label").all_inner_texts() == [NAMES[0], NAMES[1]]
    assert page.locator(".card b, .card script").count() == 0
    shown = card.locator(".path").first.inner_text()
    assert shown.isprintable()
    assert shown.startswith(printable("<script>alert('x')</script>"))


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_its_window_and_shows_its_pictures(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    images = page.evaluate("() => [...document.querySelectorAll('.tile')].map(one => one.style.backgroundImage)")
    assert len(images) == 2
    assert all(image.startswith('url("blob:') for image in images)


def test_what_is_ticked_becomes_a_table_that_a_spreadsheet_runs_nothing_of(page, hostile):
    first = page.locator(".card").first
    first.locator("input[type=checkbox]").nth(0).check()
    first.locator("input[type=checkbox]").nth(1).check()
    assert page.locator("#ticked").inner_text() == "2 ticked"
    page.locator("#tabs button").nth(1).click()
    second = page.locator(".card .side").last
    second.locator("input[type=text]").fill(NAMES[2])
    with page.expect_download() as download:
        page.locator("#download").click()
    assert download.value.suggested_filename == "copies-labels.csv"
    expected = [("path", "label"), (f"{hostile}0", NAMES[1]), ("@SUM(A1)/8.png", NAMES[0]), ("-2+3/9.png", NAMES[2])]
    assert rows_of(download.value) == expected
    text = download.value.path().read_text(encoding="utf-8")
    assert not re.search(r"(^|,)\"?[=+@-]", text, re.M)


def test_ticked_labels_are_those_of_the_cache_after_the_command_that_the_page_shows(
    browser, copies_cache, hostile, tmp_path, monkeypatch
):
    paths = [f"{hostile}{number}" for number in range(9)] + ["=9/9.png"]
    cache = copies_cache(
        tmp_path / "a cache", paths=paths, classes=NAMES, labels=np.array([0, 1, 2, 0, 1, 2, 0, 1, 1, 1])
    )
    path = report_findings(cache).save(tmp_path / "findings.html")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.locator(".card input[type=checkbox]").first.check()
    page.locator("#tabs button").nth(1).click()
    page.locator(".card input[type=text]").last.fill(NAMES[2])
    with page.expect_download() as download:
        page.locator("#download").click()
    download.value.save_as(tmp_path / download.value.suggested_filename)
    command = shlex.split(page.locator(".keys code").text_content())
    page.close()
    monkeypatch.chdir(tmp_path)
    assert main(command[command.index("tpucache") + 1 :]) == 0
    after = CachedDataset(cache)
    assert after.labels.tolist() == [1, 1, 2, 0, 1, 2, 0, 1, 1, 2]
    assert after.classes == NAMES


def test_a_cell_is_what_python_makes_of_a_text(page):
    texts = [
        "bytes:%41",
        "caf\udce9 100%",
        "=1",
        "+1",
        "-1.5e3",
        "-inf",
        "-1-1",
        "'=1",
        "''@x",
        "'x",
        "\t1",
        "@",
        "a=1",
        "-",
        "+.5",
        "-1_0",
        "",
        "'",
    ]
    found = page.evaluate("texts => texts.map(cell)", texts)
    assert found == [f'"{to_cell(text)}"' for text in texts]


def test_a_label_that_no_class_has_is_marked_and_left_out(page):
    field = page.locator(".card input[type=text]").first
    field.fill("no such class")
    assert page.locator("#ticked").inner_text() == "nothing ticked, 1 with no such label"
    assert page.locator("#download").is_disabled()
    assert page.locator(".card input:invalid").count() == 1
    field.fill(NAMES[2])
    assert page.locator("#ticked").inner_text() == "1 ticked"


def test_keys_step_through_the_cards_and_tick_them(page):
    page.keyboard.press("j")
    assert page.evaluate("() => document.activeElement.className") == "card"
    page.keyboard.press("2")
    assert page.locator(".ticked .path").inner_text() == "@SUM(A1)/8.png"
    page.keyboard.press("2")
    assert page.locator(".ticked").count() == 0
    page.keyboard.press("e")
    page.keyboard.type("d")  # into the field, not a key of the page
    assert page.locator(".card input[type=text]").first.input_value().endswith("d")
    page.keyboard.press("Escape")
    page.keyboard.press("]")
    assert page.locator("#tabs [aria-selected=true]").inner_text() == "look alike, same label 1"
    page.keyboard.press("[")
    with page.expect_download():
        page.locator(".card input[type=text]").first.fill(NAMES[2])
        page.locator(".card").first.focus()
        page.keyboard.press("d")


def test_two_pictures_flicker_in_one_place_until_the_key_is_pressed_again(page):
    page.keyboard.press("j")
    page.keyboard.press("f")
    first, second = (page.locator(".card.over .tile").nth(at).bounding_box() for at in (0, 1))
    assert first == second
    assert page.evaluate("() => document.querySelector('.card.over').getAnimations({subtree: true}).length") == 1
    page.keyboard.press("f")
    assert page.locator(".card.over, .card.large").count() == 0
    first, second = (page.locator(".card").first.locator(".tile").nth(at).bounding_box() for at in (0, 1))
    assert first["x"] < second["x"]


def test_the_filter_keeps_the_cards_of_a_class(page):
    page.select_option("#filter", NAMES[1])
    assert page.locator(".card").count() == 1
    page.select_option("#filter", NAMES[2])
    assert page.locator(".card").count() == 0
    assert page.locator("#shown").inner_text() == "0 of them have this class."


def test_cards_are_made_when_they_are_scrolled_to(browser, copies_cache, tmp_path):
    cache = copies_cache(tmp_path / "many", samples=402, equal=400, classes=("ant", "bee"))
    path = report_findings(cache).save(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1280, "height": 844})
    page.goto(path.as_uri())
    assert page.locator("#tabs button").first.inner_text() == "look alike, different label 201"
    first = page.locator(".card").count()
    assert 24 <= first < 100
    page.mouse.wheel(0, 20_000)
    page.wait_for_function("count => document.querySelectorAll('.card').length > count", arg=first)
    page.evaluate("() => { for (let press = 0; press < 300; press++) step(1); }")
    assert page.locator(".card").count() == 201
    assert page.evaluate("() => document.activeElement === find('cards').lastElementChild")
    page.close()
