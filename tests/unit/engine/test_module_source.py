"""What a module defines is read as `inspect` would tell it, and nothing of the module runs."""

from __future__ import annotations

import importlib
import inspect
import py_compile
import sys

import pytest

from engine_patches import module_source

SOURCE = '''
import functools

raise_when_run = 1 / 0


def greet(name, /, loud=False, *rest, tone, **options):
    """Say hello."""
    quiet = not loud
    return (
        "hello " + name,
        quiet,
    )


class Engine(dict):
    limit: int = 3

    @functools.cache
    def step(self, tokens, *, stop=None):
        def inner(other):
            return other

        return inner(tokens)

    @classmethod
    async def make(cls):
        pass

    class Inner:
        def deep(self): return "deep"


if len(greet.__name__) > 3:

    def twice(first): return "first"

else:

    def twice(second): return "second"


alias = greet
'''

PATHS = ("greet", "Engine", "Engine.step", "Engine.make", "Engine.Inner.deep")


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    """Packages with a module `toy` each: `toys_below` fails if any of it runs, `toys_that_run` does not."""
    for package, source in (
        ("toys_below", SOURCE),
        ("toys_that_run", SOURCE.replace("1 / 0", "1")),
    ):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("raise AssertionError\n" if package == "toys_below" else "")
        (folder / "toy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    module_source.forget()
    for name in [name for name in sys.modules if name.startswith(("toys_below", "toys_that_run"))]:
        del sys.modules[name]


@pytest.mark.parametrize("path", PATHS)
def test_parameters_and_source_are_those_that_inspect_tells_of_the_imported_module(path):
    (definition,) = module_source.definitions("toys_below.toy", path)
    value = importlib.import_module("toys_that_run.toy")
    for name in path.split("."):
        value = getattr(value, name)
    assert definition.source.rstrip() == inspect.getsource(value).rstrip()
    if not inspect.isclass(value):
        with_self = ["cls"] if path == "Engine.make" else []
        assert definition.parameters == ", ".join([*with_self, *inspect.signature(value).parameters])


def test_neither_the_module_nor_the_packages_above_it_are_imported():
    assert module_source.definitions("toys_below.toy", "greet")
    assert not [name for name in sys.modules if name.startswith("toys_below")]


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("toys_gone", "no such module"),
        ("toys_below.gone", "no such module"),
        ("toys_below.toy.gone", "no such module"),
        ("_weakref", "its source"),
    ],
)
def test_a_module_that_cannot_be_read_is_an_import_error(module, named):
    with pytest.raises(ImportError, match=named):
        module_source.definitions(module, "greet")


def test_a_module_that_is_there_compiled_alone_has_no_source(tmp_path):
    (tmp_path / "toys_below" / "late.py").write_text("def greet(): ...\n")
    py_compile.compile(tmp_path / "toys_below" / "late.py", tmp_path / "toys_below" / "late.pyc")
    (tmp_path / "toys_below" / "late.py").unlink()
    with pytest.raises(ImportError, match="its source"):
        module_source.definitions("toys_below.late", "greet")
