"""``sandfleet templates``: the sandbox templates of a project, and whether sandboxes can be made of them here."""

from pathlib import Path

from rich.table import Table

from sandfleet.fleet.graphs.project import read_project
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.template_check import refusals
from sandfleet.localstack.sandbox_templates import TRIAL_LABELS, templates_of
from sandfleet.localstack.terminal import out
from sandfleet.shared.settings import settings


async def templates(project: Path) -> int:
    """Print the templates and what stands against them; 1 if anything does."""
    found = templates_of(project, {})
    found.check_graphs(read_project(project).graphs)
    async with Engine(settings().docker_host) as engine:
        against = await refusals(engine, list(found.templates.values()), TRIAL_LABELS)
    graphs: dict[str, list[str]] = {}
    for graph_id, rules in found.graphs.items():
        graphs.setdefault(rules.template, []).append(graph_id)
    table = Table("template", "image", "runtime", "network", "memory", "cpus", "warm", "graphs")
    # A narrow terminal breaks names rather than cut them off.
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for template in found.templates.values():
        network = ", ".join(template.domains) if template.network == "allowlist" else template.network
        memory = template.memory.human_readable()
        used = ", ".join(graphs.get(template.name, [])) or (
            "all others" if template.name == "default" else ""
        )
        table.add_row(
            template.name, template.image, template.runtime or "the engine's", network, memory,
            f"{template.cpus:g}", str(template.warm), used,
        )  # fmt: skip
    out.print(table)
    for reason in against.values():
        out.print(f"[bold red]Error:[/] {reason}", highlight=False)
    return 1 if against else 0
