"""What must be true of a deployment at any moment, as checks that name what breaks it. They change nothing."""

from typing import NamedTuple

GONE_S = 60.0
"""Within this, what lives outside PostgreSQL follows it, and an expired lease or a due delay is acted upon."""


class Violation(NamedTuple):
    """One thing that breaks a rule: which rule, the id of a run, tenant, key or process, and what is wrong with it.

    Never holds content of a tenant's.
    """

    rule: str
    id: str
    detail: str
