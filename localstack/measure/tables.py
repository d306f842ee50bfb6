"""Tables of figures."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from sandfleet.localstack.terminal import out


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; figures stand to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out.print(table)
