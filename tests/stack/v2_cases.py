# SPDX-License-Identifier: Apache-2.0
"""What test_v2.py asks of both model runners."""

from __future__ import annotations

from typing import Any

QUESTIONS = ["What is 7 plus 5?", "Explain why the sky is blue.", "List three prime numbers and their sum."]
PERTURBATIONS: dict[str, dict[str, Any]] = {
    "neighbor": {"rate": 0.5, "mix_temperature": 3.0},
    "gaussian": {"rate": 1.0},
    "gumbel": {"rate": 0.5},
    "soft": {"rate": 1.0},
    "dirichlet": {"rate": 0.5},
    "normal": {"rate": 1.0},
    "orthogonal": {"rate": 1.0},
    "multiplex": {"rate": 1.0},
    "moi": {"rate": 1.0},
    "selar": {"rate": 1.0},
    "cuts": {"rate": 1.0, "burn_in": 1},
    "lepo": {"rate": 0.5},
    "latent": {"rate": 1.0},
    "hrpo": {},
    "tests.stack.own_perturbations:DenseShake": {"rate": 0.5},
}
# Sampling parameters that change which tokens are drawn, by the name of the case.
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p": {"temperature": 0.7, "min_p": 0.2},
    "greedy": {"temperature": 0.0},
}
# Sampling schedules that reach their lowest temperature within so few tokens.
SCHEDULES: dict[str, dict[str, Any]] = {"ead": {"d_0": 6, "c": 2}, "edt": {"theta": 1.0}}
SCHEDULES["ladder"] = {"least": 0.5, "most": 1.5}
TOKENS = 6

# What `make test` asks; `make test-more` asks the rest, in engines of its own.
IN_MAKE_TEST = ("neighbor", "gaussian", "gumbel", "multiplex")
# At temperature 1 the random model is nearly sure of its next token, and all samples of a prompt feed the same.
STOPS: dict[str, dict[str, Any]] = {
    "token": {"stop_token_ids": list(range(0, 49152, 4))},
    "string": {"stop": ["e", "o"]},
    "samples": {"n": 3, "stop_token_ids": list(range(0, 49152, 6)), "temperature": 2.0},
}


def share_of(name: str) -> str:
    """Which of the two rollouts has the case: that of `make test`, or that of `make test-more`."""
    return "test" if name in (*IN_MAKE_TEST, "token") else "more"
