# SPDX-License-Identifier: Apache-2.0
"""Groups that a run keeps for its report: all answers to a prompt, token by token, with rewards and advantages.

A run keeps prompts of at most :data:`STEPS` steps: of every step at first, and each time that these are too many of
every second one of them. So however long a run is, what is kept is spread over it evenly and stays small.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngrpo.config.run import RunConfig
from ngrpo.machine.console.text import fed_texts, token_texts
from ngrpo.machine.storage.result_folder import CannotWrite, write_text
from ngrpo.trainers.common.side_inputs import unpack
from perturbations.errors import require

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from vllm.tokenizers import TokenizerLike

    from perturbations.replay.trajectory import FinishedTrajectory

FILE = "groups.jsonl"
STEPS = 12
LONGEST = 512
"""As many tokens of an answer are kept at most."""
STEP_BYTES = 120_000
"""A step's line is not longer: of long answers less is kept, and where that is not enough fewer prompts."""
_SHORTEST = 32
_PROMPT = 4_000


class _Answer(NamedTuple):
    """A sample of a step's experiences: the batch, its row there, and its rollout's record."""

    experience: Experience
    row: int
    record: FinishedTrajectory | None


def read(folder: Path) -> list[dict[str, Any]]:
    """The kept steps of a run's folder; none where it kept none."""
    path = folder / FILE
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class KeptGroups:
    """The file of a run's kept steps."""

    def __init__(self, folder: Path, step: int) -> None:
        """
        Args:
            folder: the run's.
            step: the training step at hand, from 0; lines of an earlier run in the folder are forgotten, of one that is
                resumed those of earlier steps stay.
        """
        self._path = folder / FILE
        self._lines = [line for line in read(folder) if line["step"] <= step] if step else []
        steps = [line["step"] for line in self._lines]
        self._stride = math.gcd(*(b - a for a, b in itertools.pairwise(steps))) or 1
        self._has_warned = False

    def add(self, step: int, make: Callable[[], dict[str, Any]]) -> None:
        """Keeps a step if it is due.

        Args:
            step: the training step, from 0.
            make: makes what is kept of it, but for ``step``, which counts from 1 as logs do.
        """
        if step % self._stride:
            return
        self._lines.append({"step": step + 1, **make()})
        if len(self._lines) > STEPS:
            self._stride *= 2
            self._lines = [line for line in self._lines if (line["step"] - 1) % self._stride == 0]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, text)
        except (OSError, CannotWrite) as error:  # a look into the run is no reason to end it
            if not self._has_warned:
                print(f"ngrpo warning: groups for the report are not kept: {error}", flush=True)
            self._has_warned = True


def of_step(
    experiences: Sequence[Experience],
    tokenizer: TokenizerLike,
    *,
    size: int,
    groups: int,
    seed: str,
    gaps: bool = True,
) -> dict[str, Any]:
    """What is kept of a step.

    Args:
        experiences: OpenRLHF's, with advantages.
        tokenizer: of the model.
        size: answers to a prompt, G.
        groups: of how many prompts all answers are kept.
        seed: from which these are drawn.
        gaps: whether the experiences' log-probabilities are the tokens', so that they can be held against the
            rollout's.

    Returns:
        ``rewards`` of all answers, in groups, and ``groups``: ``prompt``, ``diversity`` and ``answers``, each with
        ``reward``, ``advantage`` (the mean over its tokens, which are ``advantages`` where they differ), ``tokens``
        (texts), ``gaps`` (|log π_trainer − log π_rollout| of each), ``fed`` (position and what was fed there) and
        ``cut``, the number of tokens that are left out.
    """
    by_place: dict[int, _Answer] = {}
    for experience in experiences:
        records = unpack(experience.mm_train_inputs) or [None] * len(experience.index)
        for row, place in enumerate(experience.index):
            by_place[place] = _Answer(experience, row, records[row])
    places = sorted(by_place)
    prompts = [places[i : i + size] for i in range(0, len(places), size)]
    sample = sorted(random.Random(seed).sample(range(len(prompts)), min(groups, len(prompts))))
    rewards = [_figure(float(by_place[place].experience.rewards[by_place[place].row])) for place in places]
    made = [_group([by_place[p] for p in prompts[i]], tokenizer, gaps) for i in sample]
    return _shortened({"rewards": rewards, "size": size, "groups": made})


def _shortened(line: dict[str, Any]) -> dict[str, Any]:
    """A step's line with so much left out that it is short enough: ends of answers first, then prompts."""
    longest = LONGEST
    while len(json.dumps(line, ensure_ascii=False).encode()) > STEP_BYTES:
        if longest > _SHORTEST:
            longest //= 2
            for answer in itertools.chain.from_iterable(group["answers"] for group in line["groups"]):
                _cut(answer, longest)
        elif len(line["groups"]) > 1:
            line["groups"].pop()
        else:
            break
    return line


def _cut(answer: dict[str, Any], longest: int) -> None:
    """Leaves an answer's first tokens."""
    left_out = len(answer["tokens"]) - longest
    if left_out <= 0:
        return
    answer["cut"] = answer.get("cut", 0) + left_out
    for key in {"tokens", "gaps", "advantages"} & answer.keys():
        answer[key] = answer[key][:longest]
    if "fed" in answer:
        answer["fed"] = [each for each in answer["fed"] if each[0] < longest]


def diversity(answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """How different the answers of a group are.

    Args:
        answers: their tokens.

    Returns:
        ``different``: how many there are; ``distinct_2``: different pairs of neighboring tokens over all of them;
        ``common_prefix``: tokens until two answers part, the mean over pairs of answers. What there is none of is left
        out.
    """
    pairs = [pair for tokens in answers for pair in itertools.pairwise(tokens)]
    shared = [_common(one, other) for one, other in itertools.combinations(answers, 2)]
    measures = {"different": float(len({tuple(tokens) for tokens in answers}))}
    if pairs:
        measures["distinct_2"] = len(set(pairs)) / len(pairs)
    if shared:
        measures["common_prefix"] = sum(shared) / len(shared)
    return measures


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _group(answers: Sequence[_Answer], tokenizer: TokenizerLike, gaps: bool) -> dict[str, Any]:
    first = answers[0]
    prompt = first.experience.prompts[first.row] if first.experience.prompts else None
    answer_rows = [_answer(answer, tokenizer, gaps) for answer in answers]
    different = diversity([_tokens(answer)[0] for answer in answers])
    return {"prompt": prompt and str(prompt)[:_PROMPT], "diversity": different, "answers": answer_rows}


def _tokens(answer: _Answer) -> tuple[list[int], list[int]]:
    """The answer's tokens, and their positions in the sequence; entry t of the mask is of token t + 1."""
    mask = answer.experience.action_mask[answer.row].bool().cpu()
    positions = (mask.nonzero().flatten() + 1).tolist()
    return answer.experience.sequences[answer.row].cpu()[positions].tolist(), positions


def _answer(answer: _Answer, tokenizer: TokenizerLike, gaps: bool) -> dict[str, Any]:
    experience, row, trajectory = answer
    tokens, positions = _tokens(answer)
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
    rollout = _rollout(answer, positions)
    if rollout is not None and gaps:
        trainer = experience.action_log_probs[row][mask].float().tolist()
        entry["gaps"] = [_figure(abs(a - b), 2) for a, b in zip(trainer[:LONGEST], rollout)]
    if trajectory is not None:
        place = {position: i for i, position in enumerate(positions[:LONGEST])}
        at = enumerate(trajectory.record.positions.tolist())
        entry["fed"] = [[place[p], fed_texts(trajectory.record, i, tokenizer)] for i, p in at if p in place]
    return entry


def _rollout(answer: _Answer, positions: Sequence[int]) -> list[float] | None:
    """log π of the rollout at each token; None where it was not kept."""
    experience, row, trajectory = answer
    if trajectory is not None:
        return [float(trajectory.log_probs[p]) if p < len(trajectory.log_probs) else math.nan for p in positions]
    if experience.rollout_log_probs is None:
        return None
    return experience.rollout_log_probs[row][experience.action_mask[row].bool()].float().tolist()


def _figure(value: float, digits: int = 4) -> float | None:
    """A number with so many significant digits; None where it is none."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def keep(maker: Any, experiences: Sequence[Experience], run: RunConfig) -> None:
    """Keeps groups of the step at hand, if it is due.

    Args:
        maker: OpenRLHF's experience maker.
        experiences: of the step.
        run: whose folder they are kept in.
    """
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
