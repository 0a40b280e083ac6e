"""Secrets among options: what is stored in their place, and what messages show.

Options of a reward may hold a key for a server. `without_secrets` gives the options as files store them.
`remember_secrets` notes their values, and `masked` replaces these wherever a text quotes them, such as the
error of a library or the answer of a server.

What counts as a secret: all headers but a few that only describe content; a string whose name says so, such
as `api_key` or `token`; in an address the user and password, and parameters with such a name. `${NAME}` names
an environment variable and is no secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

NOT_STORED = "<secret, not stored>"
"""What files store in place of a secret."""

HIDDEN = "***"
"""What messages show in place of a secret, and stored addresses hold."""

PLAIN_HEADERS = ("accept", "accept-language", "content-type", "user-agent")
SCHEMES = ("", "bearer", "basic", "token", "apikey", "key")

_WORDS = (
    "authorization|auth|token|secrets?|passw(?:or)?ds?|pwd|passphrase|cookies?|credentials?|"
    "bearer|signature|sig"
)
_PAIRS = (
    r"(?:api|access|private|subscription|account|secret|auth)[-_ ]?keys?|"
    r"(?:access|auth|api|refresh)[-_ ]?tokens"
)
SECRET_NAME = re.compile(rf"(?:^|[^a-z])(?:{_WORDS}|{_PAIRS})(?:$|[^a-z])", re.IGNORECASE)
PARAMETERS = ("key", "code")
"""Parameters of addresses that hold a secret although their name alone does not say so."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_USER = re.compile(r"(?<=://)[^/?#\s@]+@")
_PARAMETER = re.compile(r"([?&;])([^=&#\s;]+)=([^&#\s;]*)")
_QUOTED = re.compile(rf"""((?:{_WORDS}|{_PAIRS})["']?\s*[:=]\s*)(["'])(?!\$\{{)[^"'\n]+\2""", re.IGNORECASE)
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+(?!\$\{)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
MIN_LENGTH = 4
"""Shorter values are not searched for in texts: they would match everywhere."""

_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether the name of an option says that its value is a secret; `api_key_env` names a variable."""
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return SECRET_NAME.search(separated) is not None and not separated.lower().endswith("_env")


def without_secrets(options: Any) -> Any:
    """Returns options as they are stored: secrets are replaced, also in tables and lists."""
    return _replaced(options, "", in_headers=False)


def _replaced(value: Any, name: str, *, in_headers: bool) -> Any:
    if isinstance(value, Mapping):
        headers = in_headers or "header" in name.lower()
        return {key: _replaced(item, str(key), in_headers=headers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        headers = in_headers or "header" in name.lower()
        return [_replaced(item, name, in_headers=headers) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(value, name, in_headers=in_headers):
        return NOT_STORED
    return shown_address(value)


def _is_secret(value: str, name: str, *, in_headers: bool) -> bool:
    if REFERENCE.search(value) and REFERENCE.sub("", value).strip().lower() in SCHEMES:
        return False
    if in_headers:
        return name.lower() not in PLAIN_HEADERS
    return is_secret_name(name)


def shown_address(text: str) -> str:
    """Returns a text in which addresses have no user, password or secret parameters."""
    if "://" not in text:
        return text
    text = _USER.sub(f"{HIDDEN}@", text)
    return _PARAMETER.sub(
        lambda match: f"{match[1]}{match[2]}={HIDDEN}" if _is_secret_parameter(match[2]) else match[0], text
    )


def _is_secret_parameter(name: str) -> bool:
    return name.lower() in PARAMETERS or is_secret_name(name)


def missing_secrets(options: Any, path: str = "") -> Iterator[str]:
    """Yields the place of each secret that a file did not store, such as `headers.Authorization`."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(options, Mapping):
        items = iter(options.items())
    elif isinstance(options, list | tuple):
        items = iter(enumerate(options))
    elif isinstance(options, str) and (options == NOT_STORED or f"//{HIDDEN}@" in options):
        yield path
    for key, value in items:
        yield from missing_secrets(value, f"{path}.{key}" if path else str(key))


def not_stored(reward: str, place: str) -> str:
    """The message for a secret that a run's config.toml does not hold."""
    return (
        f"reward {reward}: {place} is a secret, which config.toml does not store; give it again, or name an "
        "environment variable: api_key_env, or ${NAME} in a header"
    )


def remember_secrets(options: Any) -> None:
    """Notes the secrets among options, so that `masked` finds them."""
    for secret in _secrets(options, "", in_headers=False):
        remember_secret(secret)


def remember_secret(secret: str) -> None:
    """Notes a secret and its forms in addresses, and for a header its part after the scheme."""
    last = secret.split()[-1:] if secret.partition(" ")[0].lower() in SCHEMES else []
    for text in (secret, *last):
        if len(text) >= MIN_LENGTH and text not in (NOT_STORED, HIDDEN):
            _remembered.update({text, quote(text, safe=""), quote_plus(text)})


def _secrets(value: Any, name: str, *, in_headers: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, str(key), in_headers=in_headers or "header" in name.lower())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, name, in_headers=in_headers or "header" in name.lower())
    elif isinstance(value, str) and value:
        if _is_secret(value, name, in_headers=in_headers):
            yield value
        elif "://" in value:
            for user in _USER.findall(value):
                yield from user.removesuffix("@").split(":")[-1:]
            yield from (match[3] for match in _PARAMETER.finditer(value) if _is_secret_parameter(match[2]))


def masked(text: str) -> str:
    """Returns a text without secrets: remembered ones, and what looks like one by its name."""
    for secret in sorted(_remembered, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _QUOTED.sub(rf"\1\2{HIDDEN}\2", text)
    return shown_address(_SCHEME.sub(rf"\1 {HIDDEN}", text))


def with_environment(text: str, where: str) -> str:
    """Replaces `${NAME}` by the value of the environment variable, and remembers it as a secret.

    Args:
        where: place of the text, for the message.

    Raises:
        ValueError: the variable is not set.
    """
    for name in REFERENCE.findall(text):
        value = os.environ.get(name, "").strip()
        if not value:
            raise ValueError(
                f"{where} refers to the environment variable {name}, which is not set; export {name}=..."
            )
        remember_secret(value)
    return REFERENCE.sub(lambda match: os.environ[match[1]].strip(), text)
