"""What ``sandfleet.toml`` may say, and what is said to those who wrote something else."""

import pytest

from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import (
    Template,
    TemplateRefused,
    Templates,
    TemplatesInvalid,
    read_templates,
    templates_beside,
)


def read(tmp_path, text: str, **settings) -> Templates:
    path = tmp_path / "sandfleet.toml"
    path.write_text(text)
    return read_templates(Settings(templates=path, **settings))


def test_without_a_file_there_is_the_template_of_the_settings(tmp_path):
    """Red when a deployment without the file gets another sandbox than its settings say."""
    project = tmp_path / "langgraph.json"
    templates = read_templates(Settings(project=project, sandbox_cpus=0.5, sandbox_memory_bytes=2**30))
    assert list(templates.templates) == ["default"]
    default = templates.templates["default"]
    assert (default.cpus, default.memory, default.network) == (0.5, 2**30, "none")
    assert templates.of_run("any graph") == "default"


def test_the_file_beside_the_project_is_read(tmp_path):
    (tmp_path / "sandfleet.toml").write_text("[templates.big]\ncpus = 4\n")
    project = tmp_path / "langgraph.json"
    assert set(read_templates(Settings(project=project)).templates) == {"default", "big"}
    assert templates_beside(project) == tmp_path / "sandfleet.toml"


def test_what_a_template_leaves_out_comes_from_the_settings(tmp_path):
    """Red when the templates have defaults of their own, which the operator's settings do not reach."""
    templates = read(tmp_path, '[templates.big]\nmemory = "2GiB"\n', sandbox_pids=99)
    assert templates.templates["big"].memory == 2 * 2**30
    assert templates.templates["big"].pids == 99
    assert templates.templates["default"].memory == 512 * 2**20


def test_a_graph_gets_its_template_and_its_callers_only_what_is_offered(tmp_path):
    """Red when a caller's wish is taken as it comes: any client could open the network of a graph."""
    templates = read(
        tmp_path,
        '[templates.web]\nnetwork = "egress"\n[templates.big]\ncpus = 2\n'
        '[graphs.coder]\ntemplate = "big"\nchoices = ["default"]\n',
    )
    assert templates.of_run("coder") == "big"
    assert templates.of_run("coder", "big") == "big"
    assert templates.of_run("coder", "default") == "default"
    for graph, wish in (("coder", "web"), ("hello", "web"), ("coder", ["default"]), ("hello", "no such")):
        with pytest.raises(TemplateRefused, match="Choose one of"):
            templates.of_run(graph, wish)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[templates.x", "is not TOML"),
        ("[template.x]\n", "unknown table 'template'"),
        ("[templates.X]\n", "'X' is no name of a template"),
        ("[templates.x]\nimages = 'y'\n", r"\[templates.x\] images: unknown key; known are image, runtime, "),
        ("[templates.x]\nmemory = 'much'\n", r"\[templates.x\] memory: write bytes, or a text such as"),
        ("[templates.x]\ncpus = 0\n", r"\[templates.x\] cpus: Input should be greater"),
        ("[templates.x]\nworkspace = '1GiB'\n", "memory .* must exceed the workspace"),
        ("[templates.x]\nnetwork = 'open'\n", "network: Input should be 'none', 'egress' or 'allowlist'"),
        ("[templates.x]\nnetwork = 'allowlist'\n", "'allowlist' and domains need each other"),
        ("[templates.x]\ndomains = ['a.com']\n", "'allowlist' and domains need each other"),
        ("[templates.x]\ndomains = 'a.com'\n", r"domains: write a list"),
        ("[templates]\nx = 3\n", r"'x' in \[templates\] is neither .*: write \[templates.x\]"),
        ("[graphs]\ncoder = 3\n", r"\[graphs.coder\] must be a table"),
        ("[templates.x.env]\n'a=b' = 'c'\n", "'a=b' is no name of a variable"),
        ("[graphs.coder]\ntemplate = 'x'\n", "names the template 'x', which is not defined"),
        ("[graphs.coder]\nchoices = ['x']\n", "names the template 'x', which is not defined"),
        (
            "[graphs.coder]\nallow = ['x']\n",
            r"\[graphs.coder\] allow: unknown key; known are template, choices",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path, text, complaint):
    with pytest.raises(TemplatesInvalid, match=complaint):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "domain", ["*", "*.com*", "a..b", "http://a.com", "a.com:443", "10.0.0.1", "a.*.com", "com", "-a.com"]
)
def test_a_domain_is_a_name(tmp_path, domain):
    """Red when a pattern that opens more than it seems to, or an address, passes."""
    with pytest.raises(TemplatesInvalid, match="is no domain"):
        read(tmp_path, f'[templates.x]\nnetwork = "allowlist"\ndomains = ["{domain}"]\n')


def test_a_graph_that_the_project_does_not_have_is_a_typing_error(tmp_path):
    templates = read(tmp_path, "[graphs.codder]\n")
    with pytest.raises(
        TemplatesInvalid, match=r"has \[graphs.codder\], but langgraph.json has no such graph"
    ):
        templates.check_graphs({"coder": "./coder.py:graph"})


def test_a_missing_file_that_was_named_is_an_error(tmp_path):
    with pytest.raises(TemplatesInvalid, match="which SANDFLEET_TEMPLATES names"):
        read_templates(Settings(templates=tmp_path / "none.toml"))


def test_templates_do_not_change():
    """Red when what many sandboxes share can be changed for one of them."""
    assert Template.model_config["frozen"]
