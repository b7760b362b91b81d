"""Mutations of formulas: each changes one line of the product, and the tests named beside it must then fail.

Run by hand, from the project's root (a few seconds for each mutation):

    python -m tests.mutations                 # all of them
    python -m tests.mutations normal copo     # those whose file or reason contains one of these words

and by `make test-all`. A mutation that survives shows a formula that no test holds; the exit status is then 1. Nothing
in the working tree is touched: the mutations are made in a temporary copy.

To add one, append a :class:`Mutation` to the list of its part. ``old`` must occur exactly once in the file, which
tests/fast/test_mutations.py checks, so a line that was rewritten takes its mutation along.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COPIED = ("perturbations", "ngrpo", "tests", "examples", "benchmarks", "docs")
_FAST = "tests/fast/"


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        file: path from the project's root.
        old: text that occurs exactly once there.
        new: what takes its place.
        tests: tests in tests/fast, of which at least one must fail, as pytest's arguments without that folder.
        wrong: what is wrong then, in a few words.
    """

    file: str
    old: str
    new: str
    tests: str
    wrong: str


_DENSITY, _TESTED = "perturbations/density.py", "test_density.py"

DENSITIES = [
    Mutation(
        _DENSITY,
        "noise = (scores - log_p).clamp(*GUMBEL_RANGE)",
        "noise = scores - log_p",
        _TESTED,
        "gumbel: the noise is not clamped",
    ),
    Mutation(
        _DENSITY,
        "kept & (log_p > GUMBEL_MASK)",
        "kept",
        _TESTED,
        "gumbel: unlikely candidates are counted in the mean",
    ),
    Mutation(
        _DENSITY,
        "used = kept & (probabilities > DIRICHLET_MASK)",
        "used = kept",
        _TESTED,
        "dirichlet: unlikely candidates are counted in the mean",
    ),
]

ADVANTAGES = [
    Mutation(
        "ngrpo/advantages/base.py",
        "    apart = rewards - rewards[:, :1]",
        "    apart = rewards",
        "test_advantages.py",
        "group_norm: the float32 mean of equal rewards is not their value",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "correction=min(1, rewards.shape[1] - 1)",
        "correction=0",
        "test_advantages.py",
        "group_norm: the deviation of a population",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "(apart - apart.mean(-1, keepdim=True))",
        "apart",
        "test_advantages.py",
        "group_norm: the mean is not taken off",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        " / (deviation + 1e-9)",
        "",
        "test_advantages.py",
        "group_norm: not divided by the deviation",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "(~rewards.isfinite()).nonzero()",
        "rewards.isnan().nonzero()",
        "test_advantages.py",
        "an infinite reward is let through",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "size = rewards.shape[1] + self.n",
        "size = rewards.shape[1]",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the mean",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        " + self.n * mean.square()",
        "",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the deviation",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "(squares / (size - 1))",
        "(squares / size)",
        "test_advantages.py",
        "ngrpo: the deviation of a population",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        ".sqrt() + 1e-6)",
        ".sqrt() + 1e-9)",
        "test_advantages.py",
        "ngrpo: another epsilon",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "(rewards - self.max_reward).clamp(max=0.0)",
        "(rewards - 1.0).clamp(max=0.0)",
        "test_advantages.py",
        "ngrpo: max_reward is ignored",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        '("0.16", "0.24")',
        '("0.24", "0.16")',
        "test_advantages.py",
        "ngrpo: the clip range the wrong way round",
    ),
    Mutation(
        "ngrpo/advantages/psr.py",
        "return rewards.clone()",
        "return rewards - 1.0",
        "test_advantages.py",
        "psr: wrong answers count",
    ),
    Mutation(
        "ngrpo/advantages/nsr.py",
        "return rewards - 1.0",
        "return rewards.clone()",
        "test_advantages.py",
        "nsr: correct answers count",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "self.lam * rewards, rewards - 1.0",
        "rewards, rewards - 1.0",
        "test_advantages.py",
        "w_reinforce: λ is ignored",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "self.lam * rewards, rewards - 1.0",
        "self.lam * rewards, rewards",
        "test_advantages.py",
        "w_reinforce: wrong answers do not count",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "rewards >= 1.0 - ROUNDING",
        "rewards > 0.0",
        "test_advantages.py",
        "w_reinforce: a partly correct answer counts as correct",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "rewards + self.beta / (1.0 + counts.to(rewards.dtype)).sqrt()",
        "rewards + 1.0 / (1.0 + counts.to(rewards.dtype)).sqrt()",
        "test_advantages.py",
        "copo: β is ignored",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "(1.0 + counts.to",
        "(2.0 + counts.to",
        "test_advantages.py",
        "copo: 2 + N in place of 1 + N",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "(rewards.dtype)).sqrt()",
        "(rewards.dtype))",
        "test_advantages.py",
        "copo: no square root",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "rewards + self.beta",
        "rewards - self.beta",
        "test_advantages.py",
        "copo: the bonus punishes",
    ),
    Mutation(
        "ngrpo/trainer/visits.py",
        "return [self._seen[key] - 1 for key in keys]",
        "return [self._seen[key] for key in keys]",
        "test_advantages.py",
        "copo: an answer counts itself",
    ),
    Mutation(
        "ngrpo/trainer/metrics.py",
        "agreed += int(record.agreed[counted].sum())",
        "agreed += int(record.agreed.sum())",
        "test_measures.py",
        "anchor_agreement counts positions that its denominator leaves out",
    ),
]

MUTATIONS = [*DENSITIES, *ADVANTAGES]


def problem(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Why a mutation cannot be made, or None."""
    file = root / mutation.file
    if not file.is_file():
        return f"there is no file {mutation.file}"
    count = file.read_text(encoding="utf-8").count(mutation.old)
    return None if count == 1 else f"its old text occurs {count} times in {mutation.file}, not once"


def _pytest(root: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(_FAST + test for test in tests)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def survives(mutation: Mutation, root: Path) -> bool:
    """Whether the mutation's tests pass in the copy at ``root`` although its line is wrong.

    Raises:
        RuntimeError: where the mutation cannot be made, or pytest does neither pass nor fail.
    """
    reason = problem(mutation, root)
    if reason is not None:
        raise RuntimeError(f"mutation {mutation.wrong!r}: {reason}")
    file = root / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        result = _pytest(root, mutation.tests.split())
    finally:
        file.write_text(text, encoding="utf-8")
    if result.returncode not in (0, 1):
        raise RuntimeError(f"mutation {mutation.wrong!r}: pytest could not run\n{result.stdout[-2000:]}")
    return result.returncode == 0


def main(words: list[str]) -> int:
    """Makes each mutation in a copy and reports those that survive; the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.file or word in m.wrong for word in words)]
    if not chosen:
        print(f"no mutation's file or reason contains {' or '.join(words)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        print("the tests without a mutation", flush=True)
        clean = _pytest(root, sorted({test for m in chosen for test in m.tests.split()}))
        if clean.returncode:
            print(f"they fail already, so they show nothing:\n{clean.stdout[-4000:]}", file=sys.stderr)
            return 2
        alive = []
        for mutation in chosen:
            start = time.monotonic()
            survived = survives(mutation, root)
            alive += [mutation] * survived
            outcome = "SURVIVES" if survived else "caught"
            print(f"{outcome:8} {time.monotonic() - start:5.1f} s  {mutation.file}: {mutation.wrong}", flush=True)
    print(f"{len(alive)} of {len(chosen)} mutations survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
