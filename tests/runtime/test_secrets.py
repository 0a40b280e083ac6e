"""What counts as a secret, what is stored in its place, and what messages show."""

import pytest

from g2rpo.runtime import secrets
from g2rpo.runtime.secrets import (
    NOT_STORED,
    is_secret_name,
    masked,
    missing_secrets,
    remember_secrets,
    shown_address,
    with_environment,
    without_secrets,
)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(secrets, "_remembered", set())


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "API_KEY",
        "apiKey",
        "apikey",
        "api-key",
        "token",
        "hf_token",
        "auth_token",
        "access_tokens",
        "password",
        "client_secret",
        "secretKey",
        "Authorization",
        "proxy_authorization",
        "cookie",
        "credentials",
        "passphrase",
        "bearer",
        "aws_secret_access_key",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "tokenizer",
        "api_key_env",
        "token_env",
        "author",
        "model",
        "prompt_file",
        "path",
        "key",
        "keys",
        "answer_key",
        "urls",
        "batch",
        "authority",
        "secretary",
        "num_tokens",
    ],
)
def test_names_of_what_is_none(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"headers": {"Authorization": "Bearer abc"}}, {"headers": {"Authorization": NOT_STORED}}),
        ({"headers": {"X-Team": "a", "Accept": "x/y"}}, {"headers": {"X-Team": NOT_STORED, "Accept": "x/y"}}),
        ({"headers": {"X-Key": "${TEAM_KEY}"}}, {"headers": {"X-Key": "${TEAM_KEY}"}}),
        ({"headers": {"Authorization": "Bearer ${K}"}}, {"headers": {"Authorization": "Bearer ${K}"}}),
        ({"headers": {"Authorization": "abc${K}"}}, {"headers": {"Authorization": NOT_STORED}}),
        ({"extra_headers": ["A: b", "C: d"]}, {"extra_headers": [NOT_STORED, NOT_STORED]}),
        ({"api_key": "abc", "api_key_env": "K"}, {"api_key": NOT_STORED, "api_key_env": "K"}),
        ({"judge": {"deep": [{"password": "abc"}]}}, {"judge": {"deep": [{"password": NOT_STORED}]}}),
        ({"url": "http://user:pw@h/a?b=1"}, {"url": "http://***@h/a?b=1"}),
        ({"url": "https://h/a?x=1&sig=abc&key=d#e"}, {"url": "https://h/a?x=1&sig=***&key=***#e"}),
        ({"max_tokens": 5, "token": 7, "api_key": ""}, {"max_tokens": 5, "token": 7, "api_key": ""}),
        ({"urls": ["http://h:1/v1"], "batch": 8}, {"urls": ["http://h:1/v1"], "batch": 8}),
    ],
)
def test_what_is_stored(options, stored):
    assert without_secrets(options) == stored
    assert without_secrets(stored) == stored, "and nothing changes when it is stored again"


def test_what_is_missing_is_named():
    stored = without_secrets({"a": [{"token": "x"}], "headers": {"B": "c"}, "url": "http://u:p@h", "d": 1})
    assert list(missing_secrets(stored)) == ["a.0.token", "headers.B", "url"]


def test_remembered_secrets_are_masked_wherever_they_stand():
    remember_secrets(
        {"headers": {"Authorization": "Bearer s3cret/1"}, "url": "http://u:passw0rd@h?token=t0ken"}
    )
    text = "s3cret/1, b'Bearer s3cret/1', s3cret%2F1, passw0rd and t0ken"
    assert masked(text) == "***, b'***', ***, *** and ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("""headers={"Authorization"="Bearer abcdefgh"}""", """headers={"Authorization"="***"}"""),
        ("{'X-Api-Key': 'abc', 'n': 1}", "{'X-Api-Key': '***', 'n': 1}"),
        ("api_key = 'abc'", "api_key = '***'"),
        ("Authorization: Bearer abcdefgh.ij", "Authorization: Bearer ***"),
        ('password="${HERE}"', 'password="${HERE}"'),
        ("the token is missing: give one", "the token is missing: give one"),
        ("GET http://u:p@h/x?token=abc failed", "GET http://***@h/x?token=*** failed"),
    ],
)
def test_texts_are_masked_by_names_too(text, shown):
    assert masked(text) == shown


def test_addresses_without_secrets_are_as_they_were():
    for text in ("http://localhost:8000/v1", "a://b@", "no address: x@y", "http://h/p?size=3&q=key"):
        assert shown_address(text) == text.replace("b@", "***@")


def test_a_reference_to_the_environment(monkeypatch):
    monkeypatch.setenv("OWN_KEY", " abcd\n")
    assert with_environment("Bearer ${OWN_KEY}", "here") == "Bearer abcd"
    assert masked("got abcd") == "got ***"
    monkeypatch.delenv("OWN_KEY")
    with pytest.raises(ValueError, match="here refers to the environment variable OWN_KEY, which is not set"):
        with_environment("${OWN_KEY}", "here")
