# SPDX-License-Identifier: Apache-2.0
"""Which trajectory a request is: its own seed, or a count of its prompt on its rank."""

from types import SimpleNamespace

from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import create
from perturbations import seeds as all_seeds
from perturbations.registry import buffers


def seeds(rank: int, count: int = 4, seed: int | None = None) -> list[int]:
    """Of the samples of one prompt that a data-parallel rank is asked for."""
    store = TrajectoryStore(count, 64)
    notes = SimpleNamespace(drain=lambda **kwargs: None, taken=0, written=0)
    perturber = SimpleNamespace(opened=lambda name, prompt: None, notes=notes, routed=None)
    requests = RunningRequests(create("gumbel", seed=3), store, perturber, buffers.create("memory"), rank)
    params = SimpleNamespace(seed=seed, extra_args=None)
    new = [SimpleNamespace(req_id=str(i), sampling_params=params, prompt_token_ids=[5, 6, 7]) for i in range(count)]
    requests.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))
    return store.seeds[[store.live[str(i)] for i in range(count)]].tolist()


def test_the_samples_of_a_prompt_differ_on_a_rank_and_between_ranks() -> None:
    assert len({seed for rank in range(3) for seed in seeds(rank)}) == 12


def test_a_rank_draws_as_before() -> None:
    assert seeds(1) == seeds(1)


def test_a_seed_is_the_same_trajectory_on_every_rank() -> None:
    assert len({seed for rank in range(3) for seed in seeds(rank, seed=11)}) == 1


def test_engines_have_seeds_of_their_own() -> None:
    assert len({all_seeds.of_engine(3, engine) for engine in range(4)}) == 4
