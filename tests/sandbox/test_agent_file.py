"""The agent is bound into images that are not ours."""

import ast
import sys
from pathlib import Path

from sandfleet.fleet.sandbox_agent import agent

TREE = ast.parse(Path(agent.__file__).read_text(), feature_version=(3, 9))


def test_it_imports_the_standard_library_only():
    names = {alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_its_syntax_is_that_of_python_3_9():
    """Red with ``match`` or parenthesised context managers; unions in annotations are never evaluated."""
    assert TREE.body
    first = next(node for node in TREE.body if isinstance(node, ast.ImportFrom))
    assert first.module == "__future__"
    assert [alias.name for alias in first.names] == ["annotations"]
