"""Servers on this machine are asked directly, whatever the proxy variables say; others as these say."""

import json
import math
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from support.reward_servers import Reply, serving

from g2rpo.rewards.registry import load_reward
from g2rpo.rewards.remote.options import is_loopback

CPU = torch.device("cpu")
IMAGES, PROMPTS = torch.zeros(2, 3, 4, 4), ["a", "b"]
VARIABLES = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"]


class Proxy:
    """Answers every request as a reward server would, with scores of -1. `requests`: what it was asked."""

    def __init__(self):
        self.requests = requests = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def handle_request(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                requests.append((self.command, self.path, self.headers.get("Authorization"), content))
                asked = json.loads(content) if content else {"prompts": []}
                said = {"scores": [-1.0] * len(asked.get("prompts", [])), "data": [{"id": "judge"}]}
                said["choices"] = [{"message": {"content": "Alignment Score: 1"}}]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            do_GET = do_POST = do_CONNECT = handle_request

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def proxy(monkeypatch):
    for name in (*VARIABLES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    proxy = Proxy()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


@contextmanager
def judge():
    """A server that gives both kinds of reward the score 5."""
    said = {"scores": [5.0, 5.0], "choices": [{"message": {"content": "Alignment Score: 5"}}]}
    with serving(lambda request: Reply(said)) as judge:
        yield judge


def scores(kind, address, check=True):
    """Of both images by `http` or `unified` at that address, the look at the start included."""
    urls = {"urls": [address]} if kind == "http" else {"servers": [f"{address}/v1"], "model": "judge"}
    urls |= {"axes": ["Alignment"]} if kind == "unified" else {}
    common = {"backoff": 0.01, "retries": 0, "timeout": 5.0, "check": check, "api_key_env": "SCORER_KEY"}
    return load_reward(kind, CPU, {**urls, **common})(IMAGES, PROMPTS).tolist()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "secret")


@pytest.mark.parametrize("no_proxy", [None, "", "example.com", "*"])
@pytest.mark.parametrize("variable", VARIABLES)
def test_no_variable_sends_what_is_for_this_machine_to_a_proxy(proxy, monkeypatch, variable, no_proxy):
    monkeypatch.setenv(variable, proxy.address)
    if no_proxy is not None:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    with judge() as server:
        assert scores("http", server.address) == [5, 5]
    assert proxy.requests == []


FORMS = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0.0.0.0",
    "0",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::]",
    "[::1]",
    "127.0.0.2",
    "127.255.255.254",
    "scorer.localhost",
]


@pytest.mark.parametrize("kind", ["http", "unified"])
@pytest.mark.parametrize("host", FORMS)
def test_no_form_of_this_machine_goes_to_a_proxy(proxy, monkeypatch, host, kind):
    monkeypatch.setenv("ALL_PROXY", proxy.address)
    monkeypatch.setenv("http_proxy", proxy.address)
    with judge() as server:
        # Not every form reaches a server that listens at 127.0.0.1 alone: then there is no score.
        found = scores(kind, f"http://{host}:{server.port}", check=False)
        assert found == [5, 5] if reaches(host, server.port) else all(map(math.isnan, found))
    assert proxy.requests == []


def reaches(host, port):
    try:
        socket.create_connection((host.strip("[]"), port), timeout=5).close()
    except OSError:
        return False
    return True


def test_the_look_at_the_start_does_not_go_to_a_proxy_either(proxy, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.address)
    for kind in ("http", "unified"):
        with judge() as server:
            assert scores(kind, server.address) == [5, 5]
        with pytest.raises(ValueError, match="no server at"):  # the proxy would have answered
            scores(kind, server.address)
    assert proxy.requests == []


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:9", "not a proxy", "ftp://127.0.0.1:9"])
def test_a_variable_that_cannot_be_used_does_not_matter_on_this_machine(proxy, monkeypatch, value):
    monkeypatch.setenv("ALL_PROXY", value)
    with judge() as server:
        assert scores("http", server.address) == [5, 5]


@pytest.mark.parametrize("kind", ["http", "unified"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_other_machines_are_asked_through_the_proxy(proxy, monkeypatch, variable, kind):
    monkeypatch.setenv(variable, proxy.address)
    assert scores(kind, "http://scorer.example:9") == ([-1, -1] if kind == "http" else [1, 1])
    paths = ("", "") if kind == "http" else ("/v1/models", "/v1/chat/completions")
    asked = {(command, path.rstrip("/")) for command, path, *_ in proxy.requests}
    assert asked == {
        ("GET", f"http://scorer.example:9{paths[0]}"),
        ("POST", f"http://scorer.example:9{paths[1]}"),
    }


def test_other_machines_are_asked_directly_where_no_proxy_names_them(proxy, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.address)
    monkeypatch.setenv("NO_PROXY", "invalid")
    found = scores("http", "http://127.0.0.1.invalid:9", check=False)  # a name that exists nowhere
    assert all(map(math.isnan, found)) and proxy.requests == []


def test_of_several_servers_each_is_asked_in_its_own_way(proxy, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.address)
    with judge() as server:
        options = {"urls": [server.address, "http://scorer.example:9"], "batch": 2, "timeout": 5.0}
        reward = load_reward("http", CPU, options)
        assert sorted(reward(IMAGES, PROMPTS).tolist() + reward(IMAGES, PROMPTS).tolist()) == [-1, -1, 5, 5]
    assert {path for _, path, *_ in proxy.requests} == {"http://scorer.example:9/"}


@pytest.mark.parametrize("host", [*FORMS, "0177.0.0.1"])
def test_what_is_on_this_machine(host):
    assert is_loopback(f"http://{host}:8000/v1") and is_loopback(f"https://{host}")


@pytest.mark.parametrize(
    "host",
    [
        "scorer.example",
        "localhost.example.com",
        "notlocalhost",
        "127.0.0.1.example.com",
        "128.0.0.1",
        "10.0.0.1",
        "126.255.255.255",
        "192.168.1.1",
        "[::2]",
        "[fe80::1]",
        "[::ffff:10.0.0.1]",
        "localhost2",
    ],
)
def test_what_is_not(host):
    assert not is_loopback(f"http://{host}:8000/v1")
