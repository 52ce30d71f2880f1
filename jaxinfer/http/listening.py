"""The socket of a server. It imports little, so that a port in use is known before models and programs are imported."""

import socket

STALLED_SECONDS = 60.0
"""Seconds after which a client that reads nothing of its response is disconnected."""


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address: clients that connect wait until the server takes them. Raises ValueError.

    On Linux, the system disconnects clients that stall.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; choose another.") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * STALLED_SECONDS))
    return listening
