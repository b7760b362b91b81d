# SPDX-License-Identifier: Apache-2.0
"""Groups that a run keeps for its report: all responses to a prompt, token by token, with rewards and advantages.

At most :data:`STEPS` steps are kept. At first every step is kept; each time that there are too many, every second one
is dropped. So the kept steps are spread evenly over a run of any length.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.config.run import RunConfig
from ngrpo.machine.console import fed_texts, token_texts
from ngrpo.machine.storage.result_folder import CannotWrite, json_lines, write_text
from ngrpo.machine.upstream.types import Experience, TokenizerLike
from ngrpo.trainers.common import sample_records
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory

FILE = "groups.jsonl"
STEPS = 12
LONGEST = 512
"""Tokens that are kept of a response at most."""
STEP_BYTES = 120_000
"""The longest line of a step: less is kept of long responses, then fewer prompts."""
_SHORTEST = 32
"""Responses are not cut below this many tokens; fewer prompts are kept instead."""
_PROMPT = 4_000
"""Characters that are kept of a prompt at most."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The kept steps of a run's folder; none where it kept none."""
    path = folder / FILE
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class KeptGroups:
    """The file of a run's kept steps."""

    def __init__(self, folder: Path, step: int) -> None:
        """``step`` is the next one, from 0; a resumed run keeps its lines of earlier steps, a new one drops all."""
        self._path = folder / FILE
        self._lines: list[dict[str, Any]] = []
        if step:
            self._lines = [line for line in read(folder) if line["step"] <= step]
        # A resumed run goes on with the stride of its kept steps. The gcd of no distances is 0.
        steps = [line["step"] for line in self._lines]
        distances = [later - earlier for earlier, later in itertools.pairwise(steps)]
        self._stride = math.gcd(*distances) or 1
        self._has_warned = False

    def add(self, step: int, make: Callable[[], dict[str, Any]]) -> None:
        """Keeps step ``step``, from 0, if it is due; ``make`` gives its line without ``step``."""
        if step % self._stride:
            return
        self._lines.append({"step": step + 1, **make()})
        if len(self._lines) > STEPS:
            self._stride *= 2
            self._lines = [line for line in self._lines if (line["step"] - 1) % self._stride == 0]
        try:
            write_text(self._path, json_lines(self._lines))
        except CannotWrite as error:  # a look into the run is no reason to end it
            if not self._has_warned:
                print(f"ngrpo: warning: groups for the report are not kept: {error}", flush=True)
            self._has_warned = True


def keep(maker: Any, experiences: Sequence[Experience], run: RunConfig) -> None:
    """Keeps groups of the current step of OpenRLHF's experience maker, if it is due."""
    step = maker.training_step
    args = maker.strategy.args
    if maker.kept_groups is None:
        maker.kept_groups = KeptGroups(Path(require(run.run_dir, "the run's folder")), step)

    def line() -> dict[str, Any]:
        return of_step(
            experiences,
            maker.tokenizer,
            size=args.rollout.n_samples_per_prompt,
            groups=run.report_groups,
            seed=f"{args.train.seed} {step}",
            gaps=run.perturbation is None or not run.perturbation.has_density,
        )

    maker.kept_groups.add(step, line)


# ---- the line of a step --------------------------------------------------------------------------------------------


class _Response(NamedTuple):
    """A response of a step: its row in a micro-batch, and its trajectory if it has one."""

    experience: Experience
    row: int
    trajectory: FinishedTrajectory | None


def of_step(
    experiences: Sequence[Experience], tokenizer: TokenizerLike, *, size: int, groups: int, seed: str, gaps: bool = True
) -> dict[str, Any]:
    """A step's line: ``rewards`` of all responses in groups, their ``size``, and ``groups``.

    A group has ``prompt``, ``diversity`` and ``answers``, its responses, each with ``reward``, ``advantage`` (the mean
    over its tokens; ``advantages`` has each token's if they differ), ``tokens`` (texts), ``gaps`` (|log π_trainer −
    log π_rollout| of each), ``fed`` (position and what was fed there) and ``cut``, the number of tokens left out.

    Args:
        experiences: the micro-batches of the step.
        tokenizer: the model's.
        size: responses to a prompt, G.
        groups: the number of prompts with kept responses, drawn by ``seed``.
        seed: of that draw.
        gaps: whether the experiences' log-probabilities are the tokens'.
    """
    responses = _in_order(experiences)
    rewards = [_figure(float(response.experience.rewards[response.row])) for response in responses]
    groups_of_step = [responses[start : start + size] for start in range(0, len(responses), size)]
    drawn = random.Random(seed).sample(range(len(groups_of_step)), min(groups, len(groups_of_step)))
    lines = [_group(groups_of_step[number], tokenizer, gaps) for number in sorted(drawn)]
    line = {"rewards": rewards, "size": size, "groups": lines}
    longest = LONGEST
    while _bytes(line) > STEP_BYTES:
        if longest > _SHORTEST:
            longest //= 2
            for group in lines:
                for answer in group["answers"]:
                    _cut(answer, longest)
        elif len(lines) > 1:
            lines.pop()
        else:
            break
    return line


def _in_order(experiences: Sequence[Experience]) -> list[_Response]:
    """A step's responses in the order of generation, in which a prompt's responses are side by side."""
    by_number: dict[int, _Response] = {}
    for experience in experiences:
        trajectories = sample_records.unpack(experience.mm_train_inputs) or [None] * len(experience.index)
        for row, number in enumerate(experience.index):
            by_number[number] = _Response(experience, row, trajectories[row])
    return [by_number[number] for number in sorted(by_number)]


def _bytes(line: dict[str, Any]) -> int:
    return len(json.dumps(line, ensure_ascii=False).encode())


def _group(responses: Sequence[_Response], tokenizer: TokenizerLike, gaps: bool) -> dict[str, Any]:
    """The entry of a prompt."""
    experience, row, _ = responses[0]
    prompt = experience.prompts[row] if experience.prompts else None
    return {
        "prompt": prompt and str(prompt)[:_PROMPT],
        "diversity": diversity([_generated(response)[0] for response in responses]),
        "answers": [_entry(response, tokenizer, gaps) for response in responses],
    }


def _cut(answer: dict[str, Any], longest: int) -> None:
    """Cuts a response's entry to its first ``longest`` tokens."""
    left_out = len(answer["tokens"]) - longest
    if left_out > 0:
        answer["cut"] = answer.get("cut", 0) + left_out
    for key in ("tokens", "gaps", "advantages"):
        if key in answer:
            answer[key] = answer[key][:longest]
    if "fed" in answer:
        answer["fed"] = [[place, text] for place, text in answer["fed"] if place < longest]


def diversity(responses: Sequence[Sequence[int]]) -> dict[str, float]:
    """How different a group's responses are, given as tokens.

    ``different``: their number without repeats; ``distinct_2``: different pairs of neighboring tokens over all of them;
    ``common_prefix``: tokens until two responses part, the mean over pairs of responses.
    """
    pairs = [pair for tokens in responses for pair in itertools.pairwise(tokens)]
    common_prefixes = [_common_prefix(first, second) for first, second in itertools.combinations(responses, 2)]
    measures = {"different": float(len({tuple(tokens) for tokens in responses}))}
    if pairs:
        measures["distinct_2"] = len(set(pairs)) / len(pairs)
    if common_prefixes:
        measures["common_prefix"] = sum(common_prefixes) / len(common_prefixes)
    return measures


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens before two responses part."""
    length = 0
    for token_of_first, token_of_second in zip(first, second):
        if token_of_first != token_of_second:
            break
        length += 1
    return length


def _generated(response: _Response) -> tuple[list[int], list[int]]:
    """A response's tokens, and their positions in the sequence; entry t of the mask is of token t + 1."""
    mask = response.experience.action_mask[response.row].bool().cpu()
    positions = (mask.nonzero().flatten() + 1).tolist()
    return response.experience.sequences[response.row].cpu()[positions].tolist(), positions


def _entry(response: _Response, tokenizer: TokenizerLike, gaps: bool) -> dict[str, Any]:
    """The entry of a response, of its first :data:`LONGEST` tokens."""
    experience, row, trajectory = response
    tokens, positions = _generated(response)
    mask = experience.action_mask[row].bool()
    advantages = [_figure(value) for value in experience.advantages[row][mask].float().tolist()]
    finite = [value for value in advantages if value is not None]
    entry: dict[str, Any] = {
        "reward": _figure(float(experience.rewards[row])),
        "advantage": _figure(sum(finite) / len(finite)) if finite else None,
        "tokens": token_texts(tokens[:LONGEST], tokenizer),
    }
    if len(set(advantages)) > 1:
        entry["advantages"] = advantages[:LONGEST]
    if len(tokens) > LONGEST:
        entry["cut"] = len(tokens) - LONGEST
    rollout = _rollout_log_probs(response, positions)
    if rollout is not None and gaps:
        trainer = experience.action_log_probs[row][mask].float().tolist()
        differences = [abs(of_trainer - of_rollout) for of_trainer, of_rollout in zip(trainer[:LONGEST], rollout)]
        entry["gaps"] = [_figure(difference, digits=2) for difference in differences]
    if trajectory is not None:
        place_of = {position: place for place, position in enumerate(positions[:LONGEST])}
        entry["fed"] = []
        for edit, position in enumerate(trajectory.record.positions.tolist()):
            if position in place_of:
                entry["fed"].append([place_of[position], fed_texts(trajectory.record, edit, tokenizer)])
    return entry


def _rollout_log_probs(response: _Response, positions: Sequence[int]) -> list[float] | None:
    """log π_rollout of the tokens at these positions, given their prompt; None where the rollout kept none."""
    experience, row, trajectory = response
    rounds = sample_records.two_rounds(experience.mm_train_inputs, len(experience.action_mask))[row]
    if rounds is not None and rounds.log_probs is not None:  # drawn given another prompt
        return None
    if trajectory is not None:
        log_probs = trajectory.log_probs
        return [float(log_probs[p]) if p < len(log_probs) else math.nan for p in positions]
    if experience.rollout_log_probs is None:
        return None
    mask = experience.action_mask[row].bool()
    return experience.rollout_log_probs[row][mask].float().tolist()


def _figure(value: float, digits: int = 4) -> float | None:
    """A number with this many significant digits; None for NaN and infinities."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
