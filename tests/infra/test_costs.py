"""The table of costs follows the sizes and the prices that it is given."""

import re
from pathlib import Path

import pytest

from sandfleet.infra_cdk.costs import PRICES, aurora, hourly, table
from sandfleet.infra_cdk.sizes import SIZES

DOCS = Path(__file__).parents[2] / "docs" / "costs.md"


def test_the_table_of_the_documentation_is_that_of_the_sizes() -> None:
    """Red when a size or a price is changed in one place only: `python -m sandfleet.infra_cdk.costs` prints it anew."""
    assert table(PRICES, "x86_64") in DOCS.read_text()


def test_the_documentation_dates_the_prices_and_tells_each() -> None:
    """A reader must be able to hold each against today's."""
    text = DOCS.read_text()
    assert re.search(r"20\d\d-\d\d-\d\d", text)
    for name, price in PRICES.items():
        assert f"| `{name}` | {price:g} |" in text


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_every_size_has_a_price_on_every_architecture(architecture: str) -> None:
    """Red when a size names a machine without a price."""
    for size in SIZES.values():
        for least, most in hourly(size, PRICES, architecture).values():
            assert 0 < least <= most


def test_aurora_costs_by_its_units() -> None:
    """Red when the least and the most of its units, or the standby's, are not what is counted."""
    small = SIZES["small"]
    least, most = aurora(small, PRICES)
    more_units = small.aurora_units[1] - small.aurora_units[0]
    assert most - least == pytest.approx(2 * more_units * PRICES["aurora-unit"])


def test_a_standby_is_paid_for() -> None:
    """Red when the second database or cache node is forgotten."""
    small = SIZES["small"]
    assert small.standby
    parts = hourly(small, PRICES, "x86_64")
    assert parts["database"][0] > 2 * PRICES["db.m7g.large"]
    assert parts["cache"][0] == 2 * PRICES["cache.m7g.large"]
