# SPDX-License-Identifier: Apache-2.0
"""Densities and perturbations with parameters on two ranks, under DeepSpeed ZeRO on a CPU; the ranks run this file."""

import sys
from collections.abc import Iterator
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
from tests.support.own_process import become_rank, run_two_ranks
from tests.support.replay_examples import small

# For each step, which of the two ranks have perturbed positions. Ranks would hang if they made different collective
# calls, or reduced different parameters, where only one of them has.
PERTURBED = ((True, False), (False, True), (False, False), (True, True))
HIDDEN = 16


def test_two_ranks(tmp_path: Path) -> None:
    """The gradient of every density under ZeRO-3; HRPO's gate and TARPO's router under ZeRO-2 and ZeRO-3."""
    outputs = run_two_ranks("tests.stack.test_zero", str(tmp_path), timeout=600)
    for rank, output in enumerate(outputs):
        completed = [line for line in output.splitlines() if line.startswith(f"rank {rank}: ")]
        assert len(completed) == len(EVERY) + 4, output[-3000:]


@contextmanager
def rank_of_two(rank: int, port: str) -> Iterator[None]:
    """One of two ranks in a gloo group; to be entered before DeepSpeed is imported."""
    become_rank(rank, port, ranks=2)
    import torch

    from ngrpo.machine.hardware.cpu import waited_for

    # Compiling DeepSpeed's shared-memory all-reduce takes half a minute; gloo does without. The attribute
    # deepspeed.comm.torch is torch itself, so the module of that name is looked up.
    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    backend.TorchBackend.all_gather_into_tensor = waited_for(backend.TorchBackend.all_gather_into_tensor)
    torch.set_num_threads(1)
    # Ranks that make different calls fail after a minute and a half, before the test would end them.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may abort the process at its end


def tiny_llama() -> Any:
    """A model with a tied head; inside of ``deepspeed.zero.Init`` it has the rank's share of the parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def configuration(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration: float32 without an optimizer."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def log_probs(model: Any, perturbation: Any, record: ReplayRecord | None, tokens: Any) -> Any:
    """The log-probabilities of a replayed forward that the trainer's loss reads, (1, T)."""
    import torch

    from ngrpo.trainers.common.log_probs import densities
    from ngrpo.trainers.openrlhf.model_actors import replay_scope

    temperature = 0.8
    mask = torch.ones_like(tokens)
    labels = torch.roll(tokens, -1, 1)
    scope = replay_scope(SimpleNamespace(model=model), perturbation)
    with scope([record], mask), densities(scope, temperature) as density:
        logits = model(tokens, attention_mask=mask).logits.float() / temperature
        token_log_probs = hooked(logits, labels)
        if density is None:
            return token_log_probs
        for_loss = density.for_policy_loss(token_log_probs[:, :-1])
        return torch.cat([for_loss, token_log_probs[:, -1:]], dim=1)


def loss_of(model: Any, perturbation: Any, record: ReplayRecord | None, tokens: Any) -> Any:
    return -log_probs(model, perturbation, record, tokens)[:, :-1].mean()


def compare(rank: int) -> None:
    """Log-probabilities and gradients of each density under ZeRO-3 are those of the same model without DeepSpeed.

    The gradient is the mean of both ranks'.
    """
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad
    from transformers.integrations import HfDeepSpeedConfig

    config = configuration(stage=3)
    torch.manual_seed(3)
    reference = tiny_llama()
    held_config = HfDeepSpeedConfig(config)  # transformers uses it for as long as it is referenced
    model = deepcopy(reference)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config=config,
        dist_init_required=False,
    )
    first_batch = torch.arange(12).view(1, 12)
    batches = [first_batch, first_batch + 1]
    own_tokens = batches[rank]
    for perturbation in EVERY:
        complete = record_of(perturbation, a_step(likely(4)))
        without_edits = complete.truncate(5)
        for perturbed in PERTURBED:
            records = [complete if is_perturbed else without_edits for is_perturbed in perturbed]
            own_record = records[rank]
            with torch.no_grad():
                expected_log_probs = log_probs(reference, perturbation, own_record, own_tokens)
                own_log_probs = log_probs(engine, perturbation, own_record, own_tokens)
                torch.testing.assert_close(own_log_probs, expected_log_probs)

            engine.backward(loss_of(engine, perturbation, own_record, own_tokens))
            reference.zero_grad()
            for record, tokens in zip(records, batches):
                half_loss = loss_of(reference, perturbation, record, tokens) / 2
                half_loss.backward()
            for (name, parameter), expected in zip(engine.module.named_parameters(), reference.parameters()):
                assert_gradient(safe_get_full_grad(parameter), expected.grad, name)
            engine.step()  # at a learning rate of 0: it clears the gradient
        print(f"rank {rank}: {name_of(perturbation)}", flush=True)
    del held_config


def assert_gradient(actual: Any, expected: Any, name: str) -> None:
    import torch

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")


class Training:
    """A model and a perturbation's module on two ranks, in bfloat16 and with AdamW, under one stage of ZeRO."""

    def __init__(self, stage: int, perturbation: Any, folder: Path) -> None:
        import deepspeed
        from torch.optim.lr_scheduler import LambdaLR
        from transformers.integrations import HfDeepSpeedConfig

        from ngrpo.machine.storage import parameters_file
        from ngrpo.trainers.openrlhf.model_actors import separate

        self.stage = stage
        config = {
            **configuration(stage),
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        self.held_config = HfDeepSpeedConfig(config)  # transformers uses it for as long as it is referenced
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            self.model = tiny_llama()
        folder.mkdir(exist_ok=True)
        parameters_file.attach(self.model, perturbation, str(folder))
        self.module = parameters.attached(self.model)
        rates = {id(p): perturbation.learning_rate(name) for name, p in self.module.named_parameters()}
        self.engine, optimizer, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=separate([{"params": list(self.model.parameters())}], rates),
            config=config,
            dist_init_required=False,
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        )
        rates_of_groups = [group["lr"] for group in optimizer.param_groups]
        assert rates_of_groups == [1e-3, *sorted(set(rates.values()))]

    def gathered(self, **options: Any) -> Any:
        """A context in which each rank has all of the module's parameters, which ZeRO-3 divides between them."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.module.parameters()), enabled=self.stage == 3, **options)

    def module_parameters(self) -> dict[str, Any]:
        """Copies of the module's parameters in float32."""
        with self.gathered():
            return {name: p.detach().float().clone() for name, p in self.module.named_parameters()}

    def clear(self) -> None:
        """Overwrites the module's parameters with zeros."""
        with self.gathered(modifier_rank=0):
            for parameter in self.module.parameters():
                parameter.data.zero_()

    def state_dict(self) -> dict[str, Any]:
        if self.stage == 3:
            return self.engine._consolidated_16bit_state_dict()
        return self.model.state_dict()


def train(stage: int, rank: int, perturbation: Any, record: ReplayRecord, folder: Path) -> None:
    """Steps of a module's parameters, at learning rates of their own, then both kinds of checkpoints."""
    import torch

    training = Training(stage, perturbation, folder)
    engine = training.engine
    tokens = torch.arange(8).view(1, 8) + rank
    start = training.module_parameters()
    for number, perturbed in enumerate(PERTURBED):
        own_record = record.truncate(8) if perturbed[rank] else None
        engine.backward(loss_of(engine, perturbation, own_record, tokens))
        engine.step()
        trained = training.module_parameters()
        if number == 0:
            assert_first_step_is_of_rate(perturbation, start, trained)
    for name, parameter in trained.items():
        assert parameter.isfinite().all(), name
        assert parameter.any(), name
    own_sums = torch.stack([parameter.sum() for parameter in trained.values()])
    sums = [torch.zeros(len(trained)) for _ in range(2)]
    torch.distributed.all_gather(sums, own_sums)
    assert torch.equal(*sums), "the ranks have drifted apart"

    engine.save_checkpoint(str(folder / "resume"))
    training.clear()
    engine.load_checkpoint(str(folder / "resume"))
    errors = {name: (p - trained[name]).abs().max().item() for name, p in training.module_parameters().items()}
    assert not any(errors.values()), f"stage {stage}, rank {rank}: off by {errors} after its checkpoint was loaded"

    state = training.state_dict()  # a collective call
    if rank == 0:
        training.model.save_pretrained(folder / "saved", state_dict=state)
        assert_saved(perturbation, folder / "saved", trained)
    torch.distributed.barrier()
    print(f"rank {rank}: {perturbation.name} under ZeRO-{stage}", flush=True)


def assert_first_step_is_of_rate(perturbation: Any, start: dict[str, Any], stepped: dict[str, Any]) -> None:
    """Adam's first step is as large as the learning rate."""
    for name in ("lambda_shift", "head.bias_shift"):
        if name in stepped:
            rate = perturbation.learning_rate(name)
            step = (stepped[name] - start[name]).abs().mean().item()
            assert abs(step - rate) < 0.1 * rate, (name, step)


def assert_saved(perturbation: Any, folder: Path, trained: dict[str, Any]) -> None:
    """The module's parameters are in a file of their own, and not in the model's."""
    import torch
    from safetensors.torch import load_file

    from ngrpo.machine.storage import parameters_file

    for name in load_file(folder / "model.safetensors"):
        assert "perturbation" not in name
    module = perturbation.module(HIDDEN)
    assert parameters_file.load_saved(module, perturbation, str(folder))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, trained[name]), name


def routed_record() -> ReplayRecord:
    """TARPO's: the router decided for the token at position 2, and for a mixture of tokens 1 and 3 at position 5."""
    return ReplayRecord(
        seed=9,
        prompt_tokens=1,
        num_tokens=8,
        positions=np.array([2, 5], np.int32),
        ids=np.array([[5, 1, 3], [5, 1, 3]], np.int32),
        weights=np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]], np.float32),
        sigma=None,
        agreed=np.ones(2, bool),
    )


def main(rank: int, port: str, folder: str) -> None:
    records = {
        create("hrpo", k=1, gate_lr=0.02, lambda_lr=1.0): small([2, 5]),
        create("tarpo", k=2, router_lr=0.02): routed_record(),
    }
    with rank_of_two(rank, port):
        compare(rank)
        for stage in (2, 3):
            for perturbation, record in records.items():
                own_folder = Path(folder, f"{perturbation.name}-{stage}")
                train(stage, rank, perturbation, record, own_folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
