# SPDX-License-Identifier: Apache-2.0
"""How often do engine and trainer send a token to other experts, what does that change, and what does the replay mend?

    python -m benchmarks.routing [TYPE …] [--dtype float32]

A tiny random mixture of experts is built for each type. An engine of vLLM that records experts (`--replay.routing`)
rolls out one request at a time. A forward of transformers replays with its own routing and with the recorded one,
without a perturbation and with `neighbor` (variant `released`, rate 0.5). Each row of the table in docs/models.md has
the fraction of tokens that were routed otherwise in some layer, and mean and largest |Δ log p|. A run writes the rows
of its types.
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

import numpy as np
import torch

TYPES = (  # on a CPU the start-up check refuses latent attention
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "mixtral",
    "olmoe",
    "flex_olmo",
    "granitemoe",
    "glm4_moe",
    "gpt_oss",
    "ernie4_5_moe",
    "dots1",
    "llama4_text",
)
PERTURBATION = {"name": "neighbor", "variant": "released", "rate": 0.5}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: python -m benchmarks.routing writes this -->", "<!-- /table -->"
_PROMPTS, _PROMPT_TOKENS, _TOKENS = 12, 20, 64


def rolled_out(folder: str, dtype: str) -> dict[str, list[tuple[list[int], Any]]]:
    """Prompt and response of each request with the parts of its trajectory, without a perturbation and with one."""
    from tests.stack.harness import build_engine

    spec = {"perturbation": PERTURBATION, "routed_experts": True}
    llm = build_engine(folder, None, dtype=dtype, max_model_len=128, max_num_seqs=1, additional_config=spec)
    from vllm import SamplingParams

    prompts = np.random.default_rng(0).integers(10, 49000, (_PROMPTS, _PROMPT_TOKENS)).tolist()
    result: dict[str, list[tuple[list[int], Any]]] = {"none": [], PERTURBATION["name"]: []}
    for seed, prompt in enumerate(prompts):
        for name in result:
            extra = {"perturbation": {"seed": seed, "enabled": name != "none"}}
            params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, extra_args=extra)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            (parts,) = llm.llm_engine.collective_rpc("perturbation_take", args=(None, []))[0].values()
            result[name].append(([*prompt, *output.outputs[0].token_ids], parts))
    return result


@torch.no_grad()
def replayed(model: Any, sequence: list[int], parts: Any, replay: bool) -> tuple[np.ndarray, np.ndarray]:
    """|Δ log p| of each token of a response, (A,), and whether the row that it comes from was routed otherwise."""
    from perturbations import FinishedTrajectory, replaying
    from perturbations.replay.routing import RoutingScope, routers

    taken, chosen = FinishedTrajectory.unpack(parts).truncate(len(sequence)), []
    tokens, experts = torch.tensor([sequence]), taken.experts[: len(sequence) - 1].astype(np.int64)
    mask = torch.ones_like(tokens)

    def note(router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        ids = [part for part in output if not part.is_floating_point()]
        chosen.append(ids[0] if ids else output[0].topk(router.top_k).indices)  # Llama 4's has scores, 0 for others

    hooks = [router.register_forward_hook(note) for router in routers(model)]
    with replaying(model, [taken.record], mask), RoutingScope(model)([experts if replay else None], mask):
        logits = model(tokens, attention_mask=mask).logits[0, :-1].float()
    for hook in hooks:
        hook.remove()
    log_probs = logits.log_softmax(dim=-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    now = torch.stack(chosen, dim=1)[:-1].numpy()
    otherwise = (np.sort(now, axis=-1) != np.sort(experts, axis=-1)).any(axis=(1, 2))
    first = _PROMPT_TOKENS - 1  # the log-probability of the token at position t comes from row t - 1
    return np.abs(log_probs[first:] - taken.log_probs), otherwise[first:]


def measured(model_type: str, dtype: str) -> list[str]:
    """The table's rows of a type: without a perturbation and with one."""
    from transformers import AutoModelForCausalLM

    from benchmarks.models import tiny
    from ngrpo.machine.models.packaged import resolve

    with tempfile.TemporaryDirectory() as scratch:
        folder, target = Path(scratch) / model_type, Path(scratch) / "rollouts"
        folder.mkdir()
        tiny.build(model_type, folder, Path(resolve("smollm2-135m")), getattr(torch, dtype))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        command = [sys.executable, "-m", "benchmarks.routing", "--engine", str(folder), str(target), "--dtype", dtype]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{model_type}: no rollouts.\n{ended.stderr[-4000:]}")
        rollouts = pickle.loads(target.read_bytes())
        return [f"| {model_type} | {dtype} | {name} | {_cells(model, of)} |" for name, of in rollouts.items()]


def _cells(model: Any, rollouts: list[tuple[list[int], Any]]) -> str:
    cells = []
    for replay in (False, True):
        gaps, others = zip(*(replayed(model, *rollout, replay) for rollout in rollouts))
        gap, other = np.concatenate(gaps), np.concatenate(others)
        cells += [f"{int(other.sum())} of {len(other)}", f"{gap.mean():.1e}", f"{gap.max():.1e}"]
    return " | ".join(cells)


def write(rows: list[str]) -> None:
    """Puts rows into the page's table, each in the place of an older one of its type, dtype and perturbation."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, tail = rest.split(END)
    found = {tuple(line.split("| ")[1:4]): line for line in [*table.strip().splitlines()[2:], *rows]}
    titles = ["type", "dtype", "perturbation", "routed otherwise", "mean gap", "largest gap"]
    titles += ["replayed: otherwise", "mean gap", "largest gap"]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *found.values()]
    PAGE.write_text("\n".join([head + BEGIN, *lines, END + tail]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--print", action="store_true", help="print the rows, and leave the page as it is")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.engine:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        folder, target = options.engine
        Path(target).write_bytes(pickle.dumps(rolled_out(folder, options.dtype)))
        sys.stdout.flush()
        os._exit(0)  # vLLM's engine and the interpreter of Python do not end well together
    for model_type in options.types or TYPES:
        rows = measured(model_type, options.dtype)
        print("\n".join(rows), flush=True)
        if not options.print:
            write(rows)


if __name__ == "__main__":
    main()
