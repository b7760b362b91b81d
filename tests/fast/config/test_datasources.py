# SPDX-License-Identifier: Apache-2.0
"""Datasources of an evaluation that OpenRLHF could not count, or counted for another one, are refused at a start."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.config import datasources, rules
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from tests.support.run import run_of


def evaluated(folder: Path, *files: list[dict[str, Any]]) -> list[str]:
    """The flag of evaluation files with these rows."""
    names = []
    for number, rows in enumerate(files, start=1):
        file = folder / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(file))
    return ["--eval.dataset", ",".join(names)]


@pytest.mark.parametrize("datasource", [["a"], None, 7, True, "", {"a": 1}], ids=str)
def test_a_datasource_that_is_no_text(datasource: Any, tmp_path: Path) -> None:
    words = evaluated(tmp_path, [{"input": "a"}, {"input": "b", "datasource": datasource}])
    with pytest.raises(UsageError, match=r"1\.jsonl: row 2 has the datasource .*; a text is needed"):
        datasources.check(Flags(words))


@pytest.mark.parametrize("other", [{"input": "a", "datasource": "hard"}, {"input": "a"}], ids=str)
def test_a_prompt_with_two_datasources(other: dict[str, str], tmp_path: Path) -> None:
    first = {"input": "a", "datasource": "easy"}
    for files in ([[first, other]], [[first], [other]]):
        with pytest.raises(UsageError, match=r"has the datasource '\w+', and the same prompt has 'easy' in .*row 1"):
            datasources.check(Flags(evaluated(tmp_path, *files)))


def test_datasources_that_can_be_counted(tmp_path: Path) -> None:
    rows = [{"input": prompt, "datasource": prompt.upper()} for prompt in "abab"]
    rows += [{"input": "c"}, {"input": "a", "tools": [{"type": "function"}], "datasource": "tools"}]
    datasources.check(Flags(evaluated(tmp_path, rows)))
    datasources.check(Flags(evaluated(tmp_path, [{"input": "a"}, {"input": "a"}])))
    datasources.check(Flags(["--data.prompt_dataset", "d.jsonl"]))


def test_a_start_checks_them(tmp_path: Path) -> None:
    (_, file) = evaluated(tmp_path, [{"input": "a", "datasource": ["a"]}])
    flags = Flags(["--data.prompt_dataset", file, "--eval.dataset", file])
    with pytest.raises(UsageError, match="a text is needed"):
        rules.check_data(CompleteRun(run=run_of(), flags=flags))
