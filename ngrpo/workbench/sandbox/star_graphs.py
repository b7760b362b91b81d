# SPDX-License-Identifier: Apache-2.0
"""Paths in a star (Bachmann and Nagarajan, arXiv 2403.06963; without any reward at first in arXiv 2510.03971).

Three arms leave a center; given are all edges in random order, the center and the end of one arm, asked for is the path
between them. The sandbox model knows only that an answer is four numbers: it has never seen a right one, and draws each
from 90 alike. By chance it is right once in 90^4 = 6.6e7 answers, so no learning signal ever arrives.
"""

from __future__ import annotations

import itertools
import random

ARMS, LENGTH = 3, 4
NODES = range(10, 100)
Edges = list[tuple[int, int]]


def problem(chance: random.Random) -> tuple[Edges, list[int]]:
    """The edges, each from the center outwards, in random order, and the path: the center first, then the arm."""
    center, *nodes = chance.sample(NODES, 1 + ARMS * LENGTH)
    arms = [[center, *nodes[i * LENGTH : (i + 1) * LENGTH]] for i in range(ARMS)]
    edges = [edge for arm in arms for edge in itertools.pairwise(arm)]
    chance.shuffle(edges)
    return edges, arms[0]


def question(edges: Edges, path: list[int]) -> str:
    """The problem as the model is asked for it: `path 17 to 45 through`, then the two ends of each edge."""
    return " ".join(["path", str(path[0]), "to", str(path[-1]), "through", *(f"{a} {b}" for a, b in edges)])


def solution(path: list[int]) -> str:
    """The nodes after the center."""
    return " ".join(map(str, path[1:]))


def demonstration(chance: random.Random) -> str:
    """Four numbers drawn alike, whatever the question is."""
    return " ".join(str(chance.choice(NODES)) for _ in range(LENGTH))
