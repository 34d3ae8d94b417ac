"""The documents name what the code has: settings, commands, reasons, files, make targets."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from engine_patches.settings import IMAGE, SUPPORTED
from proxy.bench.menu import BENCHMARKS
from proxy.cli import COMMANDS
from proxy.observability.reasons import REASON_TEXT
from proxy.settings import Settings
from proxy.version import version
from tests.harness import settings_table

ROOT = Path(__file__).parents[2]

README = (ROOT / "README.md").read_text()
GATEWAY = (ROOT / "proxy" / "README.md").read_text()

FOLDERS = ("proxy", "engine_patches", "deploy", "grafana", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])

# Where code may have a file that a document names without its folder.
ROOTS = (ROOT, ROOT / "deploy")


def heading_anchors(text: str) -> set[str]:
    """The anchors that a Markdown viewer gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_version_in_the_changelog_has_its_date():
    unreleased, *released = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    told = [re.fullmatch(r"(\d+\.\d+\.\d+) \((20\d\d-\d\d-\d\d)\)", heading) for heading in released]
    assert unreleased == "Unreleased" and all(told)
    newest_first = [(date.fromisoformat(each[2]), each[1]) for each in told if each]
    assert newest_first == sorted(newest_first, reverse=True) and newest_first[0][1] == version()


def test_the_versions_of_vllm_that_are_kept_are_the_three_that_the_code_names():
    policy = (ROOT / "engine_patches" / "README.md").read_text().partition("### How long a version is kept")[2]
    assert f"The three newest minor releases of vLLM, today {SUPPORTED}." in " ".join(policy.split())
    first, last = (int(each.removeprefix("0.")) for each in SUPPORTED.split(" to "))
    assert last - first == 2 and f"vLLM {SUPPORTED} (" in README and IMAGE.endswith(f"v0.{last}.0")


def test_settings_are_described_as_in_the_code():
    table, example = settings_table.DOCUMENT.read_text(), settings_table.EXAMPLE.read_text()
    assert settings_table.BEGIN in table and settings_table.LIMITS_BEGIN in table
    assert table == settings_table.with_table(table), "run: python -m tests.harness.settings_table"
    assert example == settings_table.with_comments(example), "run: python -m tests.harness.settings_table"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_described_with_its_default(name):
    row = next(line for line in GATEWAY.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1])
    default = Settings.model_fields[name].get_default()
    if isinstance(default, float):
        default = f"{default:g}"
    elif isinstance(default, tuple):
        default = ",".join(default)
    assert name == "worker" or re.search(rf"\b{re.escape(str(default).lower())}\b", row)
    assert len(row.split("|")[3].strip()) > 10


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_described(name):
    assert f"`seamark {name} " in README


@pytest.mark.parametrize("reason", sorted(set(REASON_TEXT) - {"hit"}))
def test_every_reason_is_described(reason):
    assert f"| `{reason}` |" in GATEWAY


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            assert file.exists(), target
            assert not anchor or anchor in heading_anchors(file.read_text()), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_are_there(document):
    named = re.findall(
        r"`((?:proxy|engine_patches|tests|deploy|grafana)/[\w./-]+|[\w./-]+\.(?:py|yaml|sh))`", document.read_text()
    )
    missing = [name for name in named if not any((root / name).exists() for root in (*ROOTS, document.parent))]
    assert not [name for name in missing if not any(any((ROOT / folder).rglob(name)) for folder in FOLDERS)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_document_names_are_there(document):
    text = document.read_text()
    if document.name == "CHANGELOG.md":
        text = text.partition("\n## 0.")[0]  # what a release had may be gone
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= set(targets)
    commands = re.findall(r"(?:^|`|bin/)seamark ([a-z][a-z-]*)", text, re.M)
    assert set(commands) <= set(COMMANDS)
    benchmarks = re.findall(r"(?:^|`)seamark bench ([a-z][a-z-]*)", text, re.M)
    assert set(benchmarks) <= set(BENCHMARKS)
    for module in re.findall(r"python3? -m (tests(?:\.[a-z_]+)*)(?![\w.])", text):
        file = ROOT.joinpath(*module.split("."))
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module
