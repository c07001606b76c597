"""Pages of each kind as a browser shows them, on a phone and on a desk, by day and by night."""

from __future__ import annotations

import pytest

from tpucache import CachedDataset, report_cache, report_findings, report_run

pytestmark = pytest.mark.slow

#: What a page shows beyond its width: each element that ends right of it, unless something cuts it off or scrolls.
BEYOND = """() => [...document.querySelectorAll('body *')]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .filter(one => { for (let up = one.parentElement; up !== document.body; up = up.parentElement)
                     if (getComputedStyle(up).overflowX !== 'visible') return false; return true; })
  .map(one => one.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory, plain_cache, copies_cache, write_run, drawn, tokens, hostile):
    """Pages of caches, one with long hostile names and one without images; of findings, and of a run."""
    folder = tmp_path_factory.mktemp("pages")
    long = [f"{hostile} {'w' * 300} {number}" for number in range(12)]
    rich = plain_cache(
        tmp_path_factory.mktemp("rich") / ("n" * 120),
        paths=long,
        skipped=[(text, text) for text in long],
        source_bytes=range(1, 13),
        recipe={"augment": "a" * 300, "augmentation": {"w" * 300: hostile}},
    )
    caches = {"rich": rich, "drawn": drawn, "tokens": tokens}
    found = {name: report_cache(cache) for name, cache in caches.items()}
    found["findings"] = report_findings(copies_cache(folder / "copies", paths=long[:10]))
    found["run"] = report_run(write_run(folder / "run", CachedDataset(rich), text=f"{'w' * 200} {hostile}"), 3)
    return {name: page.save(folder / f"{name}.html") for name, page in found.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["rich", "drawn", "tokens", "findings", "run"])
def test_a_page_fits_its_window_loads_all_and_complains_of_nothing(name, width, scheme, browser, pages):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    page.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert page.evaluate(BEYOND) == []
    loaded = page.evaluate("() => [...document.images].map(one => one.complete && one.naturalWidth > 0)")
    assert all(loaded)
    assert len(loaded) == {"rich": 36, "drawn": 12, "tokens": 0, "findings": 4, "run": 3}[name]
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()


def test_it_follows_the_system_or_the_switch_without_a_script(browser, pages):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(pages["rich"].as_uri())
    brightness = []
    for name in ("system", "light", "dark", "system"):
        page.locator(f"label[for=scheme-{name}]").click()
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        brightness.append(sum(int(part) for part in colour.strip("rgb()").split(",")[:3]))
    assert [each > 600 for each in brightness] == [False, True, False, False]
    assert [each < 150 for each in brightness] == [True, False, True, True]
    context.close()
