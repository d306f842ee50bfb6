"""What tokens cost: a price table by model, in US dollars for a million tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Price(BaseModel):
    """Prices of one model, in US dollars for a million tokens. What is not given costs as much as ordinary input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cache_read: float | None = Field(None, ge=0)
    cache_creation: float | None = Field(None, ge=0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one model call. ``input`` has the cached ones in it, as LangChain counts them."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_creation: int = 0

    @classmethod
    def of(cls, usage_metadata: Mapping[str, Any]) -> "Usage":
        """From LangChain's ``usage_metadata``; what a provider does not say is 0."""
        details = usage_metadata.get("input_token_details") or {}
        return cls(
            _tokens(usage_metadata.get("input_tokens")),
            _tokens(usage_metadata.get("output_tokens")),
            _tokens(details.get("cache_read")),
            _tokens(details.get("cache_creation")),
        )


MOST_TOKENS = 10**12
"""More than a model can use in one run: a provider that says more, or less than nothing, is not believed."""


def _tokens(said: Any) -> int:
    return min(max(int(said or 0), 0), MOST_TOKENS)


def cost_usd(usage: Usage, price: Price) -> float:
    """What a call cost, in US dollars."""
    read = price.input if price.cache_read is None else price.cache_read
    creation = price.input if price.cache_creation is None else price.cache_creation
    plain = max(0, usage.input - usage.cache_read - usage.cache_creation)
    millionths = (
        plain * price.input
        + usage.cache_read * read
        + usage.cache_creation * creation
        + usage.output * price.output
    )
    return millionths / 1_000_000


def price_of(model: str, prices: Mapping[str, Price]) -> Price | None:
    """The price of a model: the table's longest name that the model's begins with, since providers append dates."""
    fitting = [name for name in prices if model.startswith(name)]
    return prices[max(fitting, key=len)] if fitting else None
