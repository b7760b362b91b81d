# SPDX-License-Identifier: Apache-2.0
"""What a training is doing, read from the lines that OpenRLHF, vLLM and transformers log.

One table has the lines. A test finds each line's text in the installed release of its package.
"""

import re
from typing import NamedTuple

DRAWING = "drawing responses"
_BAR = r".*?(?P<done>\d+)/(?P<total>\d+)"  # of tqdm: `Loading weights:  15%|█▌        | 41/272 [00:00<…`


class Phase(NamedTuple):
    """A phase of a run, and the line that shows it.

    Attributes:
        text: the phase in the user's words.
        line: a regular expression that is searched in a line; ``done`` and ``total`` are groups of a progress bar.
        unit: what the bar counts.
        quoted: the text of the line in upstream's source.
        source: the package and the file that logs the line.
    """

    text: str
    line: str
    unit: str
    quoted: str
    source: tuple[str, str]


_LOADED = ("Loading weights", ("transformers", "core_model_loading.py"))

PHASES = (
    Phase(
        text="reading the data",
        line=rf"Preprocessing data:{_BAR}",
        unit="rows",
        quoted="Preprocessing data",
        source=("openrlhf", "datasets/prompts_dataset.py"),
    ),
    Phase(
        text="configuring the engine",
        line=r"Resolved architecture: ",
        unit="",
        quoted="Resolved architecture: ",
        source=("vllm", "config/model.py"),
    ),
    Phase("loading the actor", rf"\(PolicyModelActor\b.*Loading weights:{_BAR}", "tensors", *_LOADED),
    Phase("loading the reference model", rf"\(ReferenceModelActor\b.*Loading weights:{_BAR}", "tensors", *_LOADED),
    Phase("loading the critic", rf"\(CriticModelActor\b.*Loading weights:{_BAR}", "tensors", *_LOADED),
    Phase("loading the reward model", rf"\(RewardModelActor\b.*Loading weights:{_BAR}", "tensors", *_LOADED),
    Phase(
        text="starting the engine",
        line=r"Initializing a V1 LLM engine",
        unit="",
        quoted="Initializing a V1 LLM engine",
        source=("vllm", "v1/engine/core.py"),
    ),
    Phase(
        text="loading the engine's weights",
        line=rf"Loading safetensors checkpoint shards:{_BAR}",
        unit="files",
        quoted="Loading safetensors checkpoint shards",
        source=("vllm", "model_executor/model_loader/weight_utils.py"),
    ),
    Phase(
        text="compiling the engine's model",
        line=r"Dynamo bytecode transform time",
        unit="",
        quoted="Dynamo bytecode transform time",
        source=("vllm", "compilation/backends.py"),
    ),
    Phase(
        text="warming up the engine",
        line=r"GPU KV cache size",
        unit="",
        quoted="GPU KV cache size",
        source=("vllm", "v1/core/kv_cache_utils.py"),
    ),
    Phase(
        text="capturing the engine's CUDA graphs",
        line=rf"Capturing CUDA graphs.*?:{_BAR}",
        unit="graphs",
        quoted="Capturing CUDA graphs",
        source=("vllm", "v1/worker/gpu_model_runner.py"),
    ),
    Phase(
        text=DRAWING,
        line=rf"Generate samples:{_BAR}",
        unit="prompts",
        quoted="Generate samples",
        source=("openrlhf", "trainer/ppo_utils/samples_generator.py"),
    ),
    Phase(
        text="computing log-probabilities",
        line=rf"\bforward:{_BAR}",
        unit="micro-batches",
        quoted="method_name",
        source=("openrlhf", "trainer/ray/launcher.py"),
    ),
    # Without the bar's count, which OpenRLHF's own refreshes leave at 0 until the last micro-batch.
    Phase(
        text="updating the weights",
        line=r"Train epoch \[\d+/\d+\]:",
        unit="",
        quoted="Train epoch [",
        source=("openrlhf", "trainer/ray/ppo_actor.py"),
    ),
)

_EXPRESSIONS = [(phase, re.compile(phase.line)) for phase in PHASES]


class Status(NamedTuple):
    """What a run is doing: the phase, and how far it is where that is counted."""

    text: str
    done: int | None = None
    total: int | None = None
    unit: str = ""


def status_of(line: str) -> Status | None:
    """The status that a line of a run's log shows; None for any other line."""
    for phase, expression in _EXPRESSIONS:
        shown = expression.search(line)
        if shown is None:
            continue
        counts = shown.groupdict()
        if counts:
            return Status(phase.text, int(counts["done"]), int(counts["total"]), phase.unit)
        return Status(phase.text)
    return None
