"""The cluster's name service, for Python processes of its pods: names are looked up in a file, anew
each time."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

_lookup = socket.getaddrinfo


def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
    """As of ``socket``."""
    try:
        with open(os.environ["KUBERNETES_NAMES"]) as file:
            host = json.load(file).get(host, host)
    except (KeyError, OSError, ValueError):
        pass
    return _lookup(host, *arguments, **options)


socket.getaddrinfo = getaddrinfo
