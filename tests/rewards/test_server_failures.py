"""Servers that fail: each way has its documented outcome, at the start and while images are scored."""

import contextlib
import gzip
import json
import math
import re
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
import torch

from g2rpo.rewards.registry import load_reward
from g2rpo.rewards.remote import servers

CPU = torch.device("cpu")
IMAGES, PROMPTS = torch.zeros(2, 3, 4, 4), ["a", "b"]
SELF_SIGNED = Path(__file__).parents[1] / "data" / "self_signed.pem"
NOBODY = "http://127.0.0.1:9"
TOKEN = "a-token-that-nobody-may-see"


def response(body=b"", status="200 OK", *, length=None, **headers):
    fields = {"Content-Length": len(body) if length is None else length, "Connection": "close"} | headers
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def scores(*values):
    return response(json.dumps({"scores": values}).encode())


class RawServer:
    """Answers each connection by `act(connection, request)`. `requests`: what it received."""

    def __init__(self, act, context=None):
        self.act, self.context, self.requests, self.end = act, context, [], threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"http{'s' if context else ''}://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with contextlib.suppress(OSError), connection:
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head and not head.startswith(b"\x16"):  # TLS
                part = connection.recv(65536)
                if not part:
                    return
                head += part
            head, _, body = head.partition(b"\r\n\r\n")
            length = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower()[:15] == b"content-length:"),
                0,
            )
            while len(body) < length:
                body += connection.recv(65536)
            self.requests.append(head.decode(errors="replace"))
            self.act(self, connection, head)

    def close(self):
        self.end.set()
        self.socket.close()


@pytest.fixture
def serve():
    opened = []

    def start(act, **options):
        opened.append(RawServer(act, **options))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def says(content):
    return lambda server, connection, head: connection.sendall(content)


def resets(server, connection, head):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


def hangs(server, connection, head):
    server.end.wait(10)


def drips(server, connection, head):
    connection.sendall(response(length=1000))
    while not server.end.wait(0.05):
        connection.sendall(b" ")


def streams_without_end(server, connection, head):
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while not server.end.is_set():
        connection.sendall(b" " * 65536)


def echoes(server, connection, head):
    """A debug page that quotes the headers of the request."""
    quoted = [line for line in head.split(b"\r\n") if line.lower().startswith((b"auth", b"x-team"))]
    connection.sendall(response(b"\n".join(quoted), "500 Internal Server Error"))


HTML = b"<html>please log in</html>"
FAILURES = {
    "refused": (None, "ConnectError", 0),
    "reset": (resets, "ReadError|RemoteProtocolError", 2),
    "hang": (hangs, r"no answer within 0.4 s", 2),
    "slow drip": (drips, r"no answer within 0.4 s", 2),
    "500": (says(response(b"", "500 Internal Server Error")), "HTTP 500", 2),
    "404": (says(response(b"", "404 Not Found")), "HTTP 404", 1),
    "redirect": (
        says(response(b"", "302 Found", Location=f"http://u:{TOKEN}@127.0.0.1:9/x?token={TOKEN}")),
        r"HTTP 302, a redirect to http://\*\*\*@127.0.0.1:9/x, which is not followed: images and keys",
        1,
    ),
    "wrong JSON": (says(response(b'{"scores": [1, 2')), "the answer is not JSON", 1),
    "another layout": (says(response(b'{"score": [1, 2]}')), 'no list "scores"', 1),
    "wrong length": (says(scores(1)), "does not have one score per image", 1),
    "NaN": (says(scores(math.nan, math.inf)), "a score is not finite", 1),
    "text": (says(scores("1", [2])), "a score is not a number", 1),
    "oversized": (says(response(b"[]", length=10**9)), "more than 1 MiB, which is not read", 1),
    "oversized stream": (streams_without_end, "more than 1 MiB, which is not read", 1),
    "oversized after unpacking": (None, "more than 1 MiB, which is not read", 1),
    "truncated": (says(response(b'{"scores": [1, 2]}', length=100)), "RemoteProtocolError", 2),
    "a web page": (says(response(HTML, Content_Type="text/html")), "the answer is not JSON", 1),
    "no HTTP": (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "RemoteProtocolError", 2),
    "deep": (says(response(b"[" * 100_000)), "the answer is not JSON", 1),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(servers, "LARGEST_ANSWER", 2**20)
    monkeypatch.setenv("SCORER_KEY", TOKEN)


def load(address, **options):
    quick = {"retries": 1, "backoff": 0.01, "timeout": 0.4, "check": False, "api_key_env": "SCORER_KEY"}
    return load_reward("http", CPU, {"urls": [address], **quick, **options})


@pytest.mark.parametrize("way", FAILURES)
def test_a_failure_gives_no_score_and_says_why(serve, way, caplog):
    act, message, requests = FAILURES[way]
    if way == "oversized after unpacking":
        act = says(response(gzip.compress(b" " * 2**22), Content_Encoding="gzip"))
    server = serve(act or hangs)
    reward, began = load(NOBODY if way == "refused" else server.address), time.monotonic()
    given = reward(IMAGES, PROMPTS)
    assert given.isnan().all() and given.dtype == torch.float32
    assert time.monotonic() - began < 5
    assert re.search(message, reward.last_error), reward.last_error
    assert len(server.requests) == requests
    assert TOKEN not in reward.last_error + caplog.text and "Traceback" not in caplog.text


def test_the_content_type_does_not_matter(serve):
    server = serve(says(response(b'{"scores": [1, 2]}', Content_Type="text/plain")))
    assert load(server.address)(IMAGES, PROMPTS).tolist() == [1, 2]


AT_THE_START = {
    "refused": "no server at .*ConnectError",
    "reset": "no server at .*(ReadError|RemoteProtocolError)",
    "hang": "no server at .*no answer within 0.4 s",
    "slow drip": "no server at .*no answer within 0.4 s",
    "redirect": r"answers with HTTP 302, a redirect to .* which is not followed.*give the final one",
    "oversized": "answers with more than 1 MiB, which is not read",
    "oversized stream": "answers with more than 1 MiB, which is not read",
    "no HTTP": "no server at .*RemoteProtocolError",
}


@pytest.mark.parametrize("kind", ["http", "unified"])
@pytest.mark.parametrize("way", AT_THE_START)
def test_at_the_start_it_is_an_error(serve, way, kind):
    server = serve(FAILURES[way][0] or hangs)
    address = NOBODY if way == "refused" else server.address
    options = {"check": True, "timeout": 0.4, "api_key_env": "SCORER_KEY"}
    options |= {"urls": [address]} if kind == "http" else {"servers": [address], "model": "m"}
    with pytest.raises(ValueError, match=AT_THE_START[way]) as raised:
        load_reward(kind, CPU, options)
    assert f"reward {kind}: " in str(raised.value) and TOKEN not in str(raised.value)


def test_no_redirect_takes_images_or_keys_along(serve):
    other = serve(says(scores(9, 9)))
    server = serve(says(response(b"", "307 Temporary Redirect", Location=f"{other.address}/x")))
    assert load(server.address)(IMAGES, PROMPTS).isnan().all()
    with pytest.raises(ValueError, match="a redirect"):
        load(server.address, check=True)
    assert other.requests == [] and len(server.requests) == 2


def test_an_answer_that_quotes_the_request_shows_no_key(serve, caplog):
    reward = load(serve(echoes).address, headers={"X-Team-Key": "another-secret"}, api_key_env="SCORER_KEY")
    assert reward(IMAGES, PROMPTS).isnan().all()
    assert "HTTP 500" in caplog.text and "***" in caplog.text
    assert TOKEN not in caplog.text and "another-secret" not in caplog.text


def test_a_certificate_that_nobody_signed(serve):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(SELF_SIGNED)
    server = serve(says(scores(9, 9)), context=context)
    reward = load(server.address)
    assert reward(IMAGES, PROMPTS).isnan().all() and "CERTIFICATE_VERIFY_FAILED" in reward.last_error
    plain = serve(says(scores(9, 9)))
    with pytest.raises(ValueError, match=r"no server at https://.*SSL"):
        load(plain.address.replace("http://", "https://"), check=True)
    assert server.requests == []
