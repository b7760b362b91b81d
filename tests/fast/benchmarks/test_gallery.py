# SPDX-License-Identifier: Apache-2.0
"""docs/gallery.md shows what the committed results give."""

import xml.dom.minidom

import pytest

from benchmarks import gallery

PAGE = (gallery.DOCS / "gallery.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", gallery.PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_drawn_from_the_committed_results(picture: gallery.Picture) -> None:
    svg = (gallery.DOCS / "gallery" / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert svg == gallery.drawn(picture), "python -m benchmarks.gallery"
    assert xml.dom.minidom.parseString(svg).documentElement.getAttribute("aria-label")
    assert f"](gallery/{picture.name}.svg)" in PAGE


@pytest.mark.parametrize(
    ("name", "anchor"), [("local_optimum", "a-local-optimum"), ("two_peaks", "two-peaks"), ("sums", "sums-eight-steps")]
)
def test_times_are_those_of_the_runs(name: str, anchor: str) -> None:
    (picture,) = [picture for picture in gallery.PICTURES if picture.name == name]
    results = gallery.published(picture)
    low, high = gallery.minutes(results)
    (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"(#{anchor})" in line]
    assert f"| {low:.1f} to {high:.1f} |" in row
    assert f"| {len(results['runs'][0]['steps'])} × " in row
