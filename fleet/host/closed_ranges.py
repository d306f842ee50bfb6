"""Addresses that no sandbox may reach, whatever opens its network: all but the public internet."""

import ipaddress

CLOSED_IPV4 = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # shared by carriers, and by clouds for themselves
    "127.0.0.0/8",  # loopback
    "169.254.0.0/16",  # link local: the metadata of clouds
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments
    "192.0.2.0/24",  # documentation
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and broadcast
)
"""Ranges of IANA's special-purpose registry (RFC 6890 and its successors) with multicast and what is reserved."""

_CLOSED = tuple(ipaddress.ip_network(network) for network in CLOSED_IPV4)


def is_open(address: str) -> bool:
    """Whether an address is one of the public internet's; of IPv6 none is."""
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return not any(parsed in network for network in _CLOSED)
