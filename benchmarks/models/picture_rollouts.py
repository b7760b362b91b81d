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
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.case import verdict

PERTURBATION = {"name": "neighbor", "variant": "released", "rate": 0.5}
_TOKENS, _ANSWERS = 48, 3  # of each response; to each prompt, since the largest gap of few tokens is chance
_HALF = ("qwen3_5",)
_FIGURES = ("unperturbed", "perturbed", "unreplayed")


def prompts_of(folder: Path) -> list[tuple[list[int], dict[str, Any], list[Any]]]:
    """Of each problem the expanded tokens, what the trainer's forward gets, and the pictures."""
    from openrlhf.utils.vlm_utils import process_prompt_with_images
    from transformers import AutoProcessor

    processor, result = AutoProcessor.from_pretrained(folder), []
    for line in (folder / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        words = {"type": "text", "text": row["input"].removeprefix("<image>")}
        chat = [{"role": "user", "content": [{"type": "image"}, words]}]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        result.append(process_prompt_with_images(processor, text, row["images"]))
    return result


def rolled_out(folder: Path, dtype: str) -> dict[str, list[Any]]:
    """Rollouts by the perturbation's name, and "none"."""
    from transformers import AutoProcessor
    from vllm import SamplingParams

    from ngrpo.rollout import take_trajectories
    from ngrpo.trainers.openrlhf.pictures import check_places, unexpanded
    from tests.stack.harness import Rollout, build_engine

    limits = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    llm = build_engine(str(folder), PERTURBATION, dtype=dtype, max_model_len=256, max_num_seqs=8, **limits)
    pads = {token for token in (AutoProcessor.from_pretrained(folder).image_token_id,) if token is not None}
    prompts, result = prompts_of(folder) * _ANSWERS, {}
    requests = [{"prompt_token_ids": unexpanded(ids, pads), "multi_modal_data": {"image": i}} for ids, _, i in prompts]
    for name, arguments in (("none", {"enabled": False}), (PERTURBATION["name"], {})):
        params = [
            SamplingParams(max_tokens=_TOKENS, ignore_eos=True, extra_args={"perturbation": {"seed": i, **arguments}})
            for i in range(len(requests))
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        taken, result[name] = take_trajectories(llm), []
        for (ids, *_), output in zip(prompts, outputs):
            check_places(ids, output.prompt_token_ids)
            tokens, (record, log_probs) = list(output.outputs[0].token_ids), taken[output.request_id]
            result[name].append(Rollout(ids, tokens, record, log_probs, []))
    return result


@torch.no_grad()
def gap(model: Any, rollouts: list[Any], inputs: list[dict[str, Any]], replay: bool = True) -> tuple[float, float]:
    """Largest and mean |Δ log p| of all tokens, one rollout after the other."""
    from perturbations import replaying

    kind, gaps = "mm_token_type_ids" if "image_grid_thw" in inputs[0] else "token_type_ids", []
    for rollout, picture in zip(rollouts, inputs):
        ids = torch.tensor([rollout.sequence])
        ones, types = torch.ones_like(ids), (ids == model.config.image_token_id).to(torch.int32)
        if int(types[0, len(rollout.prompt) :].sum()):  # a placeholder in the response, which no trained model gives
            continue
        with replaying(model, [rollout.record if replay else None], attention_mask=ones):
            logits = model(ids, attention_mask=ones, **picture, **{kind: types}).logits[0].float()
        start = len(rollout.prompt)
        now = logits[start - 1 : -1].log_softmax(dim=-1).gather(-1, ids[0, start:].unsqueeze(-1)).squeeze(-1)
        gaps.append((now - torch.from_numpy(rollout.log_probs.copy())).abs())
    return float(torch.cat(gaps).max()), float(torch.cat(gaps).mean())


def measured(model_type: str) -> dict[str, Any]:
    """The figures of a type, each (largest, mean); or the message of what did not work."""
    from transformers import AutoModelForImageTextToText

    from benchmarks.models import pictures
    from ngrpo.machine.models.packaged import resolve

    dtype = "bfloat16" if model_type in _HALF else "float32"
    with tempfile.TemporaryDirectory() as scratch:
        folder, target = Path(scratch) / model_type, Path(scratch) / "rollouts"
        folder.mkdir()
        pictures.build(folder, str(resolve("smollm2-135m")), model_type, dtype)
        pictures.prompts(folder / "prompts")
        command = [sys.executable, "-m", "benchmarks.models.picture_rollouts", "--engine", str(folder), str(target)]
        done = subprocess.run([*command, dtype], check=False, capture_output=True, text=True)
        if not target.exists():
            errors = [line for line in done.stderr.splitlines() if "Error: " in line] or done.stderr.splitlines()
            return {"type": model_type, "dtype": dtype, "message": errors[-1][:300] if errors else ""}
        rollouts = pickle.loads(target.read_bytes())
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        inputs, name = [picture for _, picture, _ in prompts_of(folder)] * _ANSWERS, PERTURBATION["name"]
        return {
            "type": model_type,
            "dtype": dtype,
            "unperturbed": gap(model, rollouts["none"], inputs),
            "perturbed": gap(model, rollouts[name], inputs),
            "unreplayed": gap(model, rollouts[name], inputs, replay=False),
        }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed, and in docs/models.md."""
    begin = f"| {row['type']} | {row['dtype']} |"
    if "message" in row:
        return f"{begin} – | – | – | not run: {row['message']} |"
    figures = " | ".join(f"{row[name][0]:.1e} ({row[name][1]:.1e})" for name in _FIGURES)
    return f"{begin} {figures} | {verdict(row['dtype'], *(row[n][0] for n in _FIGURES))} |"


def main() -> None:
    from benchmarks.models.pictures import TYPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"among {', '.join(TYPES)}; default: all")
    parser.add_argument("--json", type=Path, help="a file to which rows are added as lines")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.types) - set(TYPES):
        parser.error(f"{', '.join(unknown)}: a TYPE is one of {', '.join(TYPES)}")
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    if options.engine:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        folder, target, dtype = options.engine
        answer = pickle.dumps(rolled_out(Path(folder), dtype))
        Path(target).write_bytes(answer)
        sys.stdout.flush()
        os._exit(0)  # vLLM's engine and the interpreter of Python do not end well together
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
