"""`python -m tests.bench`: the developers' benchmarks and long runs, one a line."""

from __future__ import annotations

import ast
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Each benchmark's module or package, and the first sentence of its docstring; nothing is imported for that."""
    found = {}
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.glob("*/__init__.py")]):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        command, _, purpose = docstring.partition("\n\n")[0].replace("\n", " ").partition("`: ")
        if command.startswith("`python -m tests.bench."):
            found[command.removeprefix("`python -m tests.bench.")] = purpose
    return found


if __name__ == "__main__":
    print("usage: python -m tests.bench.NAME ...      --help tells its flags\n")
    for name, purpose in benchmarks().items():
        print(f"  {name:<16} {purpose}")
