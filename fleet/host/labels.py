"""Labels of containers and networks: they say that something is ours, and whose it is."""

import socket
from pathlib import Path
from typing import NamedTuple

from sandfleet.shared.settings import Settings

OURS = "sandfleet"
INSTANCE = "sandfleet.instance"
DEPLOYMENT = "sandfleet.deployment"
HOST = "sandfleet.host"
FOLDER = "sandfleet.folder"
TEMPLATE = "sandfleet.template"
SANDBOX = "sandfleet.sandbox"  # its id; the run is in the container's name, since labels cannot be changed

_MACHINE_ID = Path("/etc/machine-id")


class Owner(NamedTuple):
    """A sandbox host: its name among all, and its folder on its machine."""

    host_id: str
    folder: str

    @classmethod
    def of_host(cls, config: Settings, instance: str) -> "Owner":
        """The host that these settings describe."""
        return cls(config.host_id or f"{socket.gethostname()}/{instance}", str(config.host_dir.absolute()))

    @classmethod
    def read(cls, labels: dict[str, str]) -> "Owner | None":
        """Whose the thing with these labels is; None if they do not say so."""
        if HOST in labels and FOLDER in labels:
            return cls(labels[HOST], labels[FOLDER])
        return None


class Labels(NamedTuple):
    """What all things of one host carry. ``deployment`` is that of PostgreSQL, empty before it is known."""

    instance: str
    owner: Owner
    deployment: str = ""

    def of_all(self) -> dict[str, str]:
        """Those of every container and network."""
        return {
            OURS: "1",
            INSTANCE: self.instance,
            DEPLOYMENT: self.deployment,
            HOST: self.owner.host_id,
            FOLDER: self.owner.folder,
        }

    def may_sweep(self, labels: dict[str, str]) -> bool:
        """Whether something of the same instance is this host's: made by it, or before hosts named themselves."""
        return Owner.read(labels) in (None, self.owner)


def machine() -> str:
    """This machine's identity, for telling whether a folder that a host names is one of ours."""
    try:
        return _MACHINE_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()
