# SPDX-License-Identifier: Apache-2.0
"""The column ``datasource`` of evaluation files, by which OpenRLHF names its metrics: ``eval_NAME_pass1``."""

from ngrpo.config import dataset_file
from ngrpo.config.dataset_file import CHECKED_ROWS, ColumnNames
from ngrpo.config.input_checks import local_files
from ngrpo.machine.models.conversation import TOOLS
from ngrpo.machine.storage.datafiles import Row, read_rows
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

_FLAG = "--eval.dataset"
_COLUMN = "datasource"
_DEFAULT = "default"  # OpenRLHF's, for a row without the column


def names(flags: Flags) -> list[str]:
    """The value that OpenRLHF takes as ``datasource`` from each row of the evaluation files, in their order."""
    datasources = []
    for name in local_files(_FLAG, flags.value(_FLAG)):
        datasources += [str(row.get(_COLUMN, _DEFAULT)) for row in read_rows(_FLAG, name, CHECKED_ROWS)]
    return datasources


def check(flags: Flags) -> None:
    """Raises ``UsageError`` for a row of the evaluation files that :class:`Datasources` refuses."""
    files = list(local_files(_FLAG, flags.value(_FLAG)))
    if not any(_COLUMN in dataset_file.read(_FLAG, name, flags).columns for name in files):
        return
    datasources = Datasources(ColumnNames.of(flags).prompt)
    for name in files:
        for number, row in enumerate(read_rows(_FLAG, name, CHECKED_ROWS), start=1):
            datasources.check(row, f"{_FLAG} {name}: row {number}")


class Datasources:
    """The datasources of an evaluation's prompts, row by row.

    OpenRLHF 0.11.2 looks a datasource up by its prompt, in a dictionary: a list ends the first evaluation with a
    ``TypeError``, and all responses to a prompt that has two count for the last one.
    """

    def __init__(self, prompt_column: str) -> None:
        self._prompt_column = prompt_column
        self._first_rows: dict[str, tuple[str, str]] = {}  # by prompt: the datasource and the place of its first row

    def check(self, row: Row, place: str) -> None:
        """Raises ``UsageError`` for a datasource that is no text, and for another one than the prompt's first."""
        datasource = row.get(_COLUMN, _DEFAULT)
        if not isinstance(datasource, str) or not datasource.strip():
            raise UsageError(
                f"{place} has the {_COLUMN} {datasource!r}; a text is needed, since it names the metric"
                " eval_NAME_pass1. Write a text, or leave it out of the row."
            )
        prompt = repr((row.get(self._prompt_column), row.get(TOOLS)))
        first_datasource, first_place = self._first_rows.setdefault(prompt, (datasource, place))
        if datasource != first_datasource:
            raise UsageError(
                f"{place} has the {_COLUMN} {datasource!r}, and the same prompt has {first_datasource!r} in"
                f" {first_place}. OpenRLHF 0.11.2 counts both for the last one. Give them one, or leave a row out."
            )
