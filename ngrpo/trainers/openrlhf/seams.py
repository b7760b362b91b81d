# SPDX-License-Identifier: Apache-2.0
"""Everything that is replaced in OpenRLHF, Ray, vLLM and torch for training: one table.

Upstream stays unmodified on disk. A row says what is replaced, by what, why, under which condition, and
the state of the upstream source that it was written against. `check` compares that state with what is
installed before anything starts, so an upgrade that moves a seam is one clear error and not a run that
trains on something else. `python -m ngrpo.trainers.openrlhf.seams` prints the table and the states found.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from perturbations.errors import UsageError, require

IMPORT = "<import>"


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class SeamMismatch(UsageError):
    """Upstream code is not what a row of the table was written against."""


@dataclass(frozen=True)
class Seam:
    """One replaced (or relied-upon) piece of upstream code.

    Attributes:
        module: Upstream module.
        attribute: Dotted name inside it, or `IMPORT` for a context that holds while it is imported.
        ours: ``"module:function"``; the function takes the original and returns what takes its place
            (for a ``@ray.remote`` class: takes the plain class, returns a subclass). Rows for one
            attribute apply in the order of the table, each onto the one before, so they compose.
            None: nothing is replaced, we only rely on it.
        when: The condition under which the row is active, e.g. ``"cpu"``, or several with "or" between them.
        upstream: ``"sha:…"`` of the definition's source, or its parameter names ``"(self, x)"`` where
            only the signature matters, or ``"import"`` for a name that the module merely imports.
        checked: Distribution and version that the row was checked with.
        why: Why, in one line.
    """

    module: str
    attribute: str
    ours: str | None
    when: str
    upstream: str
    checked: str
    why: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


_OPENRLHF = "openrlhf 0.11.2"
_ACTOR, _LAUNCHER, _ENGINE = (f"openrlhf.trainer.ray.{name}" for name in ("ppo_actor", "launcher", "vllm_engine"))
_SAMPLES, _EXPERIENCE = (f"openrlhf.trainer.ppo_utils.{name}" for name in ("samples_generator", "experience_maker"))
_MODEL, _DEEPSPEED = "openrlhf.models.actor", "openrlhf.utils.deepspeed.deepspeed"


def _seam(
    module: str, attribute: str, ours: str | None, when: str, upstream: str, why: str, checked: str = _OPENRLHF
) -> Seam:
    """A row; ``ours`` is of this folder where its module has no dot, else of ``ngrpo.machine``."""
    path = ours and ours.partition(":")[0]
    if path and not path.startswith("ngrpo."):
        ours = f"{'ngrpo.machine' if '.' in path else __package__}.{ours}"
    return Seam(module, attribute, ours, when, upstream, checked, why)


SEAMS: tuple[Seam, ...] = (
    # ---- a machine without CUDA -------------------------------------------------------------------
    _seam("torch.cuda", "current_device", "hardware.cpu:cuda_current_device", "cpu", "()",
        "OpenRLHF moves batches to torch.cuda.current_device()", "torch 2.13.0"),
    _seam("torch.cuda", "set_device", "hardware.cpu:do_nothing", "cpu", "(device)",
        "DeepspeedStrategy.setup_distributed chooses a CUDA device", "torch 2.13.0"),
    _seam("torch.cuda", "synchronize", "hardware.cpu:do_nothing", "cpu", "(device)",
        "torch_dist_barrier_and_cuda_sync waits for the device", "torch 2.13.0"),
    _seam(_DEEPSPEED, "init_device_mesh", "hardware.cpu:device_mesh", "cpu", "import",
        'asks for a device mesh on "cuda" by name'),
    _seam(_DEEPSPEED, "DeepspeedStrategy.moving_average", "hardware.cpu:moving_average", "cpu",
        "(self, model, model_ema, beta, device)", 'the actor passes the device "cuda" by name (--train.enable_ema)'),
    _seam("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.__init__", "hardware.cpu:replay_buffer_init",
        "cpu", "sha:ee37108b4b5d", 'its target device is "cuda:{index}"'),
    _seam("deepspeed.comm.torch", "build_shm_op", "hardware.cpu:do_nothing", "cpu", "()",
        "compiles an all-reduce kernel for half a minute, where gloo has one", "deepspeed 0.19.6"),
    _seam("deepspeed.comm.torch", "TorchBackend.all_gather_into_tensor", "hardware.cpu:waited_for", "cpu",
        "(self, output_tensor, input_tensor, group, async_op)",
        "of several gathers DeepSpeed waits for the last, and gloo finishes them in any order", "deepspeed 0.19.6"),
    _seam(_LAUNCHER, "BaseDistributedActor._get_free_port", "hardware.cpu:port_below_outgoing", "cpu",
        "sha:2e43720d4972", "chooses a port long before it listens; an outgoing connection may have it by then"),
    # ---- float32 on a CPU -------------------------------------------------------------------------
    _seam("argparse", "_ActionsContainer.add_argument", "upstream.openrlhf_parser:with_float32", "cpu", "(self)",
        "OpenRLHF's --ds.param_dtype takes bf16 and fp16 only", "Python 3.12"),
    _seam("openrlhf.utils.utils", "convert_to_torch_dtype", "hardware.cpu:with_float32", "cpu", "sha:9c59d2aa5133",
        "likewise: the dtype that models are loaded in"),
    _seam(_DEEPSPEED, "get_train_ds_config", "hardware.cpu:with_torch_adam", "cpu", "import",
        "DeepSpeed compiles its own Adam for one to two minutes; PyTorch's is there"),
    # ---- without flash-attn (see ngrpo.machine.hardware.stand_ins) ----------------------------------------
    _seam("openrlhf.models.ring_attn_utils", IMPORT, "hardware.stand_ins:flash_attn_stand_in",
        "without_flash_attn", "import", "imports flash_attn at module level, packing or not"),
    _seam("openrlhf.utils", "get_strategy", "hardware.stand_ins:attention_as_given", "without_flash_attn", "import",
        "is given flash_attention_2 where samples are packed, whatever the command line says"),
    # ---- the classes of OpenRLHF, one subclass each -----------------------------------------------
    _seam("openrlhf.trainer.ppo_trainer", "PPOTrainer", "trainer:trainer",
        "perturbation or reproducible or advantage or credit or policy_noise or sampling_mask or sampling_schedule"
        " or report_groups or second_round or correction_warmup or eval_at_start", "sha:74b355e75a15",
        "measures join the step's log, and states the checkpoint; noise and temperature of each step"),
    _seam("openrlhf.trainer.ppo_trainer_async", "TrainingActor", "trainer:trainer",
        "perturbation or advantage or credit or sampling_mask or sampling_schedule or report_groups or second_round"
        " or correction_warmup", "sha:ad079d89d655", "the same, where asynchronous"),
    _seam("openrlhf.trainer.ppo_trainer_async", "GenerateSamplesActor", "trainer:generate_samples_actor",
        "perturbation or reproducible or sampling_mask or sampling_schedule", "sha:330319997ada",
        "its checkpoint has the round, where asynchronous"),
    _seam("openrlhf.trainer.ppo_trainer", "prepare_datasets", "trainer:prepare_datasets", "reproducible",
        "(strategy, tokenizer)", "the order of the prompts follows the seed"),
    _seam(_SAMPLES, "SamplesGenerator", "samples_generator:samples_generator",
        "perturbation or reproducible or sampling_mask or sampling_schedule or sampling or second_round",
        "sha:11458b2545a7", "requests carry round, masks and temperature; batches start whole"),
    _seam(_ENGINE, "RolloutRayActor", "rollout_actor:rollout_actor",
        "cpu or perturbation or reproducible or sampling_mask or sampling_schedule or second_round or engine_limits",
        "sha:6bda23ee4983", "gives vLLM the spec, requests their seeds, each response its record; syncs by file"),
    _seam(_EXPERIENCE, "RemoteExperienceMaker", "experience_maker:experience_maker",
        "perturbation or advantage or credit or policy_noise or sampling_mask or sampling_schedule or report_groups"
        " or second_round or correction_warmup", "sha:351a52599ac6",
        "measures the rollout, and has advantages of its own"),
    _seam(_EXPERIENCE, "compute_reward", "step_advantages:compute_reward", "advantage", "import",
        "takes each micro batch's values of the estimator"),
    _seam(_ACTOR, "PolicyModelActor", "model_actors:policy_model_actor",
        "perturbation or credit or policy_noise or sampling_mask", "sha:8d664f8c8592",
        "its log-probabilities are of the replayed history, and among the tokens that sampling left"),
    _seam(_LAUNCHER, "ReferenceModelActor", "model_actors:reference_model_actor", "perturbation or sampling_mask",
        "sha:871e4cda19c1", "the same, through its own embedding"),
    _seam(_ACTOR, "ActorPPOTrainer", "actor_trainer:actor_trainer",
        "cpu or perturbation or reproducible or policy_noise or sampling_mask or second_round or credit_in_loss",
        "sha:afd1137caf53", "the forward that is differentiated replays; its loss; the weight sync"),
    # ---- functions around them --------------------------------------------------------------------
    _seam(_MODEL, "Actor.__init__", "model_actors:actor_init", "perturbation", "sha:ed617cb47dde",
        "a perturbation's learned parameters join the model before DeepSpeed wraps it"),
    _seam(_DEEPSPEED, "DeepspeedStrategy._get_model_parameters", "model_actors:get_model_parameters",
        "perturbation", "sha:c6c4dad36a87", "those parameters may have learning rates of their own"),
    _seam(_MODEL, "log_probs_from_logits", "ngrpo.trainers.common.log_probs:with_overrides",
        "perturbation or sampling_mask or credit_in_loss", "import",
        "log-probabilities are among the tokens that sampling left; a density overrides the token's; a credit sees"
        " the logits"),
    _seam("openrlhf.utils.vlm_utils", "merge_mm_train_inputs", "model_actors:merge_mm_train_inputs",
        "perturbation or sampling_mask", "sha:adfa2c8a4cd8",
        "a multimodal model's forward gets its pictures, and not our records"),
    # ---- relied upon, not replaced ----------------------------------------------------------------
    _seam(_MODEL, "Actor.forward", None, "perturbation or sampling_mask or credit", "sha:65d2a2a0e02a",
        "calls log_probs_from_logits once, on all rows of the logits, divided by the temperature, and gives their"
        " entropy"),
    _seam("openrlhf.models.loss", "PolicyLoss.forward", None, "second_round", "sha:e0e040c83640",
        "what the loss makes of log-probabilities, advantages and the rollout's log-probabilities"),
    _seam("openrlhf.models.utils", "compute_reward", None, "advantage", "sha:548aa0341385",
        "clip, KL penalty, the response's last token"),
    _seam(_DEEPSPEED, "DeepspeedStrategy.save_model", None, "perturbation", "sha:14c67be849f9",
        "saves by save_pretrained, which writes learned parameters to a file of their own"),
    _seam("openrlhf.utils.agent", "SingleTurnAgentExecutor.execute", None,
        "perturbation or reproducible or sampling_mask or sampling_schedule or second_round", "sha:e557741c5553",
        "calls generate() once per turn and returns mm_train_inputs in its response"),
    _seam("openrlhf.utils.vlm_utils", "dedup_media_tokens", None, "perturbation or reproducible or sampling_mask"
        " or sampling_schedule", "sha:c80d6c853f57", "a prompt with pictures as the engine takes it"),
    _seam("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", None, "cpu",
        "(self, weights_iterator, weights_path, is_checkpoint_format)",
        "takes the weights; plain load_weights fails on CPU, where linear weights are repacked", "vllm 0.29.0"),
)  # fmt: skip


def active(conditions: Iterable[str]) -> tuple[Seam, ...]:
    """Returns the rows whose condition holds, in the order of the table."""
    held = frozenset(conditions)
    return tuple(seam for seam in SEAMS if not held.isdisjoint(seam.when.split(" or ")))


def check(
    conditions: Iterable[str],
    seams: Iterable[Seam] | None = None,
    table: str = "ngrpo/trainers/openrlhf/seams.py",
) -> None:
    """Compares every active row, or these of the table in another file, with the installed sources, without importing.

    Raises:
        SeamMismatch: One error that lists every row that does not match, expected and found.
    """
    rows = active(conditions) if seams is None else tuple(seams)
    wrong = [(seam, state) for seam in rows if (state := state_of(seam)) != seam.upstream]
    if wrong:
        lines = [
            f"  {seam.target}\n"
            f"    expected {seam.upstream} ({seam.checked}), found {state} ({_installed(seam.module)})\n"
            f"    replaced by {seam.ours or 'nothing, only relied upon'}: {seam.why}"
            for seam, state in wrong
        ]
        releases = sorted({seam.checked.replace(" ", "==") for seam, _ in wrong})
        raise SeamMismatch(
            f"{len(wrong)} of {len(rows)} seams do not match the installed packages:\n"
            + "\n".join(lines)
            + f"\nInstall the checked release ({', '.join(releases)}), or read the new source, adapt ours "
            f"and enter the new state in {table}, as python -m {table.removesuffix('.py').replace('/', '.')} prints it."
        )


def state_of(seam: Seam) -> str:
    """Returns the state of a row's upstream code in the form that the row uses, or what is missing."""
    tree = _tree(seam.module)
    if isinstance(tree, str):
        return tree
    if seam.attribute == IMPORT:
        return "import"
    if seam.upstream == "import":
        return "import" if _imports(tree, seam.attribute) else "nothing of that name"
    node = _definition(tree, seam.attribute)
    if node is None:
        return "nothing of that name"
    if seam.upstream.startswith("("):
        if isinstance(node, ast.ClassDef):
            return "a class"
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return f"({', '.join(names)})"
    return _source_hash(require(_source(seam.module), seam.module), node)


# ---- reading upstream sources (parsing only: importing OpenRLHF takes seconds and needs flash_attn) ----


def _path(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or not spec.origin:
        return None
    base = Path(spec.origin).parent.joinpath(*rest)
    places = (base.with_suffix(".py"), base / "__init__.py") if rest else (Path(spec.origin),)
    return next((place for place in places if place.is_file()), None)


@cache
def _source(module: str) -> str | None:
    path = _path(module)
    return None if path is None else path.read_text(encoding="utf-8")


@cache
def _tree(module: str) -> ast.Module | str:
    source = _source(module)
    return f"no module {module}" if source is None else ast.parse(source)


def _definition(tree: ast.AST, dotted: str) -> _Definition | None:
    node: ast.AST | _Definition = tree
    for name in dotted.split("."):
        matches = [n for n in getattr(node, "body", []) if isinstance(n, _DEFINITIONS) and n.name == name]
        if not matches:
            return None
        node = matches[-1]
    return node if isinstance(node, _DEFINITIONS) else None


def _imports(tree: ast.Module, name: str) -> bool:
    return any(
        alias.asname == name or (alias.asname is None and alias.name == name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    )


def _source_hash(source: str, node: _Definition) -> str:
    # The text and not the tree: ast.dump differs between Python versions.
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = [line.rstrip() for line in source.splitlines()[start - 1 : node.end_lineno]]
    return "sha:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _installed(module: str) -> str:
    top = module.split(".")[0]
    names = packages_distributions().get(top, [top])
    try:
        return f"{names[0]} {version(names[0])}"
    except PackageNotFoundError:
        return f"{top} is not installed"


def main(write: Callable[[str], object] = print) -> int:
    """Prints the table with the state found; returns 1 if a row does not match."""
    wrong = 0
    for seam in SEAMS:
        state = state_of(seam)
        wrong += state != seam.upstream
        mark = "ok " if state == seam.upstream else "NOT"
        write(f"{mark} [{seam.when}] {seam.target} -> {seam.ours}: {seam.why} ({seam.checked}: {state})")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
