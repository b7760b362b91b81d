# SPDX-License-Identifier: Apache-2.0
"""What has moved in another vLLM? Its sources are read, so that it need not run on this machine.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl '*.py' -d other
    python -m benchmarks.surface other [BEFORE]

For each definition of vLLM that is wrapped or replaced: as it was, another body, other parameters, or gone, beside the
installed vLLM or the sources in BEFORE. For OpenRLHF `python -m ngrpo.trainers.openrlhf.seams` says the same, with
the other sources first in PYTHONPATH. That nothing has moved is no proof that it works: that takes `make matrix`.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROLLOUT = Path(__file__).resolve().parents[1] / "ngrpo" / "rollout"
# What the two adapters replace on a runner or its sampler (runner_v1.py, runner_v2.py, attach.py).
OF_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._preprocess"),
    ("vllm.v1.sample.sampler", "Sampler.sample"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.add_requests"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.prepare_inputs"),
    ("vllm.v1.worker.gpu.sample.sampler", "Sampler.sample"),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"),
)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def hooks() -> list[tuple[str, str]]:
    """Module and name of each definition that is wrapped or replaced; the plugin's are read from its source."""
    calls = (n for n in ast.walk(ast.parse((ROLLOUT / "plugin.py").read_text("utf-8"))) if isinstance(n, ast.Call))
    named = (call.args[:2] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "_wrap")
    pairs = [(m.value, n.value) for m, n in named if isinstance(m, ast.Constant) and isinstance(n, ast.Constant)]
    return list(dict.fromkeys([*pairs, *OF_RUNNERS]))


def definition(root: Path, module: str, name: str) -> Definition | None:
    """A definition in the sources below a folder; None where there is none."""
    path = root.joinpath(*module.split("."))
    file = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
    node: ast.AST | None = _parsed(file) if file else None
    for part in name.split("."):
        inside = getattr(node, "body", [])
        node = next((n for n in reversed(inside) if isinstance(n, Definition) and n.name == part), None)
    return node  # type: ignore[return-value]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def moved(before: Definition | None, after: Definition | None) -> str:
    """How a definition differs."""
    if after is None:
        return "gone" if before is not None else "in neither"
    if before is None:
        return "new"
    if ast.dump(before) == ast.dump(after):
        return "as it was"
    parameters = [ast.unparse(each.args) for each in (before, after) if not isinstance(each, ast.ClassDef)]
    return "other parameters" if len(set(parameters)) > 1 else "another body"


def lines(before: Path, after: Path) -> Iterator[str]:
    """A line for each definition."""
    for module, name in hooks():
        both = (definition(root, module, name) for root in (before, after))
        yield f"{moved(*both):17} {module}.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("after", type=Path, help="folder with the other release's folder vllm/")
    parser.add_argument("before", type=Path, nargs="?", help="likewise; the installed vLLM where it is left out")
    options = parser.parse_args()
    before = options.before
    if before is None:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            parser.error("no vLLM is installed: give the sources to compare with")
        before = Path(spec.origin).parents[1]
    print("\n".join(lines(before, options.after)))


if __name__ == "__main__":
    main()
