"""The socket of a server. It imports little, so that a port in use is known before models and programs are imported."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address: clients that connect wait until the server takes them. Raises ValueError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; choose another.") from error
