# SPDX-License-Identifier: Apache-2.0
"""Runs examples/explore.ipynb and writes its outputs into it; what the libraries print on stderr is left out.

python -m benchmarks.notebook    # `make notebook` installs what it needs first

A fast test fails where a cell has no output of its own, as after a change of the notebook.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "explore.ipynb"
_SECONDS = 600  # of one cell, of which the engine's start takes most


def run(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in a fresh kernel; ``CellExecutionError`` for one that raises."""
    metadata = notebook.metadata.copy()
    NotebookClient(notebook, timeout=_SECONDS, record_timing=False).execute()
    notebook.metadata = metadata  # the kernel adds the machine's release of Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    """Runs the notebook in place."""
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    run(notebook)
    nbformat.write(notebook, NOTEBOOK)
    print(NOTEBOOK)


if __name__ == "__main__":
    main()
