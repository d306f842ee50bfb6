"""What tokens cost."""

import pytest

from sandfleet.shared.prices import Price, Usage, cost_usd, price_of

TABLE = {
    "gpt-5": Price(input=1.25, output=10, cache_read=0.125),
    "gpt-5-mini": Price(input=0.25, output=2),
}


def test_cached_tokens_are_part_of_the_input_and_cost_their_own_price():
    """Red when cached tokens are paid twice, or at the full price."""
    usage = Usage.of(
        {
            "input_tokens": 1000,
            "output_tokens": 100,
            "input_token_details": {"cache_read": 600, "audio": None},
        }
    )
    assert cost_usd(usage, TABLE["gpt-5"]) == pytest.approx((400 * 1.25 + 600 * 0.125 + 100 * 10) / 1e6)


def test_cached_tokens_without_a_price_cost_as_much_as_others():
    """Red when a missing price means free."""
    usage = Usage(input=1000, cache_read=600, cache_creation=100)
    assert cost_usd(usage, TABLE["gpt-5-mini"]) == pytest.approx(1000 * 0.25 / 1e6)


def test_the_longest_name_that_a_model_begins_with_decides():
    """Red when a small model costs as much as the large one whose name it begins with."""
    assert price_of("gpt-5-mini-2026-01-01", TABLE) is TABLE["gpt-5-mini"]
    assert price_of("gpt-5-2026-01-01", TABLE) is TABLE["gpt-5"]
    assert price_of("other", TABLE) is None
