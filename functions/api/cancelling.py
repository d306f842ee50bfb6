"""Cancelling a run: committed first, then whoever has to know is told."""

from sandfleet.functions.api.resources import Resources
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.cancellation import CancelAction, Cancelled, request_cancel
from sandfleet.shared.streams.announce import announce_ends


async def cancel_run(resources: Resources, key: RunKey, action: CancelAction) -> None:
    """Ask a run and its descendants to end, or end those that have not begun. Raises NotFound when there is no such run or it is over."""
    tell(resources, await request_cancel(resources.pool, key, action))


def tell(resources: Resources, cancelled: Cancelled) -> None:
    """Tell the executors and the watchers what a committed cancellation means to them."""
    for run_id, action in cancelled.stop.items():
        resources.signal_cancel(run_id, action)
    resources.waker.wake_all(cancelled.ready)
    if cancelled.announce:
        resources.spawn(announce_ends(resources.redis, resources.settings, cancelled.announce))
