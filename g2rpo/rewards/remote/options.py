"""Options of rewards that servers judge, checked before anything is asked."""

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
"""What /etc/hosts calls this machine on the usual systems."""


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine: localhost, 127.0.0.0/8, ::1, or the unspecified 0.0.0.0 and ::.

    Addresses count in every form that the resolver takes: `127.1`, `2130706433`, `0x7f.1`,
    `::ffff:127.0.0.1`; names below `.localhost` too (RFC 6761).
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host in LOOPBACK_NAMES or host.endswith(".localhost"):
        return True
    with suppress(OSError):  # no IPv4 address in any form
        host = socket.inet_ntoa(socket.inet_aton(host))
    with suppress(ValueError):  # a name
        address = ipaddress.ip_address(host)
        mapped = getattr(address, "ipv4_mapped", None) or address
        return mapped.is_loopback or mapped.is_unspecified
    return False


def number(reward: str, option: str, value: Any, *, above: float, unit: str = "") -> float:
    """A finite number greater than `above`, else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        raise ValueError(f"reward {reward}: {option}={value!r} must be a number of{unit} above {above:g}")
    return float(value)


def whole(reward: str, option: str, value: Any, *, least: int) -> int:
    """A whole number, at least `least`, else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"reward {reward}: {option}={value!r} must be a whole number, at least {least}")
    return value


def addresses(reward: str, option: str, urls: Any) -> list[str]:
    """Addresses without a slash at the end, else a ValueError that shows what is meant."""
    given = [urls] if isinstance(urls, str) else urls
    example = f'[reward_options.{reward}] {option} = ["http://localhost:8000/v1"]'
    if not given or not isinstance(given, list | tuple) or not all(isinstance(url, str) for url in given):
        raise ValueError(
            f"reward {reward} needs {option}, the addresses of the servers that judge, such as "
            f"{example}; got {urls!r} (docs/rewards.md says how to start one)"
        )
    cleaned = [url.rstrip("/") for url in given]
    for url in cleaned:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        except ValueError:  # a port that is none
            good = False
        if not good or parts.query or parts.fragment:
            raise ValueError(f"reward {reward}: {option} has {url!r}, which is no http address; {example}")
        if parts.username or parts.password:
            raise ValueError(
                f"reward {reward}: {option} carries a password, which would be logged; give a token in an "
                "environment variable (api_key_env)"
            )
    if twice := [url for url, n in Counter(cleaned).items() if n > 1]:
        raise ValueError(f"reward {reward}: {option} has {twice[0]} more than once")
    return cleaned


def plain_headers(reward: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The user's headers, else a ValueError."""
    headers = dict(headers or {})
    if not all(isinstance(value, str) and value.isascii() for value in headers.values()):
        raise ValueError(f"reward {reward}: headers={headers!r} must be a table of plain texts")
    return headers


def bearer(reward: str, variable: str | None) -> dict[str, str]:
    """The header with the token that an environment variable holds; a ValueError where it is not set."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(
            f"reward {reward}: api_key_env={variable!r}, but that environment variable is not set; "
            f"export {variable}=..., or drop the option where the servers ask for no key"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}
