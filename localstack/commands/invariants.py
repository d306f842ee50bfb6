"""``sandfleet invariants``: check that a deployment is as it must be."""

import json
from pathlib import Path

from rich.markup import escape

from sandfleet.localstack.deployment_check import check, find_deployment
from sandfleet.localstack.terminal import out
from sandfleet.shared.invariants.runs import NEWEST


async def invariants(root: Path, as_json: bool, all_runs: bool) -> int:
    """Print what breaks a rule, and what was looked at; 0 if nothing does."""
    report = await check(*find_deployment(root), None if all_runs else NEWEST)
    if as_json:
        answer = {
            "ok": not report.violations,
            "violations": [violation._asdict() for violation in report.violations],
            "looked_at": report.looked_at,
        }
        print(json.dumps(answer, indent=2))  # noqa: T201  # not for the console, which would wrap and colour it
    else:
        for violation in report.violations:
            out.print(
                f"[bold red]{escape(violation.rule)}[/]  {escape(violation.id)}  {escape(violation.detail)}"
            )
        seen = ", ".join(f"{count} {what}" for what, count in report.looked_at.items())
        verdict = f"{len(report.violations)} broken" if report.violations else "All invariants hold"
        out.print(f"{verdict}  ({seen})")
    return 1 if report.violations else 0
