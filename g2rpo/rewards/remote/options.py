"""Checks of the options of remote rewards, before any request is sent."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from g2rpo.runtime.secrets import (
    HIDDEN,
    NOT_STORED,
    masked,
    not_stored,
    remember_secret,
    remember_secrets,
    shown_address,
    with_environment,
)

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


ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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


def boolean(reward: str, option: str, value: Any) -> bool:
    """Returns the option; raises ValueError unless it is true or false: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"reward {reward}: {option}={value!r} must be true or false")
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
            f"{example}; got {masked(repr(urls))} (docs/rewards.md explains how to start one)"
        )
    cleaned = [url.rstrip("/") for url in given]
    for url in cleaned:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
            valid = valid and url.isprintable() and " " not in url
        except ValueError:  # an invalid port
            valid = False
        if not valid or parts.query or parts.fragment:
            raise ValueError(
                f"reward {reward}: {option} has {_without_query(url)!r}, which is not an http "
                f"address{' (a query or fragment is not allowed)' if valid else ''}; use {example}"
            )
        if parts.username or parts.password:
            raise ValueError(
                f"reward {reward}: {option} contains a password, which would be logged; put a token into an "
                "environment variable and name it in api_key_env"
            )
    if repeated := [url for url, n in Counter(cleaned).items() if n > 1]:
        raise ValueError(f"reward {reward}: {option} has {repeated[0]} more than once")
    return cleaned


def _without_query(url: str) -> str:
    """Returns an address for a message: without user and password, and without the values of a query."""
    address, mark, _ = url.partition("?")
    return shown_address(address) + (f"?{HIDDEN}" if mark else "")


HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""A token of RFC 9110."""


def plain_headers(reward: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the headers with `${NAME}` replaced by the environment variable.

    Raises:
        ValueError: headers is no table of ASCII strings, or a variable is not set. No message quotes a value.
    """
    if headers is not None and not isinstance(headers, Mapping):
        raise ValueError(
            f"reward {reward}: headers is a {type(headers).__name__}, and must be a table of ASCII strings, "
            'such as {Authorization = "Bearer ${MY_TOKEN}"}'
        )
    checked: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            raise ValueError(f"reward {reward}: headers: {name!r} is not the name of a header")
        where = f"reward {reward}: headers.{name}"
        if not isinstance(value, str):
            raise ValueError(f"{where} is a {type(value).__name__}, and must be an ASCII string")
        if value == NOT_STORED:
            raise ValueError(not_stored(reward, f"headers.{name}"))
        value = with_environment(value, where).strip()
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"{where} must be an ASCII string without line breaks or control characters")
        checked[name] = value
    remember_secrets({"headers": checked})
    return checked


def bearer(reward: str, variable: str | None) -> dict[str, str]:
    """Returns the Authorization header with the token of an environment variable, without surrounding blanks.

    Raises:
        ValueError: the variable is not set, or holds what a header cannot carry. No message quotes it.
    """
    if variable is None:
        return {}
    if not isinstance(variable, str) or not ENVIRONMENT_NAME.fullmatch(variable):
        raise ValueError(
            f"reward {reward}: api_key_env must be the name of an environment variable, such as JUDGE_KEY, "
            "not the key itself"
        )
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(
            f"reward {reward}: api_key_env={variable!r}, but that environment variable is not set; "
            f"export {variable}=..., or remove the option if the servers need no key"
        )
    if not token.isascii() or not token.isprintable():
        raise ValueError(
            f"reward {reward}: the environment variable {variable} (api_key_env) contains characters that a "
            "header cannot carry; it must be one line of ASCII text"
        )
    remember_secret(token)
    return {"Authorization": f"Bearer {token}"}
