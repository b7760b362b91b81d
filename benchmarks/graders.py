# SPDX-License-Identifier: Apache-2.0
"""This project's scorers and other graders on the pairs of tests/data/scorer_pairs.jsonl.

    pip download verl --no-deps && unzip verl-*.whl -d verl-wheel
    python -m benchmarks.graders [--verl verl-wheel] [--show]

OpenCompass and prime-rl (through verifiers) check by math-verify with settings of their own, which are repeated here.
verl's files are loaded from an unpacked wheel, without its dependencies.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.machine import describe
from ngrpo.methods.scoring.answers import check_choice, check_math, last_boxed
from tests.support.scorer_pairs import CHOICE, MATH, Pair

Grader = Callable[[Pair], bool]
_OF_CHOICES = ("ngrpo", "math-verify")  # the graders that also check letters
_PACKAGES = ("math-verify", "latex2sympy2-extended", "sympy")


def graders(verl: Path | None) -> dict[str, Grader]:
    """Each grader by its name; verl's only with its unpacked wheel."""
    by_name: dict[str, Grader] = {
        "ngrpo": _by_ngrpo,
        "math-verify": _by_math_verify,
        "latex2sympy2_extended": _by_latex2sympy,
        "OpenCompass": _by_opencompass,
        "prime-rl": _by_prime_rl,
    }
    if verl:
        for name, module in _verl_modules(verl).items():
            by_name[f"verl {name}"] = partial(_by_verl, module)
    return by_name


def _by_ngrpo(pair: Pair) -> bool:
    if pair.options:
        return check_choice(pair.gold, pair.response, pair.options).correct
    return check_math(pair.gold, pair.response).correct


def _by_math_verify(pair: Pair) -> bool:
    from math_verify import StringExtractionConfig, parse, verify

    if pair.options:
        letters = StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))
        return parse(pair.response, [letters])[:1] == [pair.gold.lower()]
    return verify(parse(f"\\boxed{{{pair.gold}}}"), parse(pair.response))


def _by_latex2sympy(pair: Pair) -> bool:
    from latex2sympy2_extended import latex2sympy

    gold = latex2sympy(pair.gold)
    answer = latex2sympy(last_boxed(pair.response) or pair.response)
    return bool(gold == answer or (gold - answer).simplify() == 0)


def _by_opencompass(pair: Pair) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    normalization = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    extraction = LatexExtractionConfig(
        normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(pair.response, [extraction], extraction_mode="first_match")
    return verify(answer, parse(f"${pair.gold}$", extraction_mode="first_match"))


def _by_prime_rl(pair: Pair) -> bool:
    from math_verify import parse, verify

    after_thinking = pair.response.rpartition("</think>")[2]
    answer = last_boxed(after_thinking) or ""
    return verify(parse(f"\\boxed{{{pair.gold}}}"), parse(f"\\boxed{{{answer}}}"))


def _by_verl(module: Any, pair: Pair) -> bool:
    result = module.compute_score(pair.response, pair.gold)
    if isinstance(result, dict):
        return float(result["score"]) > 0
    if isinstance(result, tuple):
        return float(result[0]) > 0
    return float(result) > 0


def _verl_modules(wheel: Path) -> dict[str, Any]:
    """verl's graders, with its package and its time limit (an alarm) replaced by empty ones."""
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        package: Any = ModuleType(name)
        package.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = package
    functional: Any = ModuleType("verl.utils.py_functional")
    functional.timeout_limit = lambda seconds: lambda function: function
    sys.modules[functional.__name__] = functional
    names = ("math_verify", "math_reward", "math_dapo", "prime_math")
    modules: dict[str, Any] = {name: import_module(f"verl.utils.reward_score.{name}") for name in names}
    # Its pool of processes would import the whole of verl.
    verify = modules["math_verify"]._verify_in_subprocess
    modules["math_verify"].compute_score = lambda response, gold: verify(f"\\boxed{{{gold}}}", response)
    return modules


def measure(grader: Grader, pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The wrong responses that a grader accepts, and the right ones that it refuses; an error is a refusal."""
    accepted = []
    refused = []
    for pair in pairs:
        try:
            verdict = grader(pair)
        except Exception:
            verdict = False
        if verdict and not pair.right:
            accepted.append(pair)
        if pair.right and not verdict:
            refused.append(pair)
    return accepted, refused


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--verl", type=Path, help="folder of verl's unpacked wheel")
    parser.add_argument("--show", action="store_true", help="print every wrong verdict")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    print(f"{describe()}, {packages}\n")
    by_name = graders(options.verl)
    _print_table("math", MATH, by_name, options.show)
    _print_table("choice", CHOICE, {name: by_name[name] for name in _OF_CHOICES}, options.show)


def _print_table(title: str, pairs: list[Pair], by_name: dict[str, Grader], show: bool) -> None:
    right = sum(pair.right for pair in pairs)
    wrong = len(pairs) - right
    print(f"{title:<28}{f'accepted of {wrong}':>18}{f'refused of {right}':>18}")
    for name, grader in by_name.items():
        accepted, refused = measure(grader, pairs)
        print(f"  {name:<26}{len(accepted):>18}{len(refused):>18}")
        if show:
            for pair in (*accepted, *refused):
                verdict = "refused" if pair.right else "accepted"
                print(f"    {verdict} {pair.kind}: {pair.response!r} for {pair.gold!r}")
    print()


if __name__ == "__main__":
    main()
