# SPDX-License-Identifier: Apache-2.0
"""Which model OpenRLHF 0.11.2 places on which GPU (``cli/train_ppo_ray.py``, ``trainer/ray/vllm_engine.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Args = Mapping[str, Any]
"""OpenRLHF's arguments after its own conditions, by their names without dashes."""
ACTOR, REFERENCE, CRITIC, REWARD, ENGINES = "actor", "reference", "critic", "reward model", "vLLM engines"


@dataclass(frozen=True)
class Group:
    """GPUs that hold the same models.

    Attributes:
        first: number of the first one, in the order in which OpenRLHF asks Ray for them.
        gpus: how many.
        models: what each of them holds a part of.
    """

    first: int
    gpus: int
    models: tuple[str, ...]

    @property
    def name(self) -> str:
        """``GPU 0`` or ``GPU 0-7``."""
        last = self.first + self.gpus - 1
        return f"GPU {self.first}" if self.gpus == 1 else f"GPU {self.first}-{last}"


def world_size(args: Args, role: str) -> int:
    """Processes, and GPUs, of a role: ``actor``, ``ref``, ``critic`` or ``reward``."""
    return args[f"{role}.num_nodes"] * args[f"{role}.num_gpus_per_node"]


def is_hybrid(args: Args) -> bool:
    """Whether the engines share the GPUs of the trainer: OpenRLHF's hybrid engine."""
    return bool(args["train.colocate_all"] and not args["train.async_enable"])


def groups(args: Args) -> list[Group]:
    """All GPUs of a run.

    Args:
        args: OpenRLHF's arguments after its own conditions, by their names without dashes.
    """
    engines = (args["vllm.num_engines"] or 0) * args["vllm.tensor_parallel_size"]
    has_reference, has_critic = args["algo.kl.init_coef"] > 0, bool(args["critic.model_name_or_path"])
    has_reward_model = not args["reward.remote_url"]
    everything = args["train.colocate_all"]
    # The two then leave the others, also where all models were to be together.
    pair = has_critic and args["train.colocate_critic_reward"]
    together = [ACTOR] if everything or args["train.colocate_actor_ref"] else []
    if together and has_reference:
        together.append(REFERENCE)
    if everything and not pair:
        together += [CRITIC] * has_critic + [REWARD] * has_reward_model
    if is_hybrid(args) and engines:
        together.append(ENGINES)
    placements: list[tuple[int, tuple[str, ...]]] = []
    if together:
        placements.append((world_size(args, "actor"), tuple(together)))
    if engines and ENGINES not in together:
        placements.append((engines, (ENGINES,)))
    if not together:
        placements.append((world_size(args, "actor"), (ACTOR,)))
    if has_reference and REFERENCE not in together:
        placements.append((world_size(args, "ref"), (REFERENCE,)))
    apart = [(CRITIC, "critic", has_critic), (REWARD, "reward", has_reward_model)]
    left = [(name, role) for name, role, there in apart if there and name not in together]
    if pair:
        placements.append((world_size(args, "critic"), tuple(name for name, _ in left)))
    else:
        placements += [(world_size(args, role), (name,)) for name, role in left]
    gpu_groups, first = [], 0
    for gpus, models in placements:
        gpu_groups.append(Group(first, gpus, models))
        first += gpus
    return gpu_groups
