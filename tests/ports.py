"""Ports for servers that tests start."""

from __future__ import annotations

import os
import socket

# Below 32,768, where Linux begins to give ports to outgoing connections: those would take a server's port
# before it starts, or while it is away.
FIRST, LAST = 11_000, 22_700
_given: set[int] = set()  # by this process, maybe not listened on yet


def free_ports(count: int, beside: int = 0) -> list[int]:
    """Ports that nobody listens on, nor on those `beside` higher."""
    ports: list[int] = []
    candidate = FIRST + os.getpid() * 37 % (LAST - FIRST)
    while len(ports) < count:
        candidate = candidate + 1 if candidate < LAST else FIRST
        if candidate not in _given and _is_free(candidate) and _is_free(candidate + beside):
            ports.append(candidate)
            _given.add(candidate)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
