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
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.command_line import parser_of
from benchmarks.machine import ROOT
from benchmarks.markdown import between, table_lines, write_between
from benchmarks.models import engine_process

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
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- table: python -m benchmarks.routing writes this -->"
END = "<!-- /table -->"
_PROMPTS = 12
_PROMPT_TOKENS = 20
_TOKENS = 64  # of a response
_HEADINGS = [
    *("type", "dtype", "perturbation", "routed otherwise", "mean mismatch", "largest mismatch"),
    *("replayed: otherwise", "mean mismatch", "largest mismatch"),
]


class Response(NamedTuple):
    """A rollout.

    Attributes:
        sequence: tokens of prompt and response.
        packed: its trajectory, as the engine hands it over.
    """

    sequence: list[int]
    packed: Any


def rolled_out(folder: str, dtype: str) -> dict[str, list[Response]]:
    """A response to each prompt without a perturbation and with one, by the perturbation's name."""
    from tests.stack.harness import build_engine

    spec = {"perturbation": PERTURBATION, "routed_experts": True}
    llm = build_engine(folder, None, dtype=dtype, max_model_len=128, max_num_seqs=1, additional_config=spec)
    from vllm import SamplingParams

    prompts = np.random.default_rng(0).integers(10, 49000, (_PROMPTS, _PROMPT_TOKENS)).tolist()
    responses: dict[str, list[Response]] = {"none": [], PERTURBATION["name"]: []}
    for seed, prompt in enumerate(prompts):
        for name, rows in responses.items():
            extra = {"perturbation": {"seed": seed, "enabled": name != "none"}}
            params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, extra_args=extra)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            (packed,) = llm.llm_engine.collective_rpc("perturbation_take", args=(None, []))[0].values()
            rows.append(Response([*prompt, *output.outputs[0].token_ids], packed))
    return responses


class Comparison(NamedTuple):
    """A forward of transformers held against the engine's response, for each of its tokens.

    Attributes:
        gap: |Δ log p|.
        otherwise: whether the row that the token comes from was routed to other experts in some layer.
    """

    gap: np.ndarray
    otherwise: np.ndarray


@torch.no_grad()
def replayed(model: Any, response: Response, replay_routing: bool) -> Comparison:
    """Replays a response with the recorded experts, or with the forward's own routing."""
    from perturbations import FinishedTrajectory, replaying
    from perturbations.replay.routing import RoutingScope, routers

    length = len(response.sequence)
    trajectory = FinishedTrajectory.unpack(response.packed).truncate(length)
    engine_experts = trajectory.experts[: length - 1].astype(np.int64)
    tokens = torch.tensor([response.sequence])
    mask = torch.ones_like(tokens)
    expert_ids_by_layer = []

    def note(router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        integer_outputs = [tensor for tensor in output if not tensor.is_floating_point()]
        if integer_outputs:
            expert_ids_by_layer.append(integer_outputs[0])
        else:  # Llama 4's router returns scores, with 0 for the experts that are not chosen
            expert_ids_by_layer.append(output[0].topk(router.top_k).indices)

    hooks = [router.register_forward_hook(note) for router in routers(model)]
    replayed_experts = engine_experts if replay_routing else None
    with replaying(model, [trajectory.record], mask), RoutingScope(model)([replayed_experts], mask):
        logits = model(tokens, attention_mask=mask).logits[0, :-1].float()
    for hook in hooks:
        hook.remove()
    log_probs = logits.log_softmax(dim=-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    trainer_experts = torch.stack(expert_ids_by_layer, dim=1)[:-1].numpy()
    differs = np.sort(trainer_experts, axis=-1) != np.sort(engine_experts, axis=-1)
    first = _PROMPT_TOKENS - 1  # the log-probability of the token at position t comes from row t - 1
    gap = np.abs(log_probs[first:] - trajectory.log_probs)
    return Comparison(gap, differs.any(axis=(1, 2))[first:])


def measured(model_type: str, dtype: str) -> list[str]:
    """The table's rows of a type: without a perturbation and with one."""
    from transformers import AutoModelForCausalLM

    from benchmarks.models import tiny
    from ngrpo.machine.models.packaged import resolve

    torch_dtype = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / model_type
        folder.mkdir()
        tiny.build(model_type, folder, Path(resolve("smollm2-135m")), torch_dtype)
        try:
            responses = engine_process.run("benchmarks.routing", folder, dtype)
        except engine_process.EngineFailed as error:
            raise SystemExit(f"{model_type}: no rollouts.\n{error.stderr[-4000:]}") from None
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype).eval()
        return [f"| {model_type} | {dtype} | {name} | {_cells(model, rows)} |" for name, rows in responses.items()]


def _cells(model: Any, responses: list[Response]) -> str:
    cells = []
    for replay_routing in (False, True):
        comparisons = [replayed(model, response, replay_routing) for response in responses]
        gap = np.concatenate([comparison.gap for comparison in comparisons])
        otherwise = np.concatenate([comparison.otherwise for comparison in comparisons])
        cells += [f"{int(otherwise.sum())} of {len(otherwise)}", f"{gap.mean():.1e}", f"{gap.max():.1e}"]
    return " | ".join(cells)


def write(rows: list[str]) -> None:
    """Puts rows into the page's table, each in the place of an older one of its type, dtype and perturbation."""
    old_rows = between(PAGE, BEGIN, END).strip().splitlines()[2:]
    row_by_case = {tuple(row.split("| ")[1:4]): row for row in [*old_rows, *rows]}
    lines = [*table_lines(_HEADINGS, []), *row_by_case.values()]
    write_between(PAGE, BEGIN, END, "\n".join(lines))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--print", action="store_true", help="print the rows, and leave the page as it is")
    return parser.parse_args()


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    for model_type in options.types or TYPES:
        rows = measured(model_type, options.dtype)
        print("\n".join(rows), flush=True)
        if not options.print:
            write(rows)


if __name__ == "__main__":
    main()
