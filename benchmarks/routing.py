# SPDX-License-Identifier: Apache-2.0
"""How often do engine and trainer send a token to other experts, and what does that do to its log-probability?

    python -m benchmarks.routing [TYPE …] [--dtype float32]

A tiny random mixture of experts is built for each type, stock vLLM rolls out with it one request at a time,
with every router watched, and a forward of transformers replays with its routers watched as well. Printed are, without
a perturbation and with `neighbor` (variant `released`, rate 0.5): the fraction of tokens that were routed otherwise in
some layer, and mean and largest |Δ log p| of these tokens and of the others.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TYPES = ("qwen3_moe", "mixtral", "olmoe")
PERTURBATION = {"name": "neighbor", "variant": "released", "rate": 0.5}
_ROUTERS = (".gate", ".router", ".router.layer")
_PROMPTS, _PROMPT_TOKENS, _TOKENS = 12, 20, 64


def watch(model: nn.Module, experts: int, chosen: int) -> dict[str, list[Tensor]]:
    """Notes which experts every router of a model chooses.

    Args:
        model: vLLM's or transformers'.
        experts: how many a layer has.
        chosen: how many a token is sent to.

    Returns:
        By router, a sorted (rows, chosen) tensor for each of its forwards; grows as the model runs.
    """
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, output: Any) -> None:
        scores = output[0] if isinstance(output, tuple) else output
        rows = scores.detach().float().reshape(-1, experts)
        seen.setdefault(name, []).append(rows.topk(chosen).indices.sort().values.cpu())

    for name, module in model.named_modules():
        if name.endswith(_ROUTERS):
            module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
    return seen


def rolled_out(folder: str, dtype: str, experts: int, chosen: int) -> dict[str, list[tuple[Any, Tensor]]]:
    """Each rollout with its routes, (layers, rows, chosen), without a perturbation ("none") and with one."""
    import numpy as np

    from tests.stack.harness import build_engine, sample

    llm = build_engine(folder, PERTURBATION, dtype=dtype, max_model_len=128, max_num_seqs=1)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    seen = watch(runner.get_model(), experts, chosen)
    prompts = np.random.default_rng(0).integers(10, 49000, (_PROMPTS, _PROMPT_TOKENS)).tolist()
    result: dict[str, list[tuple[Any, Tensor]]] = {"none": [], PERTURBATION["name"]: []}
    for seed, prompt in enumerate(prompts):
        for name, request in (("none", {"seed": seed, "enabled": False}), (PERTURBATION["name"], {"seed": seed})):
            for forwards in seen.values():
                forwards.clear()
            (rollout,) = sample(llm, [prompt], [request], max_tokens=_TOKENS)
            rows = len(rollout.sequence) - 1  # the last token is not fed; asynchronous scheduling may feed it
            result[name].append((rollout, torch.stack([torch.cat(each)[:rows] for each in seen.values()])))
    return result


@torch.no_grad()
def replayed(model: nn.Module, seen: dict[str, list[Tensor]], rollout: Any) -> tuple[Tensor, Tensor]:
    """|Δ log p| of a rollout's tokens, (A,), and the routes of the trainer's forward, (layers, rows, chosen)."""
    from tests.stack.harness import gaps

    for forwards in seen.values():
        forwards.clear()
    gap = gaps(model, [rollout])
    return gap, torch.stack([torch.cat(each)[: len(rollout.sequence) - 1] for each in seen.values()])


def measured(model_type: str, dtype: str) -> list[str]:
    """Two lines: without a perturbation and with one."""
    from transformers import AutoModelForCausalLM

    from benchmarks.models import tiny
    from ngrpo.machine.models.packaged import resolve

    with tempfile.TemporaryDirectory() as scratch:
        folder, target = Path(scratch) / model_type, Path(scratch) / "rollouts"
        folder.mkdir()
        tiny.build(model_type, folder, Path(resolve("smollm2-135m")), getattr(torch, dtype))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        experts = getattr(model.config, "num_experts", None) or model.config.num_local_experts
        counts = (experts, model.config.num_experts_per_tok)
        command = [sys.executable, "-m", "benchmarks.routing", "--engine", str(folder), str(target), *map(str, counts)]
        subprocess.run([*command, "--dtype", dtype], check=True, capture_output=True)
        rollouts = pickle.loads(target.read_bytes())
        seen = watch(model, *counts)
        return [f"{model_type:12s} {dtype:9s} {name:9s} {_line(model, seen, rollouts[name])}" for name in rollouts]


def _line(model: nn.Module, seen: dict[str, list[Tensor]], rollouts: list[tuple[Any, Tensor]]) -> str:
    gaps, otherwise = [], []
    for rollout, routes in rollouts:
        gap, now = replayed(model, seen, rollout)
        gaps.append(gap)
        # The log-probability of the token at position t comes from row t - 1.
        otherwise.append((routes != now).any(dim=-1).any(dim=0)[len(rollout.prompt) - 1 :])
    gap, other = torch.cat(gaps), torch.cat(otherwise)
    parts = [f"{int(other.sum())} of {len(gap)} tokens routed otherwise ({float(other.float().mean()):.1%});"]
    for name, of in (("these", gap[other]), ("the others", gap[~other])):
        parts.append(f"{name}: mean {float(of.mean()):.1e}, largest {float(of.max()):.1e}" if len(of) else f"{name}: –")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.engine:
        # Eager, so that hooks are called.
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        folder, target, experts, chosen = options.engine
        Path(target).write_bytes(pickle.dumps(rolled_out(folder, options.dtype, int(experts), int(chosen))))
        sys.stdout.flush()
        os._exit(0)  # vLLM's engine and the interpreter of Python do not end well together
    from benchmarks.machine import describe

    print(describe())
    for model_type in options.types or TYPES:
        for line in measured(model_type, options.dtype):
            print(line, flush=True)


if __name__ == "__main__":
    main()
