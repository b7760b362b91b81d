"""Nearest tokens by their embeddings."""

from perturbations.neighbors.base import NeighborIndex
from perturbations.neighbors.exact import ExactIndex

__all__ = ["ExactIndex", "NeighborIndex"]
