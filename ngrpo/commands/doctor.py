# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo doctor [--model NAME_OR_FOLDER] [--no-self-test]

Checks what a perturbed training needs, and prints a fix for each fault:
releases, CUDA and its toolkit, flash-attn, the upstream patches, vLLM's plugin.
Then a self-test rolls out the packaged model with a perturbation and replays
it, in half a minute. The block at the end is for a bug report.

  --model NAME_OR_FOLDER    model of the self-test [smollm2-135m]; its
                            config.json is checked for support first
  --no-self-test            leave it out

examples
  ngrpo doctor
  ngrpo doctor --model Qwen/Qwen3.5-0.8B --no-self-test
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo import patches
from ngrpo.commands.command_parser import CommandParser
from ngrpo.config import compatibility
from ngrpo.machine.console import Report
from ngrpo.machine.hardware import cuda, gpu_plan, profile_for, stand_ins, surroundings
from ngrpo.machine.models import architecture, experts, packaged
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

_PLUGIN = "ngrpo_perturbation"
_SECONDS = 300
_SURROUNDINGS = {
    "caches": surroundings.check_caches,
    "folder for temporary files": surroundings.check_sockets,
    "working directory": surroundings.check_shadowed,
}


class Finding(NamedTuple):
    """Something that was looked at, its state in a line, and the fix of an error; no fix where all is well."""

    subject: str
    state: str
    fix: str | None = None


def run(argv: Sequence[str], *, report: Report) -> int:
    """Prints the findings as they come, and a block for a bug report."""
    parser = CommandParser("doctor")
    parser.add_argument("--model")
    parser.add_argument("--no-self-test", action="store_true")
    args = parser.read(argv)
    named = None if args.model is None else packaged.check_name(args.model)
    lines, wrong = [], 0
    for finding in _examine(None if args.no_self_test else named or "smollm2-135m", report, named):
        state, broken = f"{finding.subject}: {finding.state}", finding.fix is not None
        print(f"{'WRONG' if broken else 'ok   '}  {state}", flush=True)
        if finding.fix is not None:
            print(textwrap.indent(f"fix: {finding.fix}", " " * 7))
        lines.append(f"- {'WRONG' if broken else 'ok'} {state}")
        wrong += broken
    machine = ", ".join(f"{key} {value}" for key, value in versions.machine().items())
    print("", "--- for a bug report ---", f"- {machine}", *lines, "---", sep="\n")
    report(f"{wrong} of {len(lines)} findings need fixing" if wrong else "all is well")
    return int(wrong > 0)


def _examine(model: str | None, report: Report, named: str | None) -> Iterator[Finding]:
    """All findings, the self-test of ``model`` last; ``named``, if unsupported, has none."""
    release = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    yield Finding("Python", f"{release}, {sys.executable}", None if fits else "use Python 3.10 to 3.12")
    found = versions.versions()
    missing = ", ".join(name for name, release in found.items() if release is None)
    releases = ", ".join(f"{name} {release or 'missing'}" for name, release in found.items())
    fix = _error_of(versions.check_stack) or (f"install {missing}: docs/install.md" if missing else None)
    yield Finding("releases", releases, fix)
    unusable = _error_of(lambda: profile_for("auto"))
    profile = profile_for("cpu" if unusable else "auto")
    yield _device(profile.name, unusable)
    broken = _error_of(lambda: profile.check(Flags()))
    compiled = " ".join(profile.notes(Flags())) or "the code that is compiled on first use can be"
    yield Finding("compiler", "not ready" if broken else compiled, broken)
    if missing or _error_of(versions.check_transformers):  # what follows imports them
        return
    for subject, look in _SURROUNDINGS.items():
        broken = _error_of(look)
        yield Finding(subject, "not usable" if broken else "usable", broken)
    yield _placement(profile.name)
    release = versions.installed("flash-attn") if stand_ins.has_flash_attn() else None
    attention = f"{release}: OpenRLHF's default attention"
    if profile.name == "cpu":
        attention = "of no use on a CPU; the trainer's attention is PyTorch's own"
    elif stand_ins.is_flash_attn_installed() and release is None:
        attention = f"cannot be imported ({stand_ins.flash_attn_failure()}); the trainer's attention is PyTorch's own"
    elif release is None:
        attention = "missing: the trainer's attention is PyTorch's own (docs/install.md)"
    yield Finding("flash-attn", attention)
    rows = [row for row in (*patches.OPENRLHF, *patches.VLLM) if profile.name == "cpu" or row.when != "cpu"]
    try:
        patches.check(rows)
        yield Finding("upstream patches", f"all {len(rows)} definitions match the table")
    except patches.PatchMismatch as error:
        first, *_, fix = str(error).splitlines()
        yield Finding("upstream patches", first, f"{fix} All rows: python -m ngrpo.patches")
    state, fix, allowed = "registered", None, os.environ.get("VLLM_PLUGINS")
    if _PLUGIN not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        state, fix = f"{_PLUGIN} is not registered", f"install this project with {sys.executable} -m pip"
    elif allowed is not None and _PLUGIN not in allowed.split(","):
        state, fix = f"VLLM_PLUGINS={allowed} leaves it out", f"add {_PLUGIN} to VLLM_PLUGINS, or unset it"
    yield Finding("vLLM's plugin", state, fix)
    if named is not None:
        support, subject = architecture.support_of(named, ask_hub=True), f"model {named}"
        refused = "; ".join(support.refused) if support else ""
        refused = refused or _error_of(lambda: compatibility.check_model(named, profile.name))
        path = architecture.find_config(named)
        if path is not None and not refused:
            refused = _error_of(lambda: experts.check(path, replayed=False)) or ""
        unknown = "not known: its config.json is not here, and the hub is out of reach"
        yield Finding(subject, str(support) if support else unknown, refused or None)
        if refused:
            return
    if model is not None:
        report("self-test: a rollout and its replay, half a minute")
        yield _self_test(model)


def _error_of(check: Callable[[], object]) -> str | None:
    """The message of a check that fails; it holds the fix."""
    try:
        check()
    except UsageError as error:
        return str(error)
    return None


def _device(hardware: str, unusable: str | None) -> Finding:
    """The hardware of the profile that `auto` means; ``unusable`` is the error about a GPU that torch cannot use."""
    import torch

    built, driver = torch.version.cuda, cuda.installed_driver()
    if hardware == "cuda":
        home, release = cuda.toolkit()
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        compiled = f"toolkit {release or 'missing'} ({home})"
        return Finding("hardware", f"profile cuda: {names}; CUDA {built}, driver {driver or 'unknown'}, {compiled}")
    state = f"profile cpu: torch sees no CUDA device (it is built for {f'CUDA {built}' if built else 'a CPU'})"
    if driver is None:
        return Finding("hardware", state)
    fix = unusable or "install the extra cuda and a torch that is built for CUDA: docs/install.md"
    return Finding("hardware", f"{state}, but there is a GPU with driver {driver}", fix)


def _placement(hardware: str) -> Finding:
    """The placement of a training without flags of one, and the models that it holds."""
    subject, there = "placement", placement.here()
    if there is None:
        state = "no GPU; `ngrpo train --hardware cuda --dry-run 1x80 ...` plans for a machine that has one"
        return Finding(subject, state if hardware == "cpu" else "no GPU in the Ray cluster that a run would join")
    size = {"by estimate, with responses of 2,048 tokens": [], "with --ds.adam_offload": [], "too large": []}
    models = architecture.size_table()
    for name in sorted(models, key=lambda each: models[each]["parameters"]):
        flags = planned_flags(name, there)
        fits = not gpu_plan.notes(flags.args, there)
        size[list(size)[2 if not fits else int(flags.has("--ds.adam_offload"))]].append(name)
    told = "; ".join(f"{how}: {', '.join(names)}" for how, names in size.items() if names)
    return Finding(subject, f"hybrid on {there} where no flag says another; {told}")


def planned_flags(model: str, machine: placement.Machine, *words: str) -> Flags:
    """The flags of a GRPO training on a machine, with ``words`` and a placement."""
    base = ["--reward.remote_url", "r.py", "--algo.advantage.estimator", "group_norm"]
    base += ["--rollout.n_samples_per_prompt", "8", "--actor.model_name_or_path", model]
    flags = Flags([*base, *words])
    return flags.with_defaults(gpu_plan.default_flags(flags, machine))


def _self_test(model: str) -> Finding:
    """In a process of its own: its crash is a finding too."""
    subject = "self-test"
    with tempfile.TemporaryDirectory() as folder:
        target, output = Path(folder) / "result.json", Path(folder) / "output.log"
        command = [sys.executable, "-m", "ngrpo.commands.doctor", model, str(target)]
        # vLLM's engine is a process of its own, which outlives the one that started it.
        with (
            output.open("w") as file,
            subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process,
        ):
            try:
                status = process.wait(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                return Finding(subject, f"not done after {_SECONDS} s", "report it with the block below")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not target.exists():
            lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
            # An engine's process tells why it ended before the one that started it does.
            cause = next((number for number, line in enumerate(lines) if "CheckFailure: " in line), None)
            ending = "\n".join(lines[-15:] if cause is None else lines[cause:][:10])
            return Finding(subject, f"ended with status {status}", f"read the lines that it ended with:\n{ending}")
        measures = json.loads(target.read_text())
    state = (
        f"{measures['runner']} model runner, {measures['edits']} perturbed inputs among {measures['tokens']} tokens,"
        f" |Δ log p| {measures['gap']:.1e} with the replay, {measures['unreplayed']:.1e} without,"
        f" {measures['plain']:.1e} where nothing is perturbed"
    )
    # A GPU rounds float32 in ways of its own, which the unperturbed requests show.
    allowed = max(1e-4, 3.0 * measures["plain"])
    if measures["edits"] == 0 or measures["unreplayed"] <= allowed:
        return Finding(subject, state, "the rollout was not perturbed: reinstall the project, then report it")
    return Finding(subject, state, None if measures["gap"] <= allowed else f"at most {allowed:.1e} is exact: report it")


def self_test(model: str) -> dict[str, Any]:
    """Samples a few tokens in float32, perturbed and not, and replays them by Hugging Face: the largest gaps."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from ngrpo.rollout import model_runner, take_trajectories
    from ngrpo.trainers.common.replay_check import check_replay
    from perturbations import replaying

    folder = packaged.resolve(model)
    has_gpu = torch.cuda.is_available()
    place: dict[str, Any] = {"gpu_memory_utilization": 0.3} if has_gpu else {"distributed_executor_backend": "uni"}
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=True,
        additional_config={"perturbation": {"name": "gumbel", "rate": 0.5}},
        **place,
    )
    prompt = llm.get_tokenizer().encode("The first three prime numbers are")
    arguments = [{"seed": 0}, {"seed": 1}, {"seed": 2, "enabled": False}]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, extra_args={"perturbation": a}) for a in arguments]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    trajectories = take_trajectories(llm)
    rollouts = [(list(output.outputs[0].token_ids), *trajectories[output.request_id]) for output in outputs]
    reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda" if has_gpu else "cpu").eval()
    )

    @torch.no_grad()
    def of_texts(texts: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        texts = texts.to(reference.device)
        log_probs = reference(texts, attention_mask=attention_mask.to(reference.device)).logits.float().log_softmax(-1)
        return log_probs[:, :-1].gather(-1, texts[:, 1:].unsqueeze(-1)).squeeze(-1)[:, -action_mask.shape[1] :]

    check_replay(reference, of_texts)
    sequences = torch.tensor([prompt + tokens for tokens, _, _ in rollouts], device=reference.device)
    theirs = torch.tensor([log_probs.tolist() for _, _, log_probs in rollouts])

    def gaps(records: list[Any]) -> Any:
        with replaying(reference, records):
            log_probs = of_texts(sequences, torch.ones_like(sequences[:, len(prompt) :]), torch.ones_like(sequences))
        return (log_probs.cpu() - theirs).abs()

    replayed, without = gaps([record for _, record, _ in rollouts]), gaps([None] * len(rollouts))
    return {
        "runner": model_runner(llm),
        "edits": sum(len(record) for _, record, _ in rollouts),
        "tokens": sum(len(tokens) for tokens, _, _ in rollouts[:2]),
        "gap": replayed[:2].max().item(),
        "unreplayed": without[:2].max().item(),
        "plain": replayed[2].max().item(),
    }


if __name__ == "__main__":
    # The engine in a process of its own: vLLM's Transformers backend changes the classes that the replay is done with.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    status = 0
    try:
        Path(sys.argv[2]).write_text(json.dumps(self_test(sys.argv[1])), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # The interpreter would take triton's bindings apart in a bad order (vLLM 0.29).
