# SPDX-License-Identifier: Apache-2.0
"""What has moved in another vLLM? Its sources are read, so that it need not run on this machine.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl '*.py' -d other
    python -m benchmarks.surface other [BEFORE]

For each row of `ngrpo.patches.VLLM`: as it was, another body, other parameters, or gone, compared with the installed
vLLM or the sources in BEFORE; and NOT where the row does not match (``python -m ngrpo.patches other`` prints those
states). That nothing has moved is no proof that it works: that takes `make matrix`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command_line import parser_of
from ngrpo.machine.upstream.patch import Definition, Patch, definition, source_of
from ngrpo.patches import VLLM


def moved(before: Definition | None, after: Definition | None) -> str:
    """How a definition differs."""
    if after is None:
        return "gone" if before is not None else "in neither"
    if before is None:
        return "new"
    if ast.dump(before) == ast.dump(after):
        return "as it was"
    if isinstance(before, ast.ClassDef) or isinstance(after, ast.ClassDef):
        return "another body"
    if ast.unparse(before.args) != ast.unparse(after.args):
        return "other parameters"
    return "another body"


def lines(before: Path | None, after: Path) -> Iterator[str]:
    """A line for each row; a name that its module merely imports has none.

    Args:
        before: folder with one release's sources; None for the installed one.
        after: folder with another release's sources.
    """
    for row in VLLM:
        if row.upstream == "import":
            continue
        mark = "   " if row.state(after) == row.upstream else "NOT"
        change = moved(_definition_of(row, before), _definition_of(row, after))
        yield f"{mark} {change:17} {row.target}"


def _definition_of(row: Patch, root: Path | None) -> Definition | None:
    source = source_of(row.module, root)
    return None if source is None else definition(ast.parse(source), row.attribute)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("after", type=Path, help="folder with the other release's folder vllm/")
    parser.add_argument("before", type=Path, nargs="?", help="another one; the installed vLLM where it is left out")
    options = parser.parse_args()
    if options.before is None and source_of("vllm") is None:
        parser.error("no vLLM is installed: give the sources to compare with")
    print("\n".join(lines(options.before, options.after)))


if __name__ == "__main__":
    main()
