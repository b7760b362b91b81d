# SPDX-License-Identifier: Apache-2.0
"""This project's scorers and other graders on the pairs of tests/data/scorer_pairs.jsonl.

pip download verl --no-deps && unzip verl-*.whl -d verl-wheel
python -m benchmarks.graders [--verl verl-wheel] [--show]

OpenCompass and prime-rl (through verifiers) check by math-verify with settings of their own, which are repeated here.
verl's files are loaded from an unpacked wheel, without its dependencies.

python -m benchmarks.graders --responses runs/a runs/b --tree FOLDER

Real responses, in folders of ngrpo eval, scored here and by another state of this project (git archive 7a87fef^: before
the scorers were rewritten): where the verdicts differ, and responses per second.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.machine import describe
from ngrpo.methods.scoring.answers import check_choice, check_math, last_boxed
from tests.support.scorer_pairs import CHOICE, MATH, Pair

Grader = Callable[[Pair], bool]


def graders(verl: Path | None) -> dict[str, Grader]:
    """Each grader by its name; verl's only with its unpacked wheel."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, StringExtractionConfig, parse, verify

    opencompass = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    def of_opencompass(pair: Pair) -> bool:
        said = parse(pair.response, [opencompass], extraction_mode="first_match")
        return verify(said, parse(f"${pair.gold}$", extraction_mode="first_match"))

    def of_prime_rl(pair: Pair) -> bool:
        rest = pair.response.rpartition("</think>")[2]
        return verify(parse(f"\\boxed{{{pair.gold}}}"), parse(f"\\boxed{{{last_boxed(rest) or ''}}}"))

    def letters(pair: Pair) -> bool:
        config = [StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))]
        return parse(pair.response, config)[:1] == [pair.gold.lower()]

    found: dict[str, Grader] = {
        "ngrpo": lambda p: (check_choice(*p[2:4], p.options) if p.options else check_math(*p[2:4])).correct,
        "math-verify": lambda p: letters(p) if p.options else verify(parse(f"\\boxed{{{p.gold}}}"), parse(p.response)),
        "latex2sympy2_extended": _by_latex2sympy,
        "OpenCompass": of_opencompass,
        "prime-rl": of_prime_rl,
    }
    if verl:
        found |= {f"verl {name}": partial(_by_verl, module) for name, module in _verl(verl).items()}
    return found


def _by_latex2sympy(pair: Pair) -> bool:
    from latex2sympy2_extended import latex2sympy

    gold, said = (latex2sympy(text) for text in (pair.gold, last_boxed(pair.response) or pair.response))
    return bool(gold == said or (gold - said).simplify() == 0)


def _by_verl(module: Any, pair: Pair) -> bool:
    result = module.compute_score(pair.response, pair.gold)
    score = result["score"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
    return float(score) > 0


def _verl(wheel: Path) -> dict[str, Any]:
    """verl's graders, with its package and its time limit (an alarm) replaced by empty ones."""
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        package: Any = ModuleType(name)
        package.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = package
    functional: Any = ModuleType("verl.utils.py_functional")
    functional.timeout_limit = lambda seconds: lambda function: function
    sys.modules[functional.__name__] = functional
    names = ("math_verify", "math_reward", "math_dapo", "prime_math")
    found: dict[str, Any] = {name: import_module(f"verl.utils.reward_score.{name}") for name in names}
    inner = found["math_verify"]._verify_in_subprocess  # its pool of processes would import the whole of verl
    found["math_verify"].compute_score = lambda response, gold: inner(f"\\boxed{{{gold}}}", response)
    return found


_OF_TREE = """
import json, sys
from ngrpo.scoring.math_answers import check
for line in sys.stdin:
    print(int(check(*json.loads(line)).correct), flush=True)
"""


def of_tree(folder: Path) -> Grader:
    """The math scorer of another state of this project, in a process of its own."""
    command, environment = [sys.executable, "-c", _OF_TREE], {**os.environ, "PYTHONPATH": str(folder)}
    child: Any = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=folder, text=True
    )

    def grader(pair: Pair) -> bool:
        print(json.dumps([pair.gold, pair.response]), file=child.stdin, flush=True)
        return child.stdout.readline() == "1\n"

    return grader


def compare_responses(folders: Sequence[Path], tree: Path) -> None:
    """Prints how many responses each scorer accepts, its speed, and the responses that they judge differently."""
    pairs = []
    for folder in folders:
        lines = (
            (folder / name).read_text(encoding="utf-8").split("\n") for name in ("problems.jsonl", "samples.jsonl")
        )
        problems, samples = ([json.loads(line) for line in each if line] for each in lines)
        golds = {problem["id"]: problem["answer"] for problem in problems}
        pairs += [Pair(s["problem"], folder.name, golds[s["problem"]], s["text"], False) for s in samples]
    scorers: dict[str, Grader] = {"before": of_tree(tree), "now": lambda pair: check_math(*pair[2:4]).correct}
    verdicts: dict[str, list[bool]] = {name: [] for name in scorers}
    seconds = dict.fromkeys(scorers, 0.0)
    for scorer in scorers.values():
        scorer(pairs[0])  # starts its process
    for pair in pairs:  # in turns, for a machine's speed changes
        for name, scorer in scorers.items():
            began = time.perf_counter()
            verdicts[name].append(scorer(pair))
            seconds[name] += time.perf_counter() - began
    for name, found in verdicts.items():
        print(f"{name:<8}{sum(found)} of {len(pairs)} accepted, {len(pairs) / seconds[name]:.0f} responses per second")
    for pair, before, now in zip(pairs, verdicts["before"], verdicts["now"]):
        if before != now:
            print(f"\n{pair.source} {pair.kind}, now {'right' if now else 'wrong'}: {pair.gold!r}\n{pair.response}")


def measure(grader: Grader, pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The wrong responses that a grader accepts, and the right ones that it refuses, as on an error."""
    accepted, refused = [], []
    for pair in pairs:
        try:
            right = grader(pair)
        except Exception:
            right = False
        if right != pair.right:
            (refused if pair.right else accepted).append(pair)
    return accepted, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="folder of verl's unpacked wheel")
    parser.add_argument("--only", help="one grader's name")
    parser.add_argument("--kinds", action="store_true", help="also count by kind")
    parser.add_argument("--show", action="store_true", help="print every wrong verdict")
    parser.add_argument("--responses", type=Path, nargs="+", help="folders of ngrpo eval")
    parser.add_argument("--tree", type=Path, help="folder with another state of this project")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.responses:
        compare_responses(options.responses, options.tree)
        return
    packages = ", ".join(f"{name} {version(name)}" for name in ("math-verify", "latex2sympy2-extended", "sympy"))
    print(f"{describe()}, {packages}\n")
    for title, pairs in (("math", MATH), ("choice", CHOICE)):
        right = sum(pair.right for pair in pairs)
        print(f"{title:<28}{f'accepted of {len(pairs) - right}':>18}{f'refused of {right}':>18}")
        for name, grader in graders(options.verl).items():
            if options.only not in (None, name) or (title == "choice" and name not in ("ngrpo", "math-verify")):
                continue
            accepted, refused = measure(grader, pairs)
            print(f"  {name:<26}{len(accepted):>18}{len(refused):>18}")
            counts = [Counter(pair.kind for pair in wrong) for wrong in (accepted, refused)]
            for kind in dict.fromkeys(pair.kind for pair in pairs) if options.kinds else ():
                print(f"    {kind:<24}{counts[0][kind]:>18}{counts[1][kind]:>18}")
            for pair in (*accepted, *refused) if options.show else ():
                verdict = "refused" if pair.right else "accepted"
                print(f"    {verdict} {pair.kind}: {pair.response!r} for {pair.gold!r}")
        print()


if __name__ == "__main__":
    main()
