"""Cancelling a run: committed first, then whoever has to know is told."""

from sandfleet.functions.api.resources import Resources
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.cancellation import CancelAction, request_cancel


async def cancel_run(resources: Resources, key: RunKey, action: CancelAction) -> None:
    """Ask a run to end, or end it when it has not begun. Raises NotFound when there is no such run or it is over."""
    outcome, ready = await request_cancel(resources.pool, key, action)
    if outcome == "requested":
        resources.signal_cancel(key.run_id, action)
    resources.waker.wake_all(ready)
