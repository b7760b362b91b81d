# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: no network, no complaints, no sideways scrolling, neighbor sets within reach."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench.report import write_report
from tests import chromium
from tests.chromium import Chromium
from tests.report_example import STRATEGIES, diagnosis, example, groups

TWELVE = (
    "none",
    *(f"neighbor rate={rate} metric={metric}" for rate in (0.05, 0.1, 0.2) for metric in ("cosine", "l2", "l1")),
)
DESKTOP, PHONE = (1280, 900), (360, 740)
WINDOWS = [(DESKTOP, False), (PHONE, True)]
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
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of written reports."""
    folder = tmp_path_factory.mktemp("pages")
    odd = example(steps=3, seeds=2)
    odd["runs"][0] |= {"status": "failed", "error": "</script><img src=http://example.invalid/x onerror=alert(1)>"}
    odd["diagnosis"]["samples"][0]["by_strategy"][0]["tokens"] = [
        {"text": "سلام " * 30 + "x" * 400, "perturbed": False}
    ]
    write_report(example(), folder / "comparison.html")
    write_report(diagnosis(), folder / "diagnosis.html")
    write_report(example(steps=1000, seeds=1, strategies=(*TWELVE, "gumbel", "soft")), folder / "twelve.html")
    write_report(odd, folder / "odd.html")
    write_report(example(steps=1, seeds=1, strategies=("none",)), folder / "single.html")
    with_groups = example(steps=3, seeds=1)
    for run in with_groups["runs"]:
        run["groups"] = groups(run["strategy"])
    write_report(with_groups, folder / "groups.html")
    return {file.stem: file.as_uri() for file in folder.glob("*.html")}


def at(browser: Chromium, selector: str) -> tuple[float, float]:
    """The middle of the first line of the first element, scrolled into view."""
    x, y = browser.evaluate(
        f"(node => {{ node.scrollIntoView({{block: 'center'}}); const box = node.getClientRects()[0];"
        f" return [box.left + box.width / 2, box.top + box.height / 2] }})(document.querySelector({selector!r}))"
    )
    browser.settle()
    return x, y


@pytest.mark.parametrize(("window", "dark"), WINDOWS)
@pytest.mark.parametrize("name", ["comparison", "diagnosis", "twelve", "odd", "single", "groups"])
def test_page(browser: Chromium, pages: dict[str, str], name: str, window: tuple[int, int], dark: bool) -> None:
    browser.open(pages[name], width=window[0], height=window[1], dark=dark, touch=window == PHONE)
    assert browser.requests() == [pages[name]]
    assert browser.evaluate(EMPTY_DRAWINGS) == 0
    browser.evaluate(UNFOLD)
    browser.settle()
    assert browser.evaluate("innerWidth") == window[0]
    assert browser.evaluate("document.documentElement.scrollWidth") <= window[0]
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(BARE_SECTIONS) == []
    assert browser.evaluate("document.querySelectorAll('section').length") >= 5
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == dark
    assert browser.complaints() == []


def test_verdicts_in_the_head(browser: Chromium, pages: dict[str, str]) -> None:
    """By mouse, by keyboard and by touch; gone once the pointer is elsewhere."""
    browser.open(pages["comparison"], width=DESKTOP[0], height=DESKTOP[1])
    browser.move(*at(browser, ".forest li:nth-child(2)"))
    assert "the runs do not tell them apart" in browser.evaluate(TIP) and browser.evaluate(TIP_FITS)
    browser.move(5, 5)
    assert browser.evaluate(TIP) is None
    browser.evaluate("document.querySelector('.forest li').focus()")
    browser.settle()
    assert "would often have been missed" in browser.evaluate(TIP)
    browser.open(pages["comparison"], width=PHONE[0], height=PHONE[1], touch=True)
    browser.tap(*at(browser, ".forest li:last-child .told"))
    assert "worse than none in Mean@8" in browser.evaluate(TIP) and browser.evaluate(TIP_FITS)
    browser.tap(*at(browser, ".finding"))
    assert browser.evaluate(TIP) is None and browser.complaints() == []


def test_neighbors_by_mouse_and_keyboard(browser: Chromium, pages: dict[str, str]) -> None:
    browser.open(pages["comparison"], width=DESKTOP[0], height=DESKTOP[1])
    assert browser.evaluate(TIP) is None
    browser.move(*at(browser, "mark.tok"))
    check_tip(browser)
    browser.move(5, 5)
    assert browser.evaluate(TIP) is None
    # Tab reaches the first marked token of an answer from the answer itself, arrows the next.
    browser.evaluate("document.querySelector('.tokens:has(.tok)').focus()")
    browser.press("Tab")
    first = check_tip(browser)
    browser.press("ArrowRight")
    second = check_tip(browser)
    assert first != second
    assert browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("Escape")
    assert browser.evaluate(TIP) is None
    assert browser.complaints() == []


def check_tip(browser: Chromium) -> str:
    """The tooltip shows the mixture of the token that it belongs to, inside the window."""
    data: dict[str, Any] = browser.evaluate("JSON.parse(document.querySelector('.tok.shown').dataset.tip)")
    shown = browser.evaluate(TIP)
    assert shown and len(data["mixture"]) == 3
    for text, weight, _ in data["mixture"]:
        assert text.strip() in shown and weight in shown
    assert abs(sum(float(weight) for _, weight, _ in data["mixture"]) - 1) < 0.01
    assert browser.evaluate(TIP_FITS)
    return shown


def test_neighbors_by_tap(browser: Chromium, pages: dict[str, str]) -> None:
    browser.open(pages["comparison"], width=PHONE[0], height=PHONE[1], touch=True)
    browser.tap(*at(browser, "mark.tok"))
    check_tip(browser)
    browser.tap(*at(browser, "#samples h2"))
    assert browser.evaluate(TIP) is None
    assert browser.complaints() == []


def test_chart_values_and_legend(browser: Chromium, pages: dict[str, str]) -> None:
    browser.open(pages["comparison"], width=DESKTOP[0], height=DESKTOP[1])
    browser.move(*at(browser, "#learning .plot"))
    shown = browser.evaluate(TIP)
    assert shown.startswith("step ")
    assert all(name in shown for name in STRATEGIES)
    assert browser.evaluate(TIP_FITS)
    # By keyboard: the first position, then the second.
    browser.evaluate("document.querySelector('#pass-at-k .plot').focus()")
    browser.settle()
    for k in (1, 2):
        browser.press("ArrowRight")
        assert browser.evaluate(TIP).startswith(f"Pass@{k}\n")
    browser.evaluate("document.querySelector('#learning [data-toggle=\"1\"]').click()")
    drawn = "document.querySelectorAll('[data-s=\"1\"]').length"
    hidden = "[...document.querySelectorAll('[data-s=\"1\"]')].filter(one => !one.getBoundingClientRect().width).length"
    assert browser.evaluate(drawn) == browser.evaluate(hidden) > 3
    assert browser.evaluate("document.querySelectorAll('[data-toggle=\"1\"][aria-pressed=false]').length") == 3
    browser.move(*at(browser, "#learning .plot"))
    assert "neighbor" not in browser.evaluate(TIP)
    browser.evaluate("document.querySelector('#pass-at-k [data-toggle=\"1\"]').click()")
    assert browser.evaluate(hidden) == 0
    # A point of the picture, and a token of the map: what its copies are read as.
    browser.evaluate("document.querySelector('#diversity .plot').focus()")
    browser.settle()
    browser.press("ArrowRight")
    assert "validity 0.930 (0.905 to 0.950)" in browser.evaluate(TIP)
    browser.evaluate("document.querySelector('#map .plot').focus()")
    browser.settle()
    browser.press("ArrowLeft")
    assert "is read as" in browser.evaluate(TIP) and "×" in browser.evaluate(TIP)
    assert browser.complaints() == []


def test_the_browser_would_notice(browser: Chromium, tmp_path: Path) -> None:
    """The checks above can fail: a page with an error, a request and a wide element is caught."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><body style='margin:0'><div style='width:2000px'>wide</div><svg width=0></svg>"
        "<img src='missing.png'><script>console.error('x'); nothing()</script>"
    )
    browser.open(page.as_uri(), width=DESKTOP[0], height=DESKTOP[1])
    assert len(browser.requests()) == 2 and len(browser.complaints()) >= 2
    assert browser.evaluate("document.documentElement.scrollWidth") == 2000 and browser.evaluate(EMPTY_DRAWINGS) == 1


def test_groups(browser: Chromium, pages: dict[str, str]) -> None:
    """A bar leaves the answers with its reward; a plain token shows its gap, a perturbed one what was fed beside it."""
    shown = "[...document.querySelectorAll('#groups .step[open] .answer')].filter(a => a.offsetWidth).length"
    for window in (DESKTOP, PHONE):
        browser.open(pages["groups"], width=window[0], height=window[1], touch=window == PHONE)
        browser.evaluate("document.querySelectorAll('#groups .step[open] .problem').forEach(p => { p.open = true })")
        assert browser.evaluate(shown) == 16
        held = browser.evaluate(
            "[...document.querySelectorAll('#groups .step[open] .tally')].map(bar => parseInt("
            "bar.querySelector('.unseen').innerText))"
        )
        assert sum(held) == 16 and min(held) > 0
        for i, count in enumerate(held):
            x, y = at(browser, f"#groups .step[open] .bars li:nth-child({i + 1}) .at")
            browser.tap(x, y) if window == PHONE else browser.evaluate(
                f"document.querySelectorAll('#groups .step[open] .tally')[{i}].click()"
            )
            browser.settle()
            assert browser.evaluate(shown) == count
        browser.evaluate(f"document.querySelectorAll('#groups .step[open] .tally')[{len(held) - 1}].click()")
        assert browser.evaluate(shown) == 16
        if window == DESKTOP:
            browser.move(*at(browser, "#groups .step[open] .tokens i"))
            assert browser.evaluate(TIP).startswith("gap ") and browser.evaluate(TIP_FITS)
        browser.evaluate(UNFOLD)  # the first strategy's rollouts are not perturbed
        place = at(browser, "#groups mark.tok")
        browser.move(*place) if window == DESKTOP else browser.tap(*place)
        assert all(part in browser.evaluate(TIP) for part in ("was fed as", "0.750", "gap "))
        assert browser.evaluate(TIP_FITS)
        assert browser.evaluate("document.documentElement.scrollWidth") <= window[0]
        assert browser.complaints() == [] and browser.requests() == [pages["groups"]]


def test_without_javascript_nothing_is_lost(browser: Chromium, pages: dict[str, str]) -> None:
    browser.open(pages["comparison"], width=DESKTOP[0], height=DESKTOP[1], scripts=False)
    assert browser.evaluate(EMPTY_DRAWINGS) == 0 and browser.evaluate(BARE_SECTIONS) == []
    assert browser.evaluate("document.querySelectorAll('.tok[tabindex=\"-1\"]').length") == 0  # Scripts were off.
