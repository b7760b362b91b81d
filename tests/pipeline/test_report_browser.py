# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: no network, no complaints, no sideways scrolling, neighbor sets within reach."""

from collections.abc import Iterator

import pytest

from ngrpo.workbench.report import write_report
from tests.support import chromium
from tests.support.chromium import Chromium
from tests.support.report_example import STRATEGIES, example, groups

DESKTOP = (1280, 900)
PHONE = (360, 740)
# Folded parts of the page must fit the window, too.
UNFOLD = "document.querySelectorAll('details').forEach(node => { node.open = true })"
EMPTY_DRAWINGS = """[...document.querySelectorAll('svg')].filter(svg => {
  const box = svg.getBoundingClientRect();
  return box.width < 5 || box.height < 5;
}).length"""
BARE_SECTIONS = """[...document.querySelectorAll('section')].filter(section => {
  return section.innerText.trim().length < 40 || section.getBoundingClientRect().height < 40;
}).map(section => section.id)"""
# Text that leaves its window or its chart; a table scrolls inside its own frame.
OUTSIDE = """[...document.querySelectorAll('p, h1, h2, li, dd, pre, .tokens, figure, .plot text')].filter(node => {
  const box = node.getBoundingClientRect();
  return box.width && (box.left < -1 || box.right > innerWidth + 1);
}).map(node => node.textContent.slice(0, 40))"""
TIP = "(tip => tip.hidden ? null : tip.innerText)(document.getElementById('tip'))"
TIP_FITS = """(box => box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight)(
  document.getElementById('tip').getBoundingClientRect())"""
# The middle of the first line of an element, which is scrolled into view.
FIRST_LINE = """(node => {
  node.scrollIntoView({block: 'center'});
  const box = node.getClientRects()[0];
  return [box.left + box.width / 2, box.top + box.height / 2];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    binary = chromium.find()
    if binary is None:
        pytest.skip("no Chromium found: install it (Debian: apt-get install chromium) or set CHROMIUM to its path")
    with Chromium(binary, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report with all sections, code in an error, and a response of one long word."""
    data = example()
    code = "</script><img src=http://example.invalid/x onerror=alert(1)>"
    data["runs"][0] |= {"status": "failed", "error": code}
    data["runs"][1]["groups"] = groups()
    long_word = {"text": "سلام " * 30 + "x" * 400, "perturbed": False}
    data["diagnosis"]["samples"][0]["by_strategy"][0]["tokens"] = [long_word]
    file = tmp_path_factory.mktemp("pages") / "report.html"
    write_report(data, file)
    return file.as_uri()


def at(browser: Chromium, selector: str) -> tuple[float, float]:
    """The middle of the first line of the first element, scrolled into view."""
    x, y = browser.evaluate(f"{FIRST_LINE}(document.querySelector({selector!r}))")
    browser.settle()
    return x, y


def focus(browser: Chromium, selector: str) -> None:
    browser.evaluate(f"document.querySelector({selector!r}).focus()")
    browser.settle()


@pytest.mark.parametrize(("window", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_page(browser: Chromium, page: str, window: tuple[int, int], dark: bool) -> None:
    browser.open(page, window, dark=dark, touch=window == PHONE)
    assert browser.requests() == [page]
    assert browser.evaluate(EMPTY_DRAWINGS) == 0
    browser.evaluate(UNFOLD)
    browser.settle()
    assert browser.evaluate("innerWidth") == window[0]
    assert browser.evaluate("document.documentElement.scrollWidth") <= window[0]
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(BARE_SECTIONS) == []
    assert browser.evaluate("document.querySelectorAll('section').length") == 10
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == dark
    assert browser.complaints() == []


def check_tip(browser: Chromium) -> str:
    """The text of the tooltip, which is inside the window and shows the mixture of its token."""
    mixture = browser.evaluate("JSON.parse(document.querySelector('.tok.shown').dataset.tip).mixture")
    assert len(mixture) == 3
    tip = browser.evaluate(TIP)
    for candidate, weight, _ in mixture:
        assert candidate.strip() in tip
        assert weight in tip
    assert browser.evaluate(TIP_FITS)
    return tip


def test_by_mouse_and_keyboard(browser: Chromium, page: str) -> None:
    """Tooltips of verdicts and of mixtures appear where the pointer or the focus is, and vanish with it."""
    browser.open(page, DESKTOP)
    browser.move(*at(browser, ".forest li:nth-child(2)"))
    assert "within noise: Mean@32" in browser.evaluate(TIP)
    assert browser.evaluate(TIP_FITS)
    browser.move(5, 5)
    assert browser.evaluate(TIP) is None
    focus(browser, ".forest li")
    assert "would often have been missed" in browser.evaluate(TIP)
    # From an answer, Tab reaches its first marked token; arrow keys reach the next ones.
    focus(browser, "#groups .tokens:has(.tok)")
    browser.press("Tab")
    first_tip = check_tip(browser)
    for text in ("was fed as", "0.750", "mismatch "):
        assert text in first_tip
    browser.press("ArrowRight")
    assert check_tip(browser) != first_tip
    assert browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("Escape")
    assert browser.evaluate(TIP) is None
    browser.move(*at(browser, "#groups .step[open] .tokens i"))
    assert browser.evaluate(TIP).startswith("mismatch ")
    assert browser.evaluate(TIP_FITS)
    assert browser.complaints() == []


def test_by_tap(browser: Chromium, page: str) -> None:
    browser.open(page, PHONE, touch=True)
    browser.tap(*at(browser, ".forest li:last-child .told"))
    assert "against none over 2 seeds" in browser.evaluate(TIP)
    assert browser.evaluate(TIP_FITS)
    browser.tap(*at(browser, "#samples .problem[open] mark.tok"))
    check_tip(browser)
    browser.tap(*at(browser, "#samples h2"))
    assert browser.evaluate(TIP) is None
    assert browser.complaints() == []


def test_chart_values_and_legend(browser: Chromium, page: str) -> None:
    browser.open(page, DESKTOP)
    browser.move(*at(browser, "#learning .plot"))
    tip = browser.evaluate(TIP)
    assert tip.startswith("step ")
    for strategy in STRATEGIES:
        assert strategy in tip
    assert browser.evaluate(TIP_FITS)
    # By keyboard: the first position, then the second.
    focus(browser, "#pass-at-k .plot")
    for k in (1, 16):
        browser.press("ArrowRight")
        assert browser.evaluate(TIP).startswith(f"Pass@{k}\n")
    # A strategy is hidden in every chart at once.
    browser.evaluate("document.querySelector('#learning [data-toggle=\"1\"]').click()")
    drawn = "document.querySelectorAll('[data-s=\"1\"]').length"
    hidden = (
        "[...document.querySelectorAll('[data-s=\"1\"]')].filter(mark => !mark.getBoundingClientRect().width).length"
    )
    assert browser.evaluate(drawn) > 3
    assert browser.evaluate(hidden) == browser.evaluate(drawn)
    browser.move(*at(browser, "#learning .plot"))
    assert "neighbor" not in browser.evaluate(TIP)
    browser.evaluate("document.querySelector('#pass-at-k [data-toggle=\"1\"]').click()")
    assert browser.evaluate(hidden) == 0
    # A point of the chart of diversity, and a token of the map, whose tip says what its copies are read as.
    focus(browser, "#diversity .plot")
    browser.press("ArrowRight")
    assert "validity 0.906 (0.870 to 0.940)" in browser.evaluate(TIP)
    focus(browser, "#map .plot")
    browser.press("ArrowLeft")
    tip = browser.evaluate(TIP)
    assert "is read as" in tip
    assert "×" in tip
    assert browser.complaints() == []


def test_a_bar_leaves_the_responses_with_its_reward(browser: Chromium, page: str) -> None:
    """Each of the first 16 rewards whose number is divided by three is 1: six of them."""
    visible_answers = "[...document.querySelectorAll('#groups .step[open] .answer')].filter(a => a.offsetWidth).length"
    browser.open(page, DESKTOP)
    browser.evaluate("document.querySelectorAll('#groups .step[open] .problem').forEach(p => { p.open = true })")
    # A second click on the same bar shows all answers again.
    for bar, count in ((0, 10), (1, 6), (1, 16)):
        browser.evaluate(f"document.querySelectorAll('#groups .step[open] .tally')[{bar}].click()")
        assert browser.evaluate(visible_answers) == count
    assert browser.complaints() == []
    assert browser.requests() == [page]
