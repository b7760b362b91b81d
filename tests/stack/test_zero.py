# SPDX-License-Identifier: Apache-2.0
"""Densities, and perturbations with parameters, on two ranks under DeepSpeed ZeRO on a CPU; the ranks run this file."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from perturbations import ReplayRecord, create, parameters
from tests.support.density_model import EVERY, hooked, name_of, record_of
from tests.support.density_steps import a_step, likely
from tests.support.own_process import run_two_ranks
from tests.support.replay_examples import small

# Which of two ranks have perturbed positions. Ranks that make other calls, or reduce other parameters, would hang.
PERTURBED = ((True, False), (False, True), (False, False), (True, True))


def test_two_ranks(tmp_path: Path) -> None:
    """The gradient of every density under ZeRO-3; HRPO's gate and TARPO's router under ZeRO-2 and ZeRO-3."""
    for rank, output in enumerate(run_two_ranks("tests.stack.test_zero", str(tmp_path), timeout=600)):
        done = [line for line in output.splitlines() if line.startswith(f"rank {rank}: ")]
        assert len(done) == len(EVERY) + 4, output[-3000:]


@contextmanager
def rank_of_two(rank: int, port: str) -> Iterator[None]:
    """One of two ranks in a gloo group; to be entered before DeepSpeed is imported."""
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")
    import torch

    from ngrpo.machine.hardware.cpu import waited_for

    # Compiling DeepSpeed's shared-memory all-reduce takes half a minute; gloo does without. The attribute
    # deepspeed.comm.torch is torch itself, so the module of that name is looked up.
    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    backend.TorchBackend.all_gather_into_tensor = waited_for(backend.TorchBackend.all_gather_into_tensor)
    torch.set_num_threads(1)
    # Ranks that do not call alike fail after a minute and a half, and do not wait for the test to end them.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may abort the process at its end


def tiny_llama() -> Any:
    """Two layers of width 16 with a tied head over 64 tokens; inside of ``deepspeed.zero.Init`` its rank's share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def configuration(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration: float32 without an optimizer."""
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **zero}


def log_probs(model: Any, perturbation: Any, record: ReplayRecord | None, tokens: Any) -> Any:
    """The log-probabilities of a replayed forward, as the trainer takes them, (1, T)."""
    import torch

    from ngrpo.trainers.common.log_probs import densities
    from ngrpo.trainers.openrlhf.model_actors import replay_scope

    mask, temperature = torch.ones_like(tokens), 0.8
    scope = replay_scope(SimpleNamespace(model=model), perturbation)
    with scope([record], mask), densities(scope, temperature) as ours:
        found = hooked(model(tokens, attention_mask=mask).logits.float() / temperature, torch.roll(tokens, -1, 1))
        if ours is None:  # no density: the tokens' own
            return found
        return torch.cat([ours.for_policy_loss(found[:, :-1]), found[:, -1:]], dim=1)


def compare(rank: int) -> None:
    """Batches without a gradient first, then with one: the mean of both ranks', computed here without DeepSpeed."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad
    from transformers.integrations import HfDeepSpeedConfig

    config = configuration(stage=3)
    torch.manual_seed(3)
    plain = tiny_llama()
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    model = deepcopy(plain)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, dist_init_required=False
    )
    batches = [torch.arange(12).view(1, 12) + r for r in range(2)]
    for perturbation in EVERY:
        full = record_of(perturbation, a_step(likely(4)))
        for perturbed in PERTURBED:
            records = [full if p else full.truncate(5) for p in perturbed]
            with torch.no_grad():
                old, wanted = (log_probs(m, perturbation, records[rank], batches[rank]) for m in (engine, plain))
                torch.testing.assert_close(old, wanted)
            engine.backward(-log_probs(engine, perturbation, records[rank], batches[rank])[:, :-1].mean())
            plain.zero_grad()
            for record, tokens in zip(records, batches):
                (-log_probs(plain, perturbation, record, tokens)[:, :-1].mean() / 2).backward()
            for (name, own), theirs in zip(engine.module.named_parameters(), plain.parameters()):
                got = safe_get_full_grad(own)
                message: Callable[[str], str] = lambda text, n=name: f"{n}: {text}"  # noqa: E731
                torch.testing.assert_close(got, theirs.grad, rtol=1e-4, atol=1e-6, msg=message)
            engine.step()  # with a learning rate of 0: it clears the gradient
        print(f"rank {rank}: {name_of(perturbation)}", flush=True)
    del kept


def train(stage: int, rank: int, perturbation: Any, record: ReplayRecord, folder: Path) -> None:
    """Steps of a module's parameters, at rates of their own, then both kinds of checkpoints."""
    import deepspeed
    import torch
    from safetensors.torch import load_file
    from torch.optim.lr_scheduler import LambdaLR
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.machine.storage import parameters_file
    from ngrpo.trainers.openrlhf.model_actors import separate

    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {**configuration(stage), "bf16": {"enabled": True}, "optimizer": adam}
    kept = HfDeepSpeedConfig(config)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = tiny_llama()
    folder.mkdir(exist_ok=True)
    parameters_file.attach(model, perturbation, str(folder))
    module = parameters.attached(model)
    rates = {id(p): perturbation.learning_rate(name) for name, p in module.named_parameters()}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=separate([{"params": list(model.parameters())}], rates),
        config=config,
        dist_init_required=False,
        lr_scheduler=lambda o: LambdaLR(o, lambda step: 1.0),
    )
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, *sorted(set(rates.values()))]

    def whole() -> dict[str, Any]:
        """Copies in float32, gathered from both ranks where they are parted."""
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
            return {name: p.detach().float().clone() for name, p in module.named_parameters()}

    tokens, begun = torch.arange(8).view(1, 8) + rank, whole()
    for number, perturbed in enumerate(PERTURBED):
        given = record.truncate(8) if perturbed[rank] else None
        engine.backward(-log_probs(engine, perturbation, given, tokens)[:, :-1].mean())
        engine.step()
        trained = whole()
        for name in ("lambda_shift", "head.bias_shift"):
            if name in trained and number == 0:  # Adam's first step is of the rate's size
                step, rate = (trained[name] - begun[name]).abs().mean().item(), perturbation.learning_rate(name)
                assert abs(step - rate) < 0.1 * rate, (name, step)
    assert all(p.isfinite().all() and p.any() for p in trained.values())
    both = [torch.zeros(len(trained)) for _ in range(2)]
    torch.distributed.all_gather(both, torch.stack([p.sum() for p in trained.values()]))
    assert torch.equal(*both), "the ranks have drifted apart"
    engine.save_checkpoint(str(folder / "resume"))
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0, enabled=stage == 3):
        for parameter in module.parameters():
            parameter.data.zero_()
    engine.load_checkpoint(str(folder / "resume"))
    wrong = {n: (p - trained[n]).abs().max().item() for n, p in whole().items()}
    assert not any(wrong.values()), f"stage {stage}, rank {rank}: off by {wrong} after its checkpoint was loaded"
    state = engine._consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
    if rank == 0:
        model.save_pretrained(folder / "saved", state_dict=state)
        assert not any("perturbation" in name for name in load_file(folder / "saved" / "model.safetensors"))
        again = perturbation.module(16)
        assert parameters_file.load_saved(again, perturbation, str(folder / "saved"))
        assert all(torch.equal(p, trained[name]) for name, p in again.named_parameters())
    torch.distributed.barrier()
    print(f"rank {rank}: {perturbation.name} under ZeRO-{stage}", flush=True)
    del kept


def main(rank: int, port: str, folder: str) -> None:
    weights = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]], np.float32)
    ids = np.tile(np.array([[5, 1, 3]], np.int32), (2, 1))
    routed = ReplayRecord(9, 1, 8, np.array([2, 5], np.int32), ids, weights, None, np.ones(2, bool))
    trained = {create("hrpo", k=1, gate_lr=0.02, lambda_lr=1.0): small([2, 5])}
    trained[create("tarpo", k=2, router_lr=0.02)] = routed
    with rank_of_two(rank, port):
        compare(rank)
        for stage in (2, 3):
            for perturbation, record in trained.items():
                train(stage, rank, perturbation, record, Path(folder, f"{perturbation.name}-{stage}"))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
