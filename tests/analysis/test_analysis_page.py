"""The page of a comparison in a real browser, with the network off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from comparison_examples import with_rate, write_group

from armillary.analysis.comparison import Comparison, compare
from armillary.analysis.contenders import contenders_of
from armillary.analysis.page.page import page_of
from armillary.analysis.page.scale import Scale, linear_ticks, log_ticks, tick_text, unit_of
from armillary.recipe.registry import get
from browser import Browser, NoBrowser, Page, find_browser

PHONE, DESK = 390, 1280
CHARTS = """
[...document.querySelectorAll('.chart')].filter(each => each.offsetParent !== null).map(each => {
  const box = each.querySelector('svg').getBoundingClientRect();
  const marks = [...each.querySelectorAll('.mean, .last, .tick, .dot')].map(mark => {
    const at = mark.getBoundingClientRect();
    return at.left >= box.left - 1 && at.right <= box.right + 1 &&
           at.bottom >= box.top - 1 && at.top <= box.bottom + 1;
  });
  const scale = box.width / each.querySelector('svg').viewBox.baseVal.width;
  const sizes = [...each.querySelectorAll('text')].map(
    text => parseFloat(getComputedStyle(text).fontSize) * scale);
  return {width: box.width, height: box.height, marks: marks.length, inside: marks.every(Boolean),
          smallest: Math.min(...sizes),
          broken: each.innerHTML.includes('NaN') || each.innerHTML.includes('undefined')};
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with Browser(find_browser()) as running:
            yield running
    except NoBrowser as none:
        pytest.skip(str(none))


def sweep_of_sizes(folder: Path, hostile: str = "") -> Comparison:
    """Four sizes, three seeds: every section of the page is there."""
    runs, names = [], {}
    for place, size in enumerate((1, 2, 4, 8)):
        recipe = replace(get("debug"), model=replace(get("debug").model, n_layers=size))
        losses = [2.4 - 0.1 * place + 0.01 * seed * (1 + place % 2) for seed in range(3)]
        figures = {"parameters": 1_000_000 * size, "flops_per_token": 6e6 * size}
        group = write_group(folder, f"size-{size}", losses, recipe, **figures)
        names |= {group[0]: f"debug n_layers={size}{hostile}"}
        runs += group
    return compare(contenders_of(runs, {}, names), title="Four sizes" + hostile, price_per_hour=2.0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "compare.html"
    path.write_text(page_of(sweep_of_sizes(folder)))
    return path


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_shows_its_charts_and_fits_the_window(
    browser: Browser, file: Path, width: int, dark: bool
) -> None:
    page = browser.open(file, width=width, dark=dark)
    assert page.errors == []
    assert page.requests == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.evaluate(CHARTS)
    assert len(charts) == 5  # results, differences, curves, sweep, scaling
    for chart in charts:
        assert chart["width"] > 250
        assert chart["height"] > 80
        assert chart["marks"] > 0
        assert chart["inside"]
        assert chart["smallest"] >= 10.5  # pixels of a letter
        assert not chart["broken"]
    paper, ink = (
        page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("backgroundColor", "color")
    )
    assert (brightness(paper) < brightness(ink)) is dark


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_curves_can_be_changed_and_say_what_is_under_the_pointer(
    browser: Browser, file: Path
) -> None:
    page = browser.open(file, width=DESK, height=3000)
    assert shown(page) == [["bits_per_byte", "tokens"]]
    page.evaluate("document.querySelector('button[value=seconds]').click()")
    page.evaluate("document.querySelector('button[value=loss]').click()")
    assert shown(page) == [["loss", "seconds"]]
    box = page.evaluate(
        "(({x, y, width, height}) => ({x, y, width, height}))"
        "(document.querySelector('.curves.shown .wide .catch').getBoundingClientRect())"
    )
    page.move_mouse(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    words = page.evaluate("document.querySelector('.curves.shown .tip').innerText")
    assert words.startswith("10.0 s")  # the middle of an axis from 0 to 20 s
    assert all(re.search(rf"\b{key}\b", words) for key in "ABCD")
    assert page.evaluate("getComputedStyle(document.querySelector('.shown .tip')).visibility") == (
        "visible"
    )
    page.evaluate("document.querySelector('.chip').click()")
    assert page.evaluate("document.querySelectorAll('.shown .wide .series.lit .mean').length") == 1
    assert page.errors == []


def shown(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('.curves')].filter(each => each.offsetParent !== null)"
        ".map(each => [each.dataset.figure, each.dataset.axis])"
    )
    return found


def test_names_from_outside_are_text_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    comparison = sweep_of_sizes(tmp_path, hostile="</title><script>window.bad = 1</script>&amp;'\"")
    path = tmp_path / "hostile.html"
    path.write_text(page_of(comparison))
    page = browser.open(path, width=PHONE)
    assert page.evaluate("window.bad") is None
    assert "<script>window.bad = 1</script>&amp;" in page.evaluate("document.title")
    assert page.errors == []


def test_a_page_of_many_recipes_stays_small_and_whole(tmp_path: Path) -> None:
    runs = []
    for number in range(40):
        losses = [2.0 + 0.01 * number + 0.03 * seed for seed in range(3)]
        runs += write_group(tmp_path, f"r{number}", losses, with_rate(1e-3 * (number + 1)))
    page = page_of(compare(contenders_of(runs, {}, {})))
    assert len(page.encode()) < 2_000_000
    assert "Only the 24 recipes with the lowest means are drawn" in page
    assert page.count("<tr class=") == 40 + 120


def test_a_page_loads_nothing_and_says_so_to_the_browser(file: Path) -> None:
    page = file.read_text()
    assert len(page.encode()) < 500_000
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)\s*=", page)
    assert "url(" not in page.replace("url(#clip", "")
    assert "http" not in page.replace("http-equiv", "")


def test_marks_of_axes_are_round_numbers_within_the_range() -> None:
    assert linear_ticks(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(4.61, 5.23, 4) == pytest.approx([4.8, 5.0, 5.2])
    assert log_ticks(1e-4, 1e-1, 5) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert len(log_ticks(2.0, 9.0, 5)) >= 2
    assert tick_text(0.25, 0.05) == "0.25"
    assert unit_of("seconds", 9_000.0) == (3_600.0, "training time, hours")
    assert unit_of("tokens", 5e9) == (1e9, "tokens, billions")
    assert unit_of("flops", 3e18) == (1e18, "compute, EFLOP")
    scale = Scale(1.0, 100.0, 0.0, 200.0, is_log=True)
    assert [scale.at(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
