"""``sandfleet network``: the machine's rules for sandboxes with a network of their own."""

from sandfleet.fleet.host import firewall
from sandfleet.localstack.terminal import out


async def check() -> int:
    """Say whether the rules are installed, and how many networks they guard; 1 if networks are up without them."""
    there, bridges = await firewall.installed(), firewall.bridges()
    out.print(f"Rules (nftables, table inet sandfleet): {'installed' if there else 'not installed'}")
    out.print(f"Networks of sandboxes: {', '.join(bridges) or 'none'}")
    if bridges and not there:
        out.print("Sandboxes have a network without rules. Restart the sandbox host, which installs them.")
        return 1
    return 0


async def uninstall() -> int:
    """Remove the rules from this machine."""
    removed = await firewall.uninstall()
    out.print("Removed the rules." if removed else "There were no rules.")
    return 0
