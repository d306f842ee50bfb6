"""Tables of figures."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sandfleet.localstack.terminal import out

_WIDTH = 160  # also where the output goes to a file


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; figures stand to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=max(out.width, _WIDTH), highlight=False).print(table)
