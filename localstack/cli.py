"""The command ``sandfleet``. Each command imports its own module, so that the help is quick."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from sandfleet import __version__

app = typer.Typer(
    name="sandfleet",
    help="Deploy LangGraph agents like functions. `sandfleet dev` runs everything on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
db = typer.Typer(help="The database's schema.", no_args_is_help=True)
app.add_typer(db, name="db")
network = typer.Typer(
    help="The firewall's rules for sandboxes with a network of their own (root).", no_args_is_help=True
)
app.add_typer(network, name="network")

sandbox = typer.Typer(help="Sandboxes without a run.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "langgraph.json"

Root = Annotated[Path, typer.Option(help="Folder of the local stack.", envvar="SANDFLEET_ROOT")]
Project = Annotated[
    Path | None,
    typer.Option(help="The langgraph.json to serve; default: ./langgraph.json, else the examples."),
]
Template = Annotated[str, typer.Option(help="What it is made of: a template of sandfleet.toml.")]
Ttl = Annotated[
    float | None,
    typer.Option(
        "--ttl", min=1, help="Seconds after which it ends; default: an hour, or less if the template says so."
    ),
]
ROOT = Path(".sandfleet")

_DAYS = ["%Y-%m-%d"]


def _project(given: Path | None) -> Path:
    if given is not None:
        return given / "langgraph.json" if given.is_dir() else given
    return Path("langgraph.json") if Path("langgraph.json").exists() else EXAMPLES


def _version(value: bool) -> None:
    if value:
        typer.echo(f"sandfleet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def dev(
    root: Root = ROOT,
    project: Project = None,
    executors: Annotated[int, typer.Option(min=1, help="Executor processes.")] = 1,
    port: Annotated[int, typer.Option(help="TCP port of the API if it is free, else any free one.")] = 8123,
) -> None:
    """Run the whole stack on this machine until Ctrl-C."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import dev as command

    terminal.run(command.dev(root, _project(project), executors, port))


@app.command("deploy-local")
def deploy_local(
    root: Root = ROOT,
    project: Project = None,
    size: Annotated[str, typer.Option(help="dev, small or large, as for cdk deploy.")] = "dev",
) -> None:
    """Deploy the templates of `cdk deploy` to an emulator on this machine, with executors as containers, until Ctrl-C."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import deploy_local as command

    terminal.run(command.deploy_local(root, _project(project), size))


@app.command()
def demo(root: Root = ROOT) -> None:
    """Start a stack, let the example agent solve a task in its sandbox, and stop it all again."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import demo as command

    terminal.run(command.demo(root, EXAMPLES))


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="What the user says to the agent.")] = None,
    *,
    assistant: Annotated[
        str | None, typer.Option(help="Assistant id or graph name; default: the only graph, else coder.")
    ] = None,
    input: Annotated[str | None, typer.Option(help="JSON, for a graph that takes no messages.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Answer (JSON, else text) to what --thread waits for.")
    ] = None,
    thread: Annotated[str | None, typer.Option(help="Thread to run on; default: a new one.")] = None,
    root: Root = ROOT,
) -> None:
    """Run an assistant on a prompt, print its events, and say what it waits for."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import run as command

    terminal.run(command.run(root, prompt, assistant, input=input, resume=resume, thread_id=thread))


@app.command()
def watch(run_id: Annotated[str, typer.Argument(metavar="RUN")], root: Root = ROOT) -> None:
    """Print the events of a run from its beginning until it ends."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import watch as command

    terminal.run(command.watch(root, run_id))


@app.command()
def cancel(run_id: Annotated[str, typer.Argument(metavar="RUN")], root: Root = ROOT) -> None:
    """Cancel a run and wait until it has ended."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import cancel as command

    terminal.run(command.cancel(root, run_id))


@app.command()
def runs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20, root: Root = ROOT
) -> None:
    """List the newest runs."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import runs as command

    terminal.run(command.runs(root, limit))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context, root: Root = ROOT) -> None:
    """Measure a new stack beside the baseline; options are those of `python -m sandfleet.loadtest.bench`."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import bench as command

    terminal.run(command.bench(root, EXAMPLES, context.args))


@app.command()
def recovery(root: Root = ROOT) -> None:
    """Measure how fast runs go on after an executor's death and end after a cancel, on stacks of its own."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import recovery as command

    terminal.run(command.recovery(root, EXAMPLES))


@app.command("snapshot-cost")
def snapshot_cost(
    largest_mib: Annotated[int, typer.Option(min=0, help="Leave larger workspaces out.")] = 100,
    root: Root = ROOT,
) -> None:
    """Measure what it takes to save and to restore workspaces of several sizes, on a stack of its own."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import snapshot_cost as command

    terminal.run(command.snapshot_cost(root, EXAMPLES, largest_mib))


@app.command()
def simulate(
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an SVG of the tasks, and one of hosts beside it (…-hosts)."),
    ] = None,
    others: Annotated[
        bool, typer.Option(help="Other parameters of our own policy instead of other policies.")
    ] = False,
    fargate_per_hour: Annotated[float, typer.Option(min=0, help="Price of a task.")] = 0.05,
    host_per_hour: Annotated[float, typer.Option(min=0, help="Price of a host.")] = 0.10,
) -> None:
    """Compare policies of scaling on a simulated fleet: how long runs wait, and what it costs."""
    from sandfleet.localstack.commands import simulate as command

    raise typer.Exit(
        command.simulate(
            plot, try_others=others, fargate_per_hour=fargate_per_hour, host_per_hour=host_per_hour
        )
    )


@app.command()
def sandbox_bench(
    root: Root = ROOT,
    parts: Annotated[
        str, typer.Option(help="Of exec, acquire, idle, kill and runs, with commas.")
    ] = "exec,acquire,idle,kill,runs",
    most: Annotated[int, typer.Option(help="Sandboxes at once at most.")] = 300,
    swe_rex: Annotated[
        Path | None, typer.Option(help="An environment with swe-rex and aiohttp, to measure it beside.")
    ] = None,
) -> None:
    """Measure commands, acquires, idle sandboxes and many runs beside a plain use of the Docker Engine."""
    import uvloop

    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox_bench as command

    # Executors, which are the clients that it stands for, have this event loop as well.
    terminal.run(
        command.sandbox_bench(root, EXAMPLES, parts.split(","), most, swe_rex), uvloop.new_event_loop
    )


@app.command()
def doctor(root: Root = ROOT) -> None:
    """Check each dependency and say what to do."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import doctor as command

    terminal.run(command.doctor(root))


@app.command()
def invariants(
    root: Root = ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    all_runs: Annotated[
        bool, typer.Option("--all", help="Look at all runs that are over, not only at the newest 50,000.")
    ] = False,
) -> None:
    """Check that a deployment is as it must be; exit code 1 and what breaks a rule if it is not, 2 if a part is away."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import invariants as command

    terminal.run(command.invariants(root, as_json, all_runs))


@app.command()
def usage(
    first: Annotated[
        datetime | None,
        typer.Option("--from", formats=_DAYS, help="First day (UTC); default: 29 days before the last."),
    ] = None,
    last: Annotated[
        datetime | None, typer.Option("--to", formats=_DAYS, help="Last day (UTC); default: today.")
    ] = None,
    by: Annotated[Literal["tenant", "day", "model", "user"], typer.Option(help="What to add up.")] = "tenant",
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    root: Root = ROOT,
) -> None:
    """Print what tenants have used of models: calls, tokens and costs."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import usage as command

    terminal.run(command.usage(root, first, last, by, tenant))


@app.command("dead-letters")
def dead_letters(
    redrive: Annotated[bool, typer.Option(help="Send them to their queues anew, and remove them.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many of each pool at most.")] = 100,
    root: Root = ROOT,
) -> None:
    """List permits that were received again and again by executors that died."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import dead_letters as command

    terminal.run(command.dead_letters(root, redrive, limit))


@app.command()
def templates(project: Project = None) -> None:
    """List the sandbox templates of a project and try their images; exit code 1 if one cannot be used."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import templates as command

    terminal.run(command.templates(_project(project)))


@sandbox.command("shell")
def sandbox_shell(template: Template = "default", ttl: Ttl = None, root: Root = ROOT) -> None:
    """Open a shell in a fresh sandbox, which is removed when you leave it."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox as command

    terminal.run(command.shell(root, template, ttl))


@sandbox.command("create")
def sandbox_create(template: Template = "default", ttl: Ttl = None, root: Root = ROOT) -> None:
    """Make a sandbox and print its id."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox as command

    terminal.run(command.create(root, template, ttl))


@sandbox.command("ls")
def sandbox_ls(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20, root: Root = ROOT
) -> None:
    """List the newest sandboxes."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox as command

    terminal.run(command.ls(root, limit))


@sandbox.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def sandbox_exec(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...")],
    root: Root = ROOT,
) -> None:
    """Run a command in a sandbox: several words as they are, or one text for its shell."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox as commands

    terminal.run(commands.execute(root, sandbox_id, command))


@sandbox.command("rm")
def sandbox_rm(
    sandbox_ids: Annotated[list[str], typer.Argument(metavar="SANDBOX...")], root: Root = ROOT
) -> None:
    """End sandboxes."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import sandbox as command

    terminal.run(command.rm(root, sandbox_ids))


@db.command()
def migrate(root: Root = ROOT) -> None:
    """Bring the database to the newest schema."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import db as command

    terminal.run(command.migrate(root))


@network.command("check")
def network_check() -> None:
    """Say whether the rules are installed, and which networks they guard."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import network as command

    terminal.run(command.check())


@network.command("uninstall")
def network_uninstall() -> None:
    """Remove the rules; refused while sandboxes with a network are there. Sandbox hosts install them anew at need."""
    from sandfleet.localstack import terminal
    from sandfleet.localstack.commands import network as command

    terminal.run(command.uninstall())
