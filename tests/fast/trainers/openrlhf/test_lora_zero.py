# SPDX-License-Identifier: Apache-2.0
"""Merged weights and the saved adapter on two ranks under DeepSpeed ZeRO-2 and ZeRO-3; the ranks run this file."""

import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.own_process import run_two_ranks

TOKENS = torch.arange(3, 27).view(2, 12)
RATE, LARGEST_NORM = 0.5, 1.0


@pytest.mark.more
def test_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    outputs = run_two_ranks("tests.fast.trainers.openrlhf.test_lora_zero", str(tmp_path), timeout=300)
    for rank, output in enumerate(outputs):
        done = [line for line in output.splitlines() if line.startswith(f"rank {rank}: ")]
        assert len(done) == 2, output[-3000:]


def loss_of(model: Any) -> torch.Tensor:
    return -model(TOKENS).logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None]).mean()


def compare(rank: int, stage: int, folder: Path) -> None:
    """An update of the adapters under ZeRO, and what is sent and saved after it, against one process without."""
    import deepspeed
    from peft.utils import load_peft_weights
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.machine.models import lora
    from ngrpo.trainers.openrlhf import actor_trainer, lora_sync
    from tests.stack.test_zero import configuration
    from tests.support.lora_models import adapted, base_model

    plain = adapted(base_model("untied"))
    config = {**configuration(stage), "gradient_clipping": LARGEST_NORM}
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    model = deepcopy(plain)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    # Both ranks have the same batch, so that their mean gradient is the one of a single process.
    engine.backward(loss_of(engine))
    engine.step()
    loss_of(plain).backward()
    alone = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(alone, LARGEST_NORM)
    torch.optim.SGD(alone, lr=RATE).step()

    args = SimpleNamespace(ds=SimpleNamespace(zero_stage=stage, tensor_parallel_size=1))
    trainer = SimpleNamespace(strategy=SimpleNamespace(args=args), actor=SimpleNamespace(model=engine))
    sent = actor_trainer.gathered(trainer, keep=rank == 0)
    wanted = {weight.name: weight.merged() for weight in lora.engine_weights(plain)}
    assert set(sent) == (set(wanted) if rank == 0 else set())
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)

    class Actor:
        model = engine

    models = ModuleType("openrlhf.models")  # OpenRLHF's own needs flash-attn
    models.Actor = Actor  # type: ignore[attr-defined]
    sys.modules["openrlhf.models"] = models
    distributed = ModuleType("openrlhf.utils.distributed_util")
    distributed.torch_dist_barrier_and_cuda_sync = torch.distributed.barrier  # type: ignore[attr-defined]
    sys.modules["openrlhf.utils.distributed_util"] = distributed
    tokenizer = SimpleNamespace(save_pretrained=lambda path: None)
    strategy = SimpleNamespace(stage=stage, is_rank_0=lambda: rank == 0, _unwrap_model=lambda actor: engine.module)
    lora_sync.save_model(lambda *unused: None)(strategy, Actor(), tokenizer, str(folder / str(stage)))
    saved = load_peft_weights(str(folder / str(stage)), device="cpu")
    factors = {name.replace(".default", ""): p for name, p in plain.named_parameters() if lora.is_factor(name)}
    assert set(saved) == set(factors)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, factors[name].detach(), rtol=1e-4, atol=1e-5)
    print(f"rank {rank}: ZeRO-{stage}", flush=True)
    del kept


if __name__ == "__main__":
    from tests.stack.test_zero import rank_of_two

    number, port, target = sys.argv[1:]
    with rank_of_two(int(number), port):
        for zero_stage in (2, 3):
            compare(int(number), zero_stage, Path(target))
