"""Tell whether a host is this machine, for servers and clients: what is sent there can't be read on a network."""

import ipaddress
import socket


def is_loopback_host(host: str) -> bool:
    """Return True if every address of a host name or IP address is a loopback address.

    Raises OSError or UnicodeError for a name that nobody knows.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(_is_loopback(str(sockaddr[0])) for *_, sockaddr in found)


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
