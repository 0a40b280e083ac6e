"""Checks of the options of remote rewards, before any request is sent."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

LOOPBACK_NAMES = (
    "localhost",
    "localhost.localdomain",
    "localhost4",
    "localhost4.localdomain4",
    "localhost6",
    "localhost6.localdomain6",
    "ip6-localhost",
    "ip6-loopback",
)
"""Names of this machine in /etc/hosts on common systems."""


def is_loopback(url: str) -> bool:
    """Whether a URL is on this machine: localhost, 127.0.0.0/8, ::1, or the unspecified 0.0.0.0 and ::.

    All forms that the resolver accepts are recognised, such as `127.1`, `2130706433`, `0x7f.1` and
    `::ffff:127.0.0.1`, and names that end in `.localhost` (RFC 6761).
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host in LOOPBACK_NAMES or host.endswith(".localhost"):
        return True
    with suppress(OSError):  # not an IPv4 address
        host = socket.inet_ntoa(socket.inet_aton(host))
    with suppress(ValueError):  # a host name
        address = ipaddress.ip_address(host)
        mapped = getattr(address, "ipv4_mapped", None) or address
        return mapped.is_loopback or mapped.is_unspecified
    return False


def number(reward: str, option: str, value: Any, *, above: float, unit: str = "") -> float:
    """Returns the option as a float; raises ValueError unless it is finite and greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        raise ValueError(f"reward {reward}: {option}={value!r} must be a number of{unit} above {above:g}")
    return float(value)


def integer(reward: str, option: str, value: Any, *, least: int) -> int:
    """Returns the option; raises ValueError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"reward {reward}: {option}={value!r} must be an integer, at least {least}")
    return value


def addresses(reward: str, option: str, urls: Any) -> list[str]:
    """Returns the servers' addresses without a trailing slash.

    Raises:
        ValueError: no addresses, no http URL, a URL with a password, or a repeated one.
    """
    given = [urls] if isinstance(urls, str) else urls
    example = f'[reward_options.{reward}] {option} = ["http://localhost:8000/v1"]'
    if not given or not isinstance(given, list | tuple) or not all(isinstance(url, str) for url in given):
        raise ValueError(
            f"reward {reward} needs {option}, the addresses of its servers, such as "
            f"{example}; got {urls!r} (docs/rewards.md explains how to start one)"
        )
    cleaned = [url.rstrip("/") for url in given]
    for url in cleaned:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        except ValueError:  # an invalid port
            valid = False
        if not valid or parts.query or parts.fragment:
            raise ValueError(
                f"reward {reward}: {option} has {url!r}, which is no http address; use {example}"
            )
        if parts.username or parts.password:
            raise ValueError(
                f"reward {reward}: {option} contains a password, which would be logged; put a token into an "
                "environment variable and name it in api_key_env"
            )
    if repeated := [url for url, n in Counter(cleaned).items() if n > 1]:
        raise ValueError(f"reward {reward}: {option} has {repeated[0]} more than once")
    return cleaned


def plain_headers(reward: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the headers; raises ValueError unless all values are ASCII strings."""
    headers = dict(headers or {})
    if not all(isinstance(value, str) and value.isascii() for value in headers.values()):
        raise ValueError(f"reward {reward}: headers={headers!r} must be a table of ASCII strings")
    return headers


def bearer(reward: str, variable: str | None) -> dict[str, str]:
    """Returns the Authorization header with the token of an environment variable.

    Raises:
        ValueError: the variable is not set.
    """
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(
            f"reward {reward}: api_key_env={variable!r}, but that environment variable is not set; "
            f"export {variable}=..., or remove the option if the servers need no key"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}
