"""``sandfleet invariants``: check that a deployment is as it must be."""

import json
from pathlib import Path

from rich.markup import escape

from sandfleet.localstack.deployment_check import check, find_deployment
from sandfleet.localstack.terminal import err, out
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.invariants.runs import NEWEST

_NOT_CHECKED = 2


async def invariants(root: Path, as_json: bool, all_runs: bool) -> int:
    """Print what breaks a rule, and what was looked at; 0 if nothing does, 1 if something does, 2 if not all that must
    be checked answered."""
    try:
        deployment = find_deployment(root)
    except SandfleetError as error:
        err.print(f"[bold red]Error:[/] {escape(error.message)}")
        return _NOT_CHECKED
    report = await check(*deployment, None if all_runs else NEWEST)
    for line in report.not_checked:
        err.print(f"[bold red]Error:[/] {escape(line)}.")
    if as_json:
        answer = {
            "ok": not report.violations and not report.not_checked,
            "not_checked": report.not_checked,
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
        verdict = "Nothing that was looked at breaks a rule" if report.not_checked else "All invariants hold"
        if report.violations:
            verdict = f"{len(report.violations)} broken"
        out.print(f"{verdict}  ({seen})")
    if report.not_checked:
        return _NOT_CHECKED
    return 1 if report.violations else 0
