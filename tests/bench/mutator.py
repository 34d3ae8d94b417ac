"""Small mistakes in a module's source, and a draw of them over both packages: the same ones from the same seed.

After mutation testing's usual operators (PIT, cosmic-ray), without those that nearly any test notices.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

# What is drawn of each operator; counts are kept over a package, since a module gives one or two mistakes.
MIX = {
    "drop statement": 33, "off by one": 29, "drop operand": 26, "compare": 22, "and/or": 22, "bool": 20,
    "drop except": 10, "min/max": 9, "arithmetic": 9, "any/all": 9, "drop continue": 8, "drop finally": 5,
    "constant": 5, "drop raise": 4, "continue->break": 3, "while->if": 2, "drop break": 2,
}  # fmt: skip

# Of 100 mistakes, by what there is of each package.
SHARES = {"proxy": 65, "engine_patches": 35}

# Measuring tools, a constant, tables of toy models, a main program.
LEFT_OUT = ("proxy/bench/", "proxy/version.py", "engine_patches/gpu_check/", "engine_patches/commands/model.py")

# Calls whose absence or arguments only a log shows.
SAID = {
    "info", "warning", "error", "debug", "exception", "Counter", "Gauge", "Histogram", "field", "TypeVar", "suppress",
}  # fmt: skip

_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
COMPARED = {**dict(_PAIRS), **{new: old for old, new in _PAIRS}}

SIGNS = {
    ast.Add: "+-", ast.Sub: "-+", ast.FloorDiv: ("//", "*"), ast.Mult: "*/", ast.Div: "/*",
    ast.Mod: "%*", ast.BitOr: "|&", ast.BitAnd: "&|",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A module with one mistake. `line` is the first and `end` the last line that differs, counted from 1."""

    file: str
    line: int
    end: int
    function: str
    operator: str
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        return f"{self.file} {self.function} | {self.operator} | {self.old} => {self.new}"


class _Mistakes(ast.NodeVisitor):
    """Collects the mutants of one module."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.raw, self.function = file, text.encode(), ""
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.raw.split(b"\n"))]
        self.found: list[Mutant] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        begin = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.raw[begin:end].decode()

    def add(self, operator: str, node: ast.AST, new: str, place: tuple[int, int] | None = None) -> None:
        begin, end = place or self.span(node)
        old = self.raw[begin:end].decode()
        source = (self.raw[:begin] + new.encode() + self.raw[end:]).decode()
        if old == new:
            return
        line, last = (self.raw.count(b"\n", 0, at) + 1 for at in (begin, end))
        short = [" ".join(each.split())[:160] for each in (old, new)]
        self.found.append(Mutant(self.file, line, last, self.function, operator, *short, source))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            outer, self.function = self.function, f"{self.function}.{node.name}".lstrip(".")
            defaults = [] if isinstance(node, ast.ClassDef) else [*node.args.defaults, *node.args.kw_defaults]
            for child in (*node.body, *filter(None, defaults)):
                self.visit(child)
            self.function = outer
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
            return
        if self._is_text(node):
            return
        super().visit(node)  # by the node's type, if it has an operator
        if not isinstance(node, (ast.Raise, ast.Constant)):
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def generic_visit(self, node: ast.AST) -> None:
        """No operator of its own; `visit` goes into its children."""

    @staticmethod
    def _is_text(node: ast.AST) -> bool:
        """A docstring, a log line, a text with fields, a metric's declaration."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return (
            isinstance(node, ast.JoinedStr)
            or (called is not None and name in {*SAID, "NewType"})
            or (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Attribute)
                and node.value.func.attr in SAID
                and getattr(node.value.func.value, "id", "") == "logger"
            )
        )

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("drop raise", node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        if name in ("max", "min"):
            self.add("min/max", node.func, "min" if name == "max" else "max")
        if name in ("any", "all"):
            self.add("any/all", node.func, "all" if name == "any" else "any")

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            ops = [*node.ops[:at], COMPARED[type(operator)](), *node.ops[at + 1 :]]
            self.add("compare", node, ast.unparse(ast.Compare(node.left, ops, node.comparators)))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add("and/or", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        for at in range(len(node.values)):
            rest = node.values[:at] + node.values[at + 1 :]
            self.add("drop operand", node, f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))})")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        for side in (node.left, node.right):
            number = isinstance(side, ast.Constant) and isinstance(side.value, (int, float))
            if isinstance(side, (ast.Constant, ast.JoinedStr)) and not number:
                return
        if type(node.op) in SIGNS and self.function:
            place = self.span(node.left)[1], self.span(node.right)[0]
            sign, new = SIGNS[type(node.op)]
            between = self.raw[slice(*place)].decode()
            if sign in between:
                self.add("arithmetic", node, between.replace(sign, new, 1), place)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("bool", node, str(not node.value))
        elif isinstance(node.value, int):
            self.add("off by one", node, str(node.value + 1))
            if node.value > 0:
                self.add("off by one", node, str(node.value - 1))
        elif isinstance(node.value, float):
            self.add("constant", node, repr(node.value * 2 or 1.0))

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.add("while->if", node.test, f"not ({self.text(node.test)})")

    def drop(self, node: ast.AST) -> None:
        self.add("drop statement", node, "pass")

    visit_AugAssign = visit_Delete = drop

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)):
            self.drop(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        kept = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        if kept and self.function and not self.function.endswith("__init__"):
            self.drop(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("continue->break", node, "break")
        self.add("drop continue", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add("drop break", node, "pass")

    def visit_Try(self, node: ast.Try) -> None:
        for handler in node.handlers:
            place = self.span(handler.body[0])[0], self.span(handler.body[-1])[1]
            self.add("drop except", handler, "raise", place)
        if node.finalbody:
            place = self.span(node.finalbody[0])[0], self.span(node.finalbody[-1])[1]
            self.add("drop finally", node.finalbody[0], "pass", place)


@functools.cache
def mutants_in(root: Path, file: str) -> list[Mutant]:
    """All mistakes of one module, in the order of its source; some are no Python."""
    mistakes = _Mistakes(file, (root / file).read_text())
    for node in ast.parse(mistakes.raw).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            mistakes.visit(node)
    return mistakes.found


def _modules(root: Path, package: str) -> Iterator[str]:
    for path in sorted((root / package).rglob("*.py")):
        file = str(path.relative_to(root))
        if path.name not in ("__init__.py", "__main__.py") and not file.startswith(LEFT_OUT):
            yield file


def _is_python(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _chosen(points: list[Mutant], count: int, rng: random.Random, drawn: Counter[str]) -> list[Mutant]:
    """`count` of a module's mistakes: of rare operators first, in different functions and lines."""
    got: list[Mutant] = []
    lines: set[int] = set()
    functions: Counter[str] = Counter()
    pool = list(points)
    rng.shuffle(pool)

    def cost(each: Mutant) -> float:
        plain = each.operator == "compare" and not any(sign in each.old for sign in "<>")
        penalty = 0.15 * functions[each.function] + (0 if each.function else 0.3) + (0.1 if plain else 0)
        return (drawn[each.operator] + rng.random()) / MIX[each.operator] + penalty

    while pool and len(got) < count:
        pool.sort(key=cost)
        best = pool.pop(0)
        if best.line not in lines and _is_python(best.source):
            got.append(best)
            lines.add(best.line)
            drawn[best.operator] += 1
            functions[best.function] += 1
    return got


def draw(root: Path, seed: int, count: int, only: tuple[str, ...] = ()) -> list[Mutant]:
    """`count` mistakes over both packages, or over the modules that begin as `only` says, by their points."""
    rng = random.Random(seed)
    result: list[Mutant] = []
    for package, share in SHARES.items():
        drawn: Counter[str] = Counter()
        found = {file: mutants_in(root, file) for file in _modules(root, package) if file.startswith(only or "")}
        total, seen, at = sum(map(len, found.values())), 0, rng.random()
        wanted = count if len({each.split("/")[0] for each in only}) == 1 else round(count * share / 100)
        for points in found.values():
            low, high = seen * wanted / total, (seen + len(points)) * wanted / total
            seen += len(points)
            result += _chosen(points, sum(low <= each + at < high for each in range(wanted)), rng, drawn)
    rng.shuffle(result)
    return result


def those_named(root: Path, names: Container[str]) -> list[Mutant]:
    """The mistakes that print themselves so and that the tree still has, one for each name."""
    found = {
        str(each): each for package in SHARES for file in _modules(root, package) for each in mutants_in(root, file)
    }
    return [each for name, each in found.items() if name in names]
