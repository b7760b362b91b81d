# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: no network, no complaints, no sideways scrolling, neighbor sets within reach."""

from collections.abc import Iterator

import pytest

from ngrpo.workbench.report import write_report
from tests.support import chromium
from tests.support.chromium import Chromium
from tests.support.report_example import STRATEGIES, example, groups

DESKTOP, PHONE = (1280, 900), (360, 740)
# Everything in the open: what is folded away must fit, too.
UNFOLD = "document.querySelectorAll('details').forEach(node => { node.open = true })"
EMPTY_DRAWINGS = """[...document.querySelectorAll('svg')].filter(svg => {
  const box = svg.getBoundingClientRect(); return box.width < 5 || box.height < 5 }).length"""
BARE_SECTIONS = """[...document.querySelectorAll('section')].filter(one => one.innerText.trim().length < 40
  || one.getBoundingClientRect().height < 40).map(one => one.id)"""
# Text that leaves its window or its chart; a table scrolls inside its own frame.
OUTSIDE = """[...document.querySelectorAll('p, h1, h2, li, dd, pre, .tokens, figure, .plot text')].filter(node => {
  const box = node.getBoundingClientRect();
  return box.width && (box.left < -1 || box.right > innerWidth + 1) }).map(node => node.textContent.slice(0, 40))"""
TIP = "(tip => tip.hidden ? null : tip.innerText)(document.getElementById('tip'))"
TIP_FITS = """(box => box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight)(
  document.getElementById('tip').getBoundingClientRect())"""


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
    data["runs"][0] |= {"status": "failed", "error": "</script><img src=http://example.invalid/x onerror=alert(1)>"}
    token = {"text": "سلام " * 30 + "x" * 400, "perturbed": False}
    data["diagnosis"]["samples"][0]["by_strategy"][0]["tokens"] = [token]
    data["runs"][1]["groups"] = groups()
    file = tmp_path_factory.mktemp("pages") / "report.html"
    write_report(data, file)
    return file.as_uri()


def at(browser: Chromium, selector: str) -> tuple[float, float]:
    """The middle of the first line of the first element, scrolled into view."""
    x, y = browser.evaluate(
        f"(node => {{ node.scrollIntoView({{block: 'center'}}); const box = node.getClientRects()[0];"
        f" return [box.left + box.width / 2, box.top + box.height / 2] }})(document.querySelector({selector!r}))"
    )
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
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == dark
    assert browser.complaints() == []


def check_tip(browser: Chromium) -> str:
    """The tooltip shows the mixture of the token that it belongs to, inside the window."""
    mixture = browser.evaluate("JSON.parse(document.querySelector('.tok.shown').dataset.tip).mixture")
    shown = browser.evaluate(TIP)
    assert all(text.strip() in shown and weight in shown for text, weight, _ in mixture) and len(mixture) == 3
    assert browser.evaluate(TIP_FITS)
    return shown


def test_by_mouse_and_keyboard(browser: Chromium, page: str) -> None:
    """Verdicts in the head, and mixtures: shown where the pointer is, and gone with it."""
    browser.open(page, DESKTOP)
    browser.move(*at(browser, ".forest li:nth-child(2)"))
    assert "within noise: Mean@32" in browser.evaluate(TIP) and browser.evaluate(TIP_FITS)
    browser.move(5, 5)
    assert browser.evaluate(TIP) is None
    focus(browser, ".forest li")
    assert "would often have been missed" in browser.evaluate(TIP)
    # Tab reaches the first marked token of an answer from the answer itself, arrows the next.
    focus(browser, "#groups .tokens:has(.tok)")
    browser.press("Tab")
    first = check_tip(browser)
    assert all(part in first for part in ("was fed as", "0.750", "mismatch "))
    browser.press("ArrowRight")
    assert check_tip(browser) != first
    assert browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("Escape")
    assert browser.evaluate(TIP) is None
    browser.move(*at(browser, "#groups .step[open] .tokens i"))
    assert browser.evaluate(TIP).startswith("mismatch ") and browser.evaluate(TIP_FITS)
    assert browser.complaints() == []


def test_by_tap(browser: Chromium, page: str) -> None:
    browser.open(page, PHONE, touch=True)
    browser.tap(*at(browser, ".forest li:last-child .told"))
    assert "against none over 2 seeds" in browser.evaluate(TIP) and browser.evaluate(TIP_FITS)
    browser.tap(*at(browser, "#samples .problem[open] mark.tok"))
    check_tip(browser)
    browser.tap(*at(browser, "#samples h2"))
    assert browser.evaluate(TIP) is None and browser.complaints() == []


def test_chart_values_and_legend(browser: Chromium, page: str) -> None:
    browser.open(page, DESKTOP)
    browser.move(*at(browser, "#learning .plot"))
    shown = browser.evaluate(TIP)
    assert shown.startswith("step ") and all(name in shown for name in STRATEGIES)
    assert browser.evaluate(TIP_FITS)
    # By keyboard: the first position, then the second.
    focus(browser, "#pass-at-k .plot")
    for k in (1, 16):
        browser.press("ArrowRight")
        assert browser.evaluate(TIP).startswith(f"Pass@{k}\n")
    # A strategy is hidden in every chart at once.
    browser.evaluate("document.querySelector('#learning [data-toggle=\"1\"]').click()")
    drawn = "document.querySelectorAll('[data-s=\"1\"]').length"
    hidden = "[...document.querySelectorAll('[data-s=\"1\"]')].filter(one => !one.getBoundingClientRect().width).length"
    assert browser.evaluate(drawn) == browser.evaluate(hidden) > 3
    browser.move(*at(browser, "#learning .plot"))
    assert "neighbor" not in browser.evaluate(TIP)
    browser.evaluate("document.querySelector('#pass-at-k [data-toggle=\"1\"]').click()")
    assert browser.evaluate(hidden) == 0
    # A point of the picture, and a token of the map: what its copies are read as.
    focus(browser, "#diversity .plot")
    browser.press("ArrowRight")
    assert "validity 0.906 (0.870 to 0.940)" in browser.evaluate(TIP)
    focus(browser, "#map .plot")
    browser.press("ArrowLeft")
    assert "is read as" in browser.evaluate(TIP) and "×" in browser.evaluate(TIP)
    assert browser.complaints() == []


def test_a_bar_leaves_the_responses_with_its_reward(browser: Chromium, page: str) -> None:
    """Each of the first 16 rewards whose number is divided by three is 1: six of them."""
    shown = "[...document.querySelectorAll('#groups .step[open] .answer')].filter(a => a.offsetWidth).length"
    browser.open(page, DESKTOP)
    browser.evaluate("document.querySelectorAll('#groups .step[open] .problem').forEach(p => { p.open = true })")
    for bar, count in ((0, 10), (1, 6), (1, 16)):  # the same one again: all of them
        browser.evaluate(f"document.querySelectorAll('#groups .step[open] .tally')[{bar}].click()")
        assert browser.evaluate(shown) == count
    assert browser.complaints() == [] and browser.requests() == [page]
