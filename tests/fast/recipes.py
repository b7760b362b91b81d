# SPDX-License-Identifier: Apache-2.0
"""The files of examples/recipes as words of `ngrpo train`."""

from __future__ import annotations

from pathlib import Path

from ngrpo.machine.storage import yaml_file

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
METHODS = sorted(path.stem for path in (RECIPES / "methods").glob("*.yaml"))
PAPERS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PLACEMENTS = sorted(path.stem for path in (RECIPES / "placements").glob("*.yaml"))


def words_of(name: str) -> list[str]:
    """A recipe's words.

    Args:
        name: with its folder below examples/recipes, without its ending: ``methods/lepo``.
    """
    return yaml_file.words(yaml_file.read(str(RECIPES / f"{name}.yaml"), flag="a recipe", example="'preset: grpo'"))
