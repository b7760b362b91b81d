# SPDX-License-Identifier: Apache-2.0
"""Groups that a run keeps for its report: all responses to a prompt, token by token, with rewards and advantages.

At most :data:`STEPS` steps are kept: every step, and each time that there are too many only every second one of them.
So they are spread evenly over a run of any length.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ngrpo.config.run import RunConfig
from ngrpo.machine.console import fed_texts, token_texts
from ngrpo.machine.storage.result_folder import CannotWrite, json_lines, write_text
from ngrpo.machine.upstream.types import Experience, TokenizerLike
from ngrpo.trainers.common.sample_records import unpack
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory

FILE = "groups.jsonl"
STEPS = 12
LONGEST = 512
"""Tokens that are kept of a response at most."""
STEP_BYTES = 120_000
"""The longest line of a step: less is kept of long responses, then fewer prompts."""
_SHORTEST = 32
_PROMPT = 4_000


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
        self._lines = [line for line in read(folder) if line["step"] <= step] if step else []
        steps = [line["step"] for line in self._lines]
        self._stride = math.gcd(*(b - a for a, b in itertools.pairwise(steps))) or 1
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


def of_step(
    experiences: Sequence[Experience], tokenizer: TokenizerLike, *, size: int, groups: int, seed: str, gaps: bool = True
) -> dict[str, Any]:
    """A step's line: ``rewards`` of all responses in groups, their ``size``, and ``groups``.

    A group has ``prompt``, ``diversity`` and ``answers``, each with ``reward``, ``advantage`` (the mean over its
    tokens; ``advantages`` has each token's if they differ), ``tokens`` (texts), ``gaps`` (|log π_trainer −
    log π_rollout| of each), ``fed`` (position and what was fed there) and ``cut``, the number of tokens left out.

    Args:
        size: responses to a prompt, G.
        groups: the number of prompts with kept responses, drawn by ``seed``.
        gaps: whether the experiences' log-probabilities are the tokens'.
    """
    batches = [(experience, unpack(experience.mm_train_inputs)) for experience in experiences]
    by_place = {
        place: (experience, row, records[row] if records else None)
        for experience, records in batches
        for row, place in enumerate(experience.index)
    }
    in_order = [by_place[place] for place in sorted(by_place)]
    rewards = [_figure(float(experience.rewards[row])) for experience, row, _ in in_order]
    prompts = [in_order[i : i + size] for i in range(0, len(in_order), size)]
    made: list[dict[str, Any]] = []
    for number in sorted(random.Random(seed).sample(range(len(prompts)), min(groups, len(prompts)))):
        answers = prompts[number]
        experience, row, _ = answers[0]
        prompt = experience.prompts[row] if experience.prompts else None
        group: dict[str, Any] = {"prompt": prompt and str(prompt)[:_PROMPT]}
        group["diversity"] = diversity([_generated(experience, row)[0] for experience, row, _ in answers])
        group["answers"] = [_answer(*answer, tokenizer, gaps) for answer in answers]
        made.append(group)
    line = {"rewards": rewards, "size": size, "groups": made}
    longest = LONGEST
    while len(json.dumps(line, ensure_ascii=False).encode()) > STEP_BYTES and (longest > _SHORTEST or len(made) > 1):
        if longest > _SHORTEST:
            longest //= 2
            for answer in itertools.chain.from_iterable(group["answers"] for group in made):
                left_out = len(answer["tokens"]) - longest
                if left_out > 0:
                    answer["cut"] = answer.get("cut", 0) + left_out
                for key in {"tokens", "gaps", "advantages"} & answer.keys():
                    answer[key] = answer[key][:longest]
                if "fed" in answer:
                    answer["fed"] = [each for each in answer["fed"] if each[0] < longest]
        else:
            made.pop()
    return line


def diversity(answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """How different a group's responses are, given as tokens.

    ``different``: their number without repeats; ``distinct_2``: different pairs of neighboring tokens over all of them;
    ``common_prefix``: tokens until two responses part, the mean over pairs of responses.
    """
    pairs = [pair for tokens in answers for pair in itertools.pairwise(tokens)]
    # Of two responses, the first of their tokens up to the one at which they part.
    shared = [
        sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(one, other)))
        for one, other in itertools.combinations(answers, 2)
    ]
    measures = {"different": float(len({tuple(tokens) for tokens in answers}))}
    if pairs:
        measures["distinct_2"] = len(set(pairs)) / len(pairs)
    if shared:
        measures["common_prefix"] = sum(shared) / len(shared)
    return measures


def _generated(experience: Experience, row: int) -> tuple[list[int], list[int]]:
    """A response's tokens, and their positions in the sequence; entry t of the mask is of token t + 1."""
    mask = experience.action_mask[row].bool().cpu()
    positions = (mask.nonzero().flatten() + 1).tolist()
    return experience.sequences[row].cpu()[positions].tolist(), positions


def _answer(
    experience: Experience, row: int, trajectory: FinishedTrajectory | None, tokenizer: TokenizerLike, gaps: bool
) -> dict[str, Any]:
    tokens, positions = _generated(experience, row)
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
    rollout = None
    if trajectory is not None:
        rollout = [float(trajectory.log_probs[p]) if p < len(trajectory.log_probs) else math.nan for p in positions]
    elif experience.rollout_log_probs is not None:
        rollout = experience.rollout_log_probs[row][mask].float().tolist()
    if rollout is not None and gaps:
        trainer = experience.action_log_probs[row][mask].float().tolist()
        entry["gaps"] = [_figure(abs(a - b), 2) for a, b in zip(trainer[:LONGEST], rollout)]
    if trajectory is not None:
        place = {position: i for i, position in enumerate(positions[:LONGEST])}
        at = enumerate(trajectory.record.positions.tolist())
        entry["fed"] = [[place[p], fed_texts(trajectory.record, i, tokenizer)] for i, p in at if p in place]
    return entry


def _figure(value: float, digits: int = 4) -> float | None:
    """A number with this many significant digits; None for NaN and infinities."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def keep(maker: Any, experiences: Sequence[Experience], run: RunConfig) -> None:
    """Keeps groups of the current step of OpenRLHF's experience maker, if it is due."""
    step, args, perturbation = maker.training_step, maker.strategy.args, run.perturbation
    if maker.kept_groups is None:
        maker.kept_groups = KeptGroups(Path(require(run.run_dir, "the run's folder")), step)
    maker.kept_groups.add(
        step,
        lambda: of_step(
            experiences,
            maker.tokenizer,
            size=args.rollout.n_samples_per_prompt,
            groups=run.report_groups,
            seed=f"{args.train.seed} {step}",
            gaps=perturbation is None or not perturbation.has_density,
        ),
    )
