# SPDX-License-Identifier: Apache-2.0
"""The rows of a training's prompts: files are read as the checks at the start and `ngrpo eval` read them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngrpo.config.datasources import Datasources
from ngrpo.config.input_checks import check_row, label_note_of
from ngrpo.config.run import current_run
from ngrpo.machine.storage.datafiles import ENDINGS, Row, is_nothing, label_of, read_rows, with_shortest_floats
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, Flags
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy
from perturbations.errors import UsageError, require

if TYPE_CHECKING:
    from pyarrow import DataType

TRAINED, EVALUATED = DATASETS


class Place(NamedTuple):
    """Where a row is: the number of its source, and its number there."""

    source: int
    row: int


class Source(NamedTuple):
    """One of the datasets of a flag.

    Attributes:
        flag: that names it.
        name: a file, a saved dataset or one of the hub.
        rows: a list, or a dataset of the hub, which decodes a row's pictures when it is read.
        label_type: the Arrow type of a dataset's labels; None for a file's, in which floats are the shortest already.
    """

    flag: str
    name: str
    rows: Sequence[Row]
    label_type: "DataType | None" = None

    @property
    def subject(self) -> str:
        """Its flag and name, for messages."""
        return f"{self.flag} {self.name}"


class PromptRows:
    """What `prepare_datasets` and `PromptDataset` use of a `datasets.Dataset`: a length, `select`, rows in order."""

    def __init__(
        self, sources: Sequence[Source], places: Sequence[Place], input_key: str, label_key: str | None
    ) -> None:
        self._sources = sources
        self._places = places
        self._input_key = input_key
        self._label_key = label_key

    def __len__(self) -> int:
        return len(self._places)

    def select(self, numbers: Sequence[int]) -> "PromptRows":
        """The rows with these numbers."""
        places = [self._places[number] for number in numbers]
        return PromptRows(self._sources, places, self._input_key, self._label_key)

    def __iter__(self) -> Iterator[Row]:
        """The rows.

        Raises:
            UsageError: for a row without a value, and for a prompt that the run cannot render. A start looks at the
                first 100,000 rows of files only, and not into saved datasets and those of the hub.
        """
        flags = Flags(current_run().openrlhf)
        columns = [column for column in (self._input_key, self._label_key) if column]
        noted = set()  # numbers of the sources with a warning about a label
        datasources = Datasources(self._input_key)
        for place in self._places:
            source = self._sources[place.source]
            row = dict(source.rows[place.row])
            subject = f"{source.subject}: row {place.row + 1}"
            for column in columns:
                if is_nothing(row.get(column)):
                    raise UsageError(f"{subject} has no {column!r}. Give it one, or leave the row out.")
            check_row(row, flags, subject=subject)
            if source.flag == EVALUATED:
                datasources.check(row, subject)
            if self._label_key:
                label = row[self._label_key]
                if source.label_type is not None:
                    note = label_note_of(self._label_key, label, place.row + 1)
                    if note and place.source not in noted:
                        noted.add(place.source)
                        print(f"ngrpo: warning: {source.subject}: {note}", flush=True)
                    label = with_shortest_floats(label, source.label_type)
                row[self._label_key] = label_of(label)
            yield row


@around
def blending_datasets(
    original: Callable[..., Any],
    datasets: str,
    probabilities: str | None = None,
    strategy: DeepspeedStrategy | None = None,
    seed: int = 42,
    max_count: float = 1e8,
    stopping_strategy: str = "all_exhausted",
    dataset_split: str = "train",
) -> PromptRows:
    """`blending_datasets`: our reader reads files, OpenRLHF loads saved datasets and those of the hub.

    OpenRLHF loads files with the package `datasets`, which guesses one type for a column: the label "2024-01-01"
    becomes a datetime, and the labels 7 and 7.5 become 7.0 and 7.5.
    """
    args = require(require(strategy, "strategy").args, "strategy.args")
    flag = TRAINED if datasets == args.data.prompt_dataset else EVALUATED
    sources = []
    for name in datasets.split(","):
        name = name.strip()
        if Path(name).suffix in ENDINGS:
            sources.append(Source(flag, name, read_rows(flag, name, int(max_count))))
            continue
        try:
            rows = original(name, None, strategy, max_count=max_count, dataset_split=dataset_split)
        except AttributeError as error:
            # OpenRLHF 0.11.2 calls `select` on the dictionary of all splits where it lacks the one that is named.
            if error.name != "select" or not isinstance(error.obj, dict):
                raise
            raise UsageError(
                f"{flag} {name}: has no split {dataset_split!r} ({DATASETS[flag]}). Its splits: {', '.join(error.obj)}."
                f" Name one of them with {DATASETS[flag]}."
            ) from None
        has_labels = args.data.label_key in rows.features
        label_type = rows.features.arrow_schema.field(args.data.label_key).type if has_labels else None
        sources.append(Source(flag, name, rows, label_type))
    places = [Place(number, row) for number, source in enumerate(sources) for row in range(len(source.rows))]
    if probabilities is not None:
        shares = [float(share) for share in probabilities.split(",")]
        places = _interleaved(places, len(sources), shares, seed, stopping_strategy)
    return PromptRows(sources, places, args.data.input_key, args.data.label_key)


def _interleaved(
    places: Sequence[Place], sources: int, shares: list[float], seed: int, stopping_strategy: str
) -> list[Place]:
    """Places in the order in which `datasets` draws rows by ``--data.prompt_probs``; the draw needs no content."""
    from datasets import Dataset, interleave_datasets

    numbered = []
    for number in range(sources):
        rows = [{"source": place.source, "row": place.row} for place in places if place.source == number]
        numbered.append(Dataset.from_list(rows))
    drawn = interleave_datasets(numbered, probabilities=shares, seed=seed, stopping_strategy=stopping_strategy)
    return [Place(source, row) for source, row in zip(drawn["source"], drawn["row"], strict=True)]
