# SPDX-License-Identifier: Apache-2.0
"""What a release consists of: one version, a wheel that is whole, its citation, the files for readers and robots."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import ngrpo
import perturbations
from ngrpo.config.kinds import FLAGS

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("perturbations", "ngrpo")
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


def test_there_is_one_version() -> None:
    assert ngrpo.__version__ is perturbations.__version__
    stated = [path.name for path in (ROOT / "ngrpo").rglob("*.py") if "ersion__ = " in path.read_text()]
    assert stated == [], "setup.py reads it, and nothing states another"
    assert citation()["version"] == perturbations.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders in its source."""
    copy = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(copy)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file())
    wanted = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    assert inside == wanted


@pytest.mark.more
def test_the_wheel_installs_and_runs_where_nothing_else_is(wheel: Path, tmp_path: Path) -> None:
    """Importing, `ngrpo --version` and `ngrpo --help` need no other package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = tmp_path / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    asked = "import ngrpo, perturbations, importlib.metadata as m; print(ngrpo.__file__, m.version('ngrpo'))"

    def told(*words: str) -> str:
        """Without the variables that would lead to the source tree."""
        return subprocess.run(words, check=True, capture_output=True, text=True, env={}, cwd=tmp_path).stdout

    file, version = told(str(python), "-c", asked).split()
    assert Path(file).is_relative_to(tmp_path)
    assert version == perturbations.__version__
    assert told(str(tmp_path / "bin" / "ngrpo"), "--version").strip() == f"ngrpo {perturbations.__version__}"
    assert told(str(tmp_path / "bin" / "ngrpo"), "--help").startswith("usage: ngrpo")


def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_every_paper_that_is_named_is_cited() -> None:
    papers = {ARXIV.search(paper["url"])[0]: paper for paper in citation()["references"]}
    assert len(papers) == len(citation()["references"])
    for number, paper in papers.items():
        assert paper["type"] == "article" and paper["title"] and paper["authors"] and paper["year"], number
        assert paper["identifiers"][0] == {"type": "other", "value": f"arXiv:{number}"}
    classes = [kept.get(name) for kept in FLAGS for name in kept.in_tree()]
    registered = {number for cls in classes for number in ARXIV.findall(getattr(cls, "paper", ""))}
    assert len(registered) > 15
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    named = {number for text in texts for number in ARXIV.findall(text)}
    missing = (registered | named) - set(papers)
    assert not missing, f"not in CITATION.cff: {sorted(missing)}"


def test_llms_txt_knows_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert not pages - set(re.findall(r"\(([^)]+)\)", text))
