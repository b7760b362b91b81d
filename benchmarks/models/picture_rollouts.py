# SPDX-License-Identifier: Apache-2.0
"""Is the replay exact behind pictures?

    python -m benchmarks.models.picture_rollouts [TYPE …]

A tiny model of each type (`benchmarks.models.pictures.TYPES`) with random weights, prompts with a picture made and
expanded as OpenRLHF does it, stock vLLM's rollouts, unperturbed and with `neighbor` (variant `released`, rate 0.5), and
a forward of the trainer's class in another process with the same pixels: |Δ log p| at worst (and on average).
float32, and bfloat16 where vLLM runs a type in nothing else on a CPU.
"""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.command_line import parser_of
from benchmarks.models import engine_process
from benchmarks.models.case import verdict
from benchmarks.models.pictures import TYPES

PERTURBATION = {"name": "neighbor", "variant": "released", "rate": 0.5}
_TOKENS = 48  # of each response
_RESPONSES = 3  # to each prompt, since the largest gap of few tokens is chance
_BFLOAT16_ONLY = ("qwen3_5",)
_FIGURES = ("unperturbed", "perturbed", "unreplayed")


class Prompt(NamedTuple):
    """A problem as OpenRLHF processes it.

    Attributes:
        tokens: with the placeholders of the picture expanded.
        inputs: what the trainer's forward gets for the picture.
        images: the pictures.
    """

    tokens: list[int]
    inputs: dict[str, Any]
    images: list[Any]


def prompts_of(folder: Path) -> list[Prompt]:
    """The problems in a model's folder, each as often as it is answered."""
    from openrlhf.utils.vlm_utils import process_prompt_with_images
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    prompts = []
    for line in (folder / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        words = {"type": "text", "text": problem["input"].removeprefix("<image>")}
        chat = [{"role": "user", "content": [{"type": "image"}, words]}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(*process_prompt_with_images(processor, text, problem["images"])))
    return prompts * _RESPONSES


def rolled_out(folder: str, dtype: str) -> dict[str, list[Any]]:
    """Rollouts by the perturbation's name, and "none"."""
    from transformers import AutoProcessor
    from vllm import SamplingParams

    from ngrpo.rollout import take_trajectories
    from ngrpo.trainers.openrlhf.pictures import check_places, unexpanded
    from tests.stack.harness import Rollout, build_engine

    limits = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    llm = build_engine(folder, PERTURBATION, dtype=dtype, max_model_len=256, max_num_seqs=8, **limits)
    placeholder = AutoProcessor.from_pretrained(folder).image_token_id
    placeholders = set() if placeholder is None else {placeholder}
    prompts = prompts_of(Path(folder))
    requests = []
    for prompt in prompts:
        tokens = unexpanded(prompt.tokens, placeholders)
        requests.append({"prompt_token_ids": tokens, "multi_modal_data": {"image": prompt.images}})
    rollouts: dict[str, list[Any]] = {}
    for name, arguments in (("none", {"enabled": False}), (PERTURBATION["name"], {})):
        params = []
        for seed in range(len(requests)):
            extra = {"perturbation": {"seed": seed, **arguments}}
            params.append(SamplingParams(max_tokens=_TOKENS, ignore_eos=True, extra_args=extra))
        outputs = llm.generate(requests, params, use_tqdm=False)
        trajectories = take_trajectories(llm)
        rollouts[name] = []
        for prompt, output in zip(prompts, outputs):
            check_places(prompt.tokens, output.prompt_token_ids)
            record, log_probs = trajectories[output.request_id]
            response = list(output.outputs[0].token_ids)
            rollouts[name].append(Rollout(prompt.tokens, response, record, log_probs, []))
    return rollouts


@torch.no_grad()
def gap(model: Any, rollouts: list[Any], prompts: list[Prompt], replay: bool = True) -> tuple[float, float]:
    """Largest and mean |Δ log p| of all tokens, one rollout after the other."""
    from perturbations import replaying

    has_grids = "image_grid_thw" in prompts[0].inputs
    types_name = "mm_token_type_ids" if has_grids else "token_type_ids"
    gaps = []
    for rollout, prompt in zip(rollouts, prompts):
        start = len(rollout.prompt)
        ids = torch.tensor([rollout.sequence])
        mask = torch.ones_like(ids)
        types = (ids == model.config.image_token_id).to(torch.int32)
        if int(types[0, start:].sum()):  # a placeholder in the response, which no trained model gives
            continue
        record = rollout.record if replay else None
        with replaying(model, [record], attention_mask=mask):
            logits = model(ids, attention_mask=mask, **prompt.inputs, **{types_name: types}).logits[0].float()
        log_probs = logits[start - 1 : -1].log_softmax(dim=-1)
        trainer_log_probs = log_probs.gather(-1, ids[0, start:].unsqueeze(-1)).squeeze(-1)
        gaps.append((trainer_log_probs - torch.from_numpy(rollout.log_probs.copy())).abs())
    all_gaps = torch.cat(gaps)
    return float(all_gaps.max()), float(all_gaps.mean())


def measured(model_type: str) -> dict[str, Any]:
    """The figures of a type, each (largest, mean); or the message of what did not work."""
    from transformers import AutoModelForImageTextToText

    from benchmarks.models import pictures
    from ngrpo.machine.models.packaged import resolve

    dtype = "bfloat16" if model_type in _BFLOAT16_ONLY else "float32"
    row = {"type": model_type, "dtype": dtype}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / model_type
        folder.mkdir()
        pictures.build(folder, str(resolve("smollm2-135m")), model_type, dtype)
        pictures.prompts(folder / "prompts")
        try:
            rollouts = engine_process.run(
                "benchmarks.models.picture_rollouts", folder, dtype, {"TORCHDYNAMO_DISABLE": "1"}
            )
        except engine_process.EngineFailed as error:
            return {**row, "message": _last_error(error.stderr)}
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        prompts = prompts_of(folder)
        perturbed = rollouts[PERTURBATION["name"]]
        return {
            **row,
            "unperturbed": gap(model, rollouts["none"], prompts),
            "perturbed": gap(model, perturbed, prompts),
            "unreplayed": gap(model, perturbed, prompts, replay=False),
        }


def _last_error(stderr: str) -> str:
    lines = stderr.splitlines()
    errors = [line for line in lines if "Error: " in line] or lines
    return errors[-1][:300] if errors else ""


def line(row: dict[str, Any]) -> str:
    """A row as it is printed, and in docs/models.md."""
    begin = f"| {row['type']} | {row['dtype']} |"
    if "message" in row:
        return f"{begin} – | – | – | not run: {row['message']} |"
    cells = []
    largest_gaps = []
    for name in _FIGURES:
        largest, mean = row[name]
        cells.append(f"{largest:.1e} ({mean:.1e})")
        largest_gaps.append(largest)
    return f"{begin} {' | '.join(cells)} | {verdict(row['dtype'], *largest_gaps)} |"


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"among {', '.join(TYPES)}; default: all")
    parser.add_argument("--json", type=Path, help="a file to which rows are added as lines")
    options = parser.parse_args()
    unknown = set(options.types) - set(TYPES)
    if unknown:
        parser.error(f"{', '.join(unknown)}: a TYPE is one of {', '.join(TYPES)}")
    return options


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    from benchmarks.machine import describe

    print(describe())
    print("| type | dtype | unperturbed | perturbed | without replay | verdict |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model_type in options.types or TYPES:
        row = measured(model_type)
        print(line(row), flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
