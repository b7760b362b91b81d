# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the benchmarks share: their parser, the flags of several scripts, and lists in a flag."""

import argparse

from perturbations import available


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of its script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model``, for :func:`ngrpo.machine.models.packaged.resolve`."""
    parser.add_argument("--model", default="smollm2-135m", help="a packaged model, or a folder [smollm2-135m]")


def add_perturbations(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """``--perturbations``: names separated by commas."""
    parser.add_argument("--perturbations", type=names, default=default, help="separated by commas; all by default")


def names(text: str) -> list[str]:
    """The type of a flag whose value is a list of names."""
    return text.split(",")


def integers(text: str) -> list[int]:
    """The type of a flag whose value is a list of whole numbers."""
    return [int(word) for word in text.split(",")]


def numbers(text: str) -> list[float]:
    """The type of a flag whose value is a list of numbers."""
    return [float(word) for word in text.split(",")]


def in_tree() -> list[str]:
    """The perturbations of this project that perturb: without `none`, and without those of other packages."""
    sources = available()
    return [name for name in sources if sources[name].startswith("perturbations.") and name != "none"]
