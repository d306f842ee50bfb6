"""The agent is bound into images that are not ours."""

import ast
import sys
from pathlib import Path

import pytest

from sandfleet.fleet import sandbox_agent

MODULES = sorted(Path(sandbox_agent.__file__).parent.glob("*.py"))


@pytest.fixture(params=MODULES, ids=lambda path: path.stem)
def tree(request):
    return ast.parse(request.param.read_text(), feature_version=(3, 9))


def test_it_imports_the_standard_library_only(tree):
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_its_syntax_is_that_of_python_3_9(tree):
    """Red with ``match`` or parenthesised context managers; unions in annotations are never evaluated."""
    assert tree.body
    first = next((node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))), None)
    if first is not None:
        assert first.module == "__future__"
        assert [alias.name for alias in first.names] == ["annotations"]


def test_it_loads_no_typing(tree):
    """Red with an import of ``typing`` that is not for type checkers only: half a MiB in each idle sandbox."""
    assert not [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in ("typing", "collections.abc")
    ]
