# SPDX-License-Identifier: Apache-2.0
"""The files of examples/recipes as words of `ngrpo train`."""

from pathlib import Path

from ngrpo.machine.storage import datafiles

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
METHODS = sorted(path.stem for path in (RECIPES / "methods").glob("*.yaml"))
PAPERS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PLACEMENTS = sorted(path.stem for path in (RECIPES / "placements").glob("*.yaml"))


def words_of(name: str) -> list[str]:
    """A recipe's words.

    Args:
        name: with its folder below examples/recipes, without its ending: ``methods/lepo``.
    """
    path = RECIPES / f"{name}.yaml"
    return datafiles.words(datafiles.read_yaml(str(path), flag="a recipe", example="'preset: grpo'"))
