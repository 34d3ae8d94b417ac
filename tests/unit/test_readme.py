"""The documents name what the code has, and the code has one meaning for a type's name and one way to read JSON."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from datetime import date
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine_patches.settings import IMAGE, SUPPORTED
from proxy import errors
from proxy.bench.menu import BENCHMARKS
from proxy.cli import COMMANDS
from proxy.errors import GatewayError
from proxy.version import version
from tests.harness import documented

ROOT = Path(__file__).parents[2]

README = (ROOT / "README.md").read_text()
FOLDERS = ("proxy", "engine_patches", "deploy", "grafana", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def anchors(document: Path) -> set[str]:
    """Those that a Markdown viewer gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_version_in_the_changelog_has_its_date():
    unreleased, *released = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    told = [re.fullmatch(r"(\d+\.\d+\.\d+) \((20\d\d-\d\d-\d\d)\)", heading) for heading in released]
    assert unreleased == "Unreleased" and all(told)
    newest_first = [(date.fromisoformat(each[2]), each[1]) for each in told if each]
    assert newest_first == sorted(newest_first, reverse=True)
    assert (newest_first[0][1] == version()) != (".dev" in version())


def test_the_versions_of_vllm_that_are_kept_are_the_three_that_the_code_names():
    policy = (ROOT / "engine_patches" / "README.md").read_text().partition("### How long a version is kept")[2]
    assert f"The three newest minor releases of vLLM, today {SUPPORTED}." in " ".join(policy.split())
    first, last = (int(each.removeprefix("0.")) for each in SUPPORTED.split(" to "))
    assert last - first == 2 and f"vLLM {SUPPORTED} (" in README and IMAGE.endswith(f"v0.{last}.0")


def test_settings_and_reasons_are_described_as_in_the_code():
    for path, written in documented.WRITTEN.items():
        assert path.read_text() == written(path.read_text()), "run: python -m tests.harness.documented"


def test_every_command_is_described():
    assert [name for name in COMMANDS if f"`seamark {name} " not in README] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_are_there(document):
    named = re.findall(
        r"`((?:proxy|engine_patches|tests|deploy|grafana)/[\w./-]+|[\w./-]+\.(?:py|yaml|sh))`", document.read_text()
    )
    missing = [
        name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "deploy", document.parent))
    ]
    assert not [name for name in missing if not any(any((ROOT / folder).rglob(name)) for folder in FOLDERS)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_document_names_are_there(document):
    text = document.read_text()
    if document.name == "CHANGELOG.md":
        text = text.partition("\n## 0.")[0]  # what a release had may be gone
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= set(targets)
    assert set(re.findall(r"(?:^|`|bin/)seamark ([a-z][a-z-]*)", text, re.M)) <= set(COMMANDS)
    assert set(re.findall(r"(?:^|`)seamark bench ([a-z][a-z-]*)", text, re.M)) <= set(BENCHMARKS)
    for module in re.findall(r"python3? -m (tests(?:\.[a-z_]+)*)(?![\w.])", text):
        file = ROOT.joinpath(*module.split("."))
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

WAYS = ("The way of a body", "The way of a state")


def section(heading: str) -> str:
    """What stands under a heading."""
    return CONTRIBUTING.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def steps(heading: str) -> list[str]:
    """What each step of a path names: files, and behind each one its functions."""
    lines = re.findall(r"^\d+\. (.+(?:\n +.+)*)", section(heading), re.M)
    return [" ".join(re.findall(r"`([^`]+)`", line.partition("`:")[0] + "`")) for line in lines]


def definitions(file: str) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`. Read, not imported: the plugin needs vLLM."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def imports(file: str) -> set[str]:
    """Files that a file imports, or a name of."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return {f"{module.replace('.', '/')}.py" for module in found if module}


@pytest.mark.parametrize("heading", WAYS)
def test_a_way_is_twelve_files_with_what_they_name_and_each_leads_to_the_next_by_an_import(heading):
    files: list[str] = []
    for file, *names in (step.split() for step in steps(heading)):
        assert names and set(names) <= definitions(file)
        assert not files or any(file in imports(each) or each in imports(file) for each in files), file
        files.append(file)
    assert len(files) == len(set(files)) == 12


@pytest.mark.parametrize("package", ["proxy", "engine_patches"])
def test_the_table_lists_the_rooms_in_the_order_of_their_layers(package):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == [package])
    declared = [name for layer in layers for name in layer.split(" | ") if (ROOT / package / name).is_dir()]
    table = section("Where things are").partition(f"| `{package}/`")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)/` \|", table, re.M) == declared


DEFENCES = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if "`tests/" in line]


@pytest.mark.parametrize("row", DEFENCES)
def test_each_defence_has_the_tests_that_are_named(row):
    named = re.findall(r"`(tests/\S+\.py)`((?:,? `[tT]est_?\w+`)+)", row)
    assert named and len(DEFENCES) > 15
    for file, tests in named:
        source = (ROOT / file).read_text()
        for test in re.findall(r"\w+", tests):  # a function, or a machine's class
            assert re.search(rf"^(?:(?:async )?def {test}\(|{test} = )", source, re.M), f"{file} has no {test}"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]

LOCKED = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines()]


@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_asked_for_is_locked_in_a_version_that_will_do(wanted):
    requirement = Requirement(wanted)
    name = canonicalize_name(requirement.name)
    locked = [str(each.specifier).removeprefix("==") for each in LOCKED if canonicalize_name(each.name) == name]
    assert locked and all(requirement.specifier.contains(each, prereleases=True) for each in locked)
    assert all(re.fullmatch(r"==[^,*]+", str(each.specifier)) and each.url is None for each in LOCKED)


def test_the_modules_docstring_names_each_error_with_its_status():
    tree = [GatewayError]
    for each in tree:  # which grows
        tree += each.__subclasses__()
    drawn: dict[str, int] = {}
    status = 0
    for name, number in re.findall(r"\b([A-Z]\w*[a-z]\w*)(?: (\d{3}))?", errors.__doc__.split("\n\n", 1)[1]):
        status = int(number or status)  # that of the one before it, where none stands beside the name
        drawn[name] = status
    assert drawn == {each.__name__: each.status for each in tree}


# Which read JSON otherwise, and why they may.
OWN = {
    "commands/setup.py": "what pip notes of this installation",
    "http/json_body.py": "`loads` itself",
    "pipeline/cacheable.py": "`is_final` calls what reads events, and catches both",
}


def guarded(tree: ast.AST) -> set[ast.Call]:
    """Calls of `json.loads` in a `try`, or a `with suppress`, for both."""
    found: set[ast.Call] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            kinds, body = [ast.unparse(each.type) if each.type else "Exception" for each in node.handlers], node.body
        elif isinstance(node, ast.With):
            kinds, body = [ast.unparse(each.context_expr) for each in node.items], node.body
        else:
            continue
        if "Exception" in kinds or all(error in " ".join(kinds) for error in ("RecursionError", "ValueError")):
            found |= {call for each in body for call in calls(each)}
    return found


def calls(tree: ast.AST) -> set[ast.Call]:
    return {node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads"}


def test_json_of_others_is_read_where_all_that_a_reader_raises_is_caught():
    """`ValueError`, also for a number of more than 4,300 digits, and `RecursionError` for what is nested too deep."""
    modules = [path for path in (ROOT / "proxy").rglob("*.py") if "bench" not in path.parts]
    assert len(modules) > 80
    for path in modules:
        tree = ast.parse(path.read_text())
        if str(path.relative_to(ROOT / "proxy")) not in OWN:
            assert [ast.unparse(call) for call in calls(tree) - guarded(tree)] == [], path


def defined(tree: ast.Module) -> set[str]:
    """Classes, and aliases of types, without a leading underscore."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {name for name in names if name[0].isupper() and not name.isupper()}
    return {name.lstrip("_") for name in found}


def test_no_two_types_have_one_name():
    where = defaultdict(set)
    for half in ("proxy", "engine_patches"):
        for path in (ROOT / half).rglob("*.py"):
            for name in defined(ast.parse(path.read_text())):
                where[name].add(path.relative_to(ROOT).as_posix())
    twice = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    assert not twice
