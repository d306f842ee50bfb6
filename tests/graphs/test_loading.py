"""Loading graphs from langgraph.json, in all the forms that the LangGraph CLI takes."""

import subprocess
import sys
from pathlib import Path

import pytest

from sandfleet.fleet.graphs.loading import load_graphs
from sandfleet.fleet.graphs.project import read_project
from sandfleet.shared.errors import GraphLoadError

PROJECTS = Path(__file__).parent.parent / "projects"

GRAPH = """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph

class State(TypedDict, total=False):
    x: int

builder = StateGraph(State)
builder.add_node("n", lambda s: {"x": 1})
builder.add_edge(START, "n")
builder.add_edge("n", END)
graph = builder.compile()

def make(): return builder
async def make_async(config): return graph
number = 7
"""


@pytest.fixture
def project(tmp_path):
    """Writes a project; returns a function that loads it from the given ``graphs`` mapping."""

    def write(graphs, **more):
        import json

        name = f"agent_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(GRAPH)
        (tmp_path / "langgraph.json").write_text(
            json.dumps(
                {
                    "dependencies": ["."],
                    "graphs": {k: v.replace("AGENT", name) for k, v in graphs.items()},
                    **more,
                }
            )
        )
        return load_graphs(read_project(tmp_path / "langgraph.json"))

    path = list(sys.path)
    yield write
    sys.path[:] = path


@pytest.mark.parametrize(
    "spec",
    ["./AGENT.py:graph", "AGENT:graph", "./AGENT.py:builder", "./AGENT.py:make", "./AGENT.py:make_async"],
)
async def test_every_form_gives_a_graph_that_runs(project, spec):
    """Red when one of the forms is not understood."""
    graphs = project({"g": spec})
    async with graphs["g"].open({"configurable": {}}) as graph:
        assert await graph.ainvoke({}) == {"x": 1}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./AGENT.py", "not of the form"),
        ("./AGENT.py:nothing", "has no 'nothing'"),
        ("./missing.py:graph", "There is no"),
        ("no_such_module:graph", "importing 'no_such_module' failed"),
        ("./AGENT.py:number", "is a int"),
    ],
)
def test_what_cannot_be_loaded_is_named(project, spec, message):
    """Red when the error does not tell the user which graph and why."""
    with pytest.raises(GraphLoadError, match=message):
        project({"g": spec})


def test_a_project_may_have_packages_named_like_ours(tmp_path):
    """Red when our folders are importable as ``shared`` and ``functions`` and shadow the user's."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from sandfleet.fleet.graphs.loading import load_graphs\n"
        "from sandfleet.fleet.graphs.project import apply_environment, read_project\n"
        "project = read_project(Path(sys.argv[1]))\n"
        "apply_environment(project)\n"
        "graphs = load_graphs(project)\n"
        "async def main():\n"
        "    async with graphs['greeter'].open({}) as graph:\n"
        "        print(await graph.ainvoke({'name': 'Ada'}))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PROJECTS / "own_shared" / "langgraph.json")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ada" in done.stdout


def test_the_environment_file_of_a_project_is_read():
    """Red when ``env`` is ignored."""
    assert read_project(PROJECTS / "own_shared" / "langgraph.json").environment()


def test_a_missing_environment_file_is_said(tmp_path):
    """Red when the graph starts without the variables that it needs."""
    (tmp_path / "langgraph.json").write_text('{"graphs": {"g": "./g.py:g"}, "env": ".env"}')
    with pytest.raises(GraphLoadError, match="there is no such file"):
        read_project(tmp_path / "langgraph.json").environment()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "it must be a JSON object"),
        ("{}", r"graphs: Field required\.$"),
        ('{"graphs": {"g": 5}}', r"graphs\.g: Input should be a valid string\.$"),
        ('{"graphs": {"g": "./g.py"}}', "not of the form"),
        ('{"graphs": {"g": "./g.py:g"}}', "There is no .*/g.py"),
        ('{"graphs": {"g": "os:path"}, "dependencies": ["./lib"]}', "dependency .*/lib"),
        ('{"graphs": {"g": "os:path"}, "env": "own.env"}', "own.env"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_in_one_line_before_anything_is_imported(tmp_path, text, said):
    """Red when a mistake waits for an executor, or is told as pydantic does, over several lines with its types."""
    (tmp_path / "langgraph.json").write_text(text)
    with pytest.raises(GraphLoadError, match=said) as refused:
        read_project(tmp_path / "langgraph.json").check_paths()
    assert "\n" not in str(refused.value)
