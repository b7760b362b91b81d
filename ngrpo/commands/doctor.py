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
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngrpo import patches
from ngrpo.commands.command_parser import CommandParser
from ngrpo.config import compatibility
from ngrpo.machine.colors import state_column
from ngrpo.machine.console import Report, hanging
from ngrpo.machine.hardware import cuda, gpu_plan, profile_for, stand_ins, surroundings
from ngrpo.machine.models import adapters, architecture, experts, packaged
from ngrpo.machine.upstream import patch_check, placement, versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import ReplayRecord
from perturbations.errors import UsageError

if TYPE_CHECKING:
    import numpy

_PLUGIN = "ngrpo_perturbation"
_SECONDS = 300  # that the self-test may take
_INDENT = " " * 7  # below the column of the states
_SURROUNDINGS = {
    "caches": surroundings.check_caches,
    "folder for temporary files": surroundings.check_sockets,
    "working directory": surroundings.check_shadowed,
}


class Finding(NamedTuple):
    """The state of one thing.

    Attributes:
        subject: what was examined.
        state: its state, in a line.
        fix: what mends a fault; None where all is well.
    """

    subject: str
    state: str
    fix: str | None = None


def run(argv: Sequence[str], *, report: Report) -> int:
    """Prints the findings as they come, and a block for a bug report."""
    parser = CommandParser("doctor")
    parser.add_argument("--model")
    parser.add_argument("--no-self-test", action="store_true")
    args = parser.read(argv)
    named_model = None if args.model is None else packaged.check_name(args.model)
    tested_model = None if args.no_self_test else named_model or "smollm2-135m"
    report_lines = []
    faults = 0
    for finding in _examine(tested_model, report, named_model):
        summary = f"{finding.subject}: {finding.state}"
        state = "ok" if finding.fix is None else "WRONG"
        print(f"{state_column(state, len(_INDENT))}{hanging(summary, _INDENT)}", flush=True)
        report_lines.append(f"- {state} {summary}")
        if finding.fix is not None:
            print(f"{_INDENT}{hanging(f'fix: {finding.fix}', _INDENT)}", flush=True)
            faults += 1
    machine = ", ".join(f"{key} {value}" for key, value in versions.machine().items())
    print("", "--- for a bug report ---", f"- {machine}", *report_lines, "---", sep="\n")
    report(f"{faults} of {len(report_lines)} findings need fixing" if faults else "all is well")
    return 1 if faults else 0


def _examine(tested_model: str | None, report: Report, named_model: str | None) -> Iterator[Finding]:
    """All findings, the self-test of ``tested_model`` last; an unsupported ``named_model`` has no self-test."""
    yield _python()
    yield _releases()
    gpu_error = _error_of(lambda: profile_for("auto"))
    profile = profile_for("cpu" if gpu_error else "auto")
    yield _device(profile.name, gpu_error)
    compiler_error = _error_of(lambda: profile.check(Flags()))
    replacements = " ".join(profile.notes(Flags()))
    compiler = replacements or "it can compile what is compiled on first use"
    yield Finding("compiler", "not ready" if compiler_error else compiler, compiler_error)
    if None in versions.versions().values() or _error_of(versions.check_transformers):
        return  # the further findings import these packages
    for subject, check in _SURROUNDINGS.items():
        error = _error_of(check)
        yield Finding(subject, "not usable" if error else "usable", error)
    yield _placement(profile.name)
    yield Finding("flash-attn", _attention(profile.name))
    yield _upstream_patches(profile.name)
    yield _plugin()
    if named_model is not None:
        finding = _model(named_model, profile.name)
        yield finding
        if finding.fix is not None:
            return
    if tested_model is not None:
        report("self-test: a rollout and its replay, half a minute")
        yield _self_test(tested_model)


def _python() -> Finding:
    """The release of Python."""
    release = ".".join(map(str, sys.version_info[:3]))
    is_supported = (3, 10) <= sys.version_info[:2] <= (3, 12)
    return Finding("Python", f"{release}, {sys.executable}", None if is_supported else "use Python 3.10 to 3.12")


def _releases() -> Finding:
    """The releases of the packages."""
    releases = versions.versions()
    missing = ", ".join(name for name, release in releases.items() if release is None)
    fix = _error_of(versions.check_stack)
    if fix is None and missing:
        fix = f"install {missing}: docs/install.md"
    return Finding("releases", ", ".join(f"{name} {release or 'missing'}" for name, release in releases.items()), fix)


def _attention(hardware: str) -> str:
    """The state of flash-attn; its absence is no fault."""
    if hardware == "cpu":
        return "of no use on a CPU; the trainer's attention is PyTorch's own"
    if stand_ins.has_flash_attn():
        return f"{versions.installed('flash-attn')}: OpenRLHF's default attention"
    if stand_ins.is_flash_attn_installed():
        return f"cannot be imported ({stand_ins.flash_attn_failure()}); the trainer's attention is PyTorch's own"
    return "missing: the trainer's attention is PyTorch's own (docs/install.md)"


def _upstream_patches(hardware: str) -> Finding:
    """Whether the installed sources are those of the table of patches."""
    rows = [row for row in (*patches.OPENRLHF, *patches.VLLM) if hardware == "cpu" or row.when != "cpu"]
    try:
        patch_check.check(rows)
    except patch_check.PatchMismatch as error:
        first_line, *_, fix = str(error).splitlines()
        return Finding("upstream patches", first_line, f"{fix} All rows: python -m ngrpo.patches")
    return Finding("upstream patches", f"all {len(rows)} definitions match the table")


def _plugin() -> Finding:
    """Whether vLLM would load our plugin."""
    subject = "vLLM's plugin"
    if _PLUGIN not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        return Finding(subject, f"{_PLUGIN} is not registered", f"install this project with {sys.executable} -m pip")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return Finding(subject, f"VLLM_PLUGINS={allowed} leaves it out", f"add {_PLUGIN} to VLLM_PLUGINS, or unset it")
    return Finding(subject, "registered")


def _model(name: str, hardware: str) -> Finding:
    """The support of a model by its config.json; of an adapter, that of its base model."""
    if adapters.is_adapter(name):
        try:
            base = adapters.base_of(Path(name).expanduser())
        except UsageError as error:
            return Finding(f"model {name}", "an adapter that cannot be read", str(error))
        return _model(base, hardware)._replace(subject=f"model {base}, of the adapter {name}")
    try:
        support = architecture.support_of(name, ask_hub=True)
    except UsageError as error:
        return Finding(f"model {name}", "its config.json cannot be read", str(error))
    state = str(support) if support else "not known: its config.json is not here, and the hub is out of reach"
    refusal = "; ".join(support.refused) if support else ""
    if not refusal:
        refusal = _error_of(lambda: compatibility.check_model(name, hardware)) or ""
    config_path = architecture.find_config(name)
    if not refusal and config_path is not None:
        refusal = _error_of(lambda: experts.check(config_path, replayed=False)) or ""
    return Finding(f"model {name}", state, refusal or None)


def _error_of(check: Callable[[], object]) -> str | None:
    """The message of a check that fails, which includes the fix; None where it passes."""
    try:
        check()
    except UsageError as error:
        return str(error)
    return None


def _device(hardware: str, gpu_error: str | None) -> Finding:
    """The hardware of the profile that `auto` means; ``gpu_error`` is about a GPU that torch cannot use."""
    import torch

    built_for = torch.version.cuda
    driver = cuda.installed_driver()
    if hardware == "cuda":
        home, release = cuda.toolkit()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding(
            "hardware",
            f"profile cuda: {names}; CUDA {built_for}, driver {driver or 'unknown'}, toolkit {release or 'missing'}"
            f" ({home})",
        )
    target = f"CUDA {built_for}" if built_for else "a CPU"
    state = f"profile cpu: torch sees no CUDA device (it is built for {target})"
    if driver is None:
        return Finding("hardware", state)
    fix = gpu_error or "install the extra cuda and a torch that is built for CUDA: docs/install.md"
    return Finding("hardware", f"{state}, but there is a GPU with driver {driver}", fix)


def _placement(hardware: str) -> Finding:
    """The placement of a training without flags of one, and the models that it holds."""
    machine = placement.here()
    if machine is None:
        if hardware == "cpu":
            state = "no GPU; `ngrpo train --hardware cuda --dry-run 1x80 ...` plans for a machine that has one"
        else:
            state = "no GPU in the Ray cluster that a run would join"
        return Finding("placement", state)
    fitting, fitting_offloaded, too_large = [], [], []
    models = architecture.size_table()
    for name in sorted(models, key=lambda model: models[model]["parameters"]):
        flags = planned_flags(name, machine)
        if not gpu_plan.fits(flags.args, machine.memory):
            too_large.append(name)
        elif flags.has("--ds.adam_offload"):
            fitting_offloaded.append(name)
        else:
            fitting.append(name)
    models_by_fit = {
        "by estimate, with responses of 2,048 tokens": fitting,
        "with --ds.adam_offload": fitting_offloaded,
        "too large": too_large,
    }
    lists = "; ".join(f"{fit}: {', '.join(names)}" for fit, names in models_by_fit.items() if names)
    return Finding("placement", f"hybrid on {machine} where no flag says another; {lists}")


def planned_flags(model: str, machine: placement.Machine, *words: str) -> Flags:
    """The flags of a GRPO training on a machine, with ``words`` and a placement."""
    grpo = ["--reward.remote_url", "r.py", "--algo.advantage.estimator", "group_norm"]
    grpo += ["--rollout.n_samples_per_prompt", "8", "--actor.model_name_or_path", model]
    flags = Flags([*grpo, *words])
    return flags.with_defaults(gpu_plan.default_flags(flags, machine))


def _self_test(model: str) -> Finding:
    """Runs :func:`self_test` in a process of its own: its crash is a finding too."""
    subject = "self-test"
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        output_file = Path(folder) / "output.log"
        command = [sys.executable, "-m", "ngrpo.commands.doctor", model, str(result_file)]
        # vLLM's engine is a process of its own, which outlives the one that started it.
        with (
            output_file.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True) as process,
        ):
            try:
                status = process.wait(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                return Finding(subject, f"not done after {_SECONDS} s", "report it with the block below")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not result_file.exists():
            ending = _ending(output_file.read_text(errors="replace"))
            return Finding(subject, f"ended with status {status}", f"read the lines that it ended with:\n{ending}")
        measures = json.loads(result_file.read_text())
    state = (
        f"{measures['runner']} model runner, {measures['edits']} perturbed inputs among {measures['tokens']} tokens,"
        f" |Δ log p| {measures['gap']:.1e} with the replay, {measures['unreplayed']:.1e} without,"
        f" {measures['plain']:.1e} where nothing is perturbed"
    )
    # A GPU rounds float32 in ways of its own, which the unperturbed requests show.
    allowed = max(1e-4, 3.0 * measures["plain"])
    if measures["edits"] == 0 or measures["unreplayed"] <= allowed:
        return Finding(subject, state, "the rollout was not perturbed: reinstall the project, then report it")
    if measures["gap"] > allowed:
        return Finding(subject, state, f"at most {allowed:.1e} is exact: report it")
    return Finding(subject, state)


def _ending(output: str) -> str:
    """The last lines of an output, or those from the cause on.

    The process of an engine prints the cause of its end before the process that started it prints a traceback.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if "CheckFailure: " in line:
            return "\n".join(lines[number : number + 10])
    return "\n".join(lines[-15:])


class _Rollout(NamedTuple):
    """One response of the self-test: its token ids, its record, and the engine's log-probabilities."""

    tokens: list[int]
    record: ReplayRecord
    log_probs: "numpy.ndarray"


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
    device_options: dict[str, Any] = {"distributed_executor_backend": "uni"}
    if has_gpu:
        device_options = {"gpu_memory_utilization": 0.3}
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,  # room for a sequence in float32, of which a token has up to 2 MiB
        disable_log_stats=True,
        additional_config={"perturbation": {"name": "gumbel", "rate": 0.5}},
        **device_options,
    )
    prompt = llm.get_tokenizer().encode("The first three prime numbers are")
    # Two perturbed requests, and an unperturbed one, whose mismatch is that of plain rounding.
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, extra_args={"perturbation": arguments})
        for arguments in ({"seed": 0}, {"seed": 1}, {"seed": 2, "enabled": False})
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    trajectories = take_trajectories(llm)
    rollouts = []
    for output in outputs:
        record, log_probs = trajectories[output.request_id]
        rollouts.append(_Rollout(tokens=list(output.outputs[0].token_ids), record=record, log_probs=log_probs))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = reference.to("cuda" if has_gpu else "cpu").eval()

    @torch.no_grad()
    def response_log_probs(
        token_ids: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """The log-probabilities (rows, response tokens) of texts (rows, tokens)."""
        token_ids = token_ids.to(reference.device)
        logits = reference(token_ids, attention_mask=attention_mask.to(reference.device)).logits
        log_probs = logits.float().log_softmax(-1)[:, :-1]
        token_log_probs = log_probs.gather(-1, token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return token_log_probs[:, -action_mask.shape[1] :]

    check_replay(reference, response_log_probs)
    token_ids = torch.tensor([prompt + rollout.tokens for rollout in rollouts], device=reference.device)
    engine_log_probs = torch.tensor([rollout.log_probs.tolist() for rollout in rollouts])

    def mismatch(records: list[Any]) -> torch.Tensor:
        """|Δ log p| (rows, response tokens) of a replay and the engine."""
        with replaying(reference, records):
            log_probs = response_log_probs(
                token_ids,
                action_mask=torch.ones_like(token_ids[:, len(prompt) :]),
                attention_mask=torch.ones_like(token_ids),
            )
        return (log_probs.cpu() - engine_log_probs).abs()

    with_replay = mismatch([rollout.record for rollout in rollouts])
    without_replay = mismatch([None] * len(rollouts))
    return {
        "runner": model_runner(llm),
        "edits": sum(len(rollout.record) for rollout in rollouts),
        "tokens": sum(len(rollout.tokens) for rollout in rollouts[:2]),
        "gap": with_replay[:2].max().item(),
        "unreplayed": without_replay[:2].max().item(),
        "plain": with_replay[2].max().item(),
    }


if __name__ == "__main__":
    # vLLM's engine runs in its own process, because its Transformers backend changes the classes of the replay.
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
