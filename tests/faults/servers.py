"""Reward servers that fail, at the check before a run or from some request on."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from faults.jobs import Case, Job, Result
from faults.outcomes import HANG, LOST, MESSAGE, OK, SILENT, TRACEBACK, Expected, Outcome, refusal
from faults.runs import Cases, World, free_port, newest_step, prepare, run_words

TIMEOUT = 3.0  # seconds, an option of the reward
GOOD_ANSWERS = 2  # before a server begins to fail
GOOD = b'{"scores": [%s]}'
# Way to fail -> (what the server sends, what the message says of it). Placeholders are filled by `_answer`.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "refused": ("", ("refused", "ConnectError", "no server", "disconnected")),  # it may go during a request
    "reset": ("reset", ("reset", "ReadError", "RemoteProtocolError", "disconnected", "closed")),
    "hangs": ("hang", ("no answer", "time.?out", "within")),
    "drips": ("drip", ("no answer", "time.?out", "within", "slow", "took")),
    "500": ("HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops", ("500",)),
    "404": ("HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nNo", ("404",)),
    "redirect": (
        "HTTP/1.1 302 Go\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n",
        ("302", "redirect"),
    ),
    "not JSON": ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ("JSON",)),
    "another length": ('json:{"scores": [1.0]}', ("one score per image", "length", "as many")),
    "NaN and text": ('json:{"scores": [NaN, "good", NaN, "good"]}', ("not finite", "not a number")),
    "oversized": ("big", ("large", "size", "MB", "MiB", "limit", "bytes")),
    "truncated": (
        'HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{"scores": [1.0',
        ("incomplete", "closed", "RemoteProtocolError", "peer", "cut off", "truncated"),
    ),
    "another content type": (
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 39\r\n\r\n"
        "<html><body>Please log in</body></html>",
        ("JSON", "html"),
    ),
    "TLS": ("tls", ("TLS", "SSL", "certificate", "ConnectError", "protocol", "no answer within")),
}
# These fail before the run; a check by GET accepts any answer, so that the others show in the first rollout.
AT_THE_START = ("refused", "reset", "hangs", "redirect", "TLS")


def server_cases(world: World, count: int) -> Cases:
    """Each way to fail, from the first request on and, in the second round, after two good answers."""
    for number in range(count):
        way = list(WAYS)[number % len(WAYS)]
        late = number // len(WAYS) % 2 == 1
        yield f"servers:{number}", _of(world, f"servers:{number}", way, late)


def _of(world: World, name: str, way: str, late: bool) -> Callable[[Path], Case]:
    return lambda folder: _failing(folder, world, name, way, late)


def _failing(folder: Path, world: World, name: str, way: str, late: bool) -> Case:
    """The run stops with one message that names the server and the cause, and its iterations are saved."""
    prepare(folder)
    port, kind = free_port(), f"{way}, after two good answers" if late else way
    server = None if way == "refused" and not late else _serve(port, way, late)
    scheme = "https" if way == "TLS" else "http"
    address = f"{scheme}://127.0.0.1:{port}"
    options = (
        f'reward_options.http={{urls=["{address}"],timeout={TIMEOUT},retries=1,backoff=0.05,batch=4,'
        'headers={"X-Token"="very-secret-token"}}'
    )
    changes = [
        "rewards={http=1.0}",
        options,
        "eval_every=0",
        "keep_best=none",
        "compare_images=0",
        "sample_every=0",
    ]
    words = [word for word in run_words(*changes) if not word.startswith(("keep_best", "eval_prompts"))]
    try:
        # Proxy variables must not send a request to this machine elsewhere.
        proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": None}
        result: Result = yield Job(words, folder, environment=proxies)
    finally:
        if server is not None:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    verdict, detail = _judged(result, folder, address, way, late)
    return Outcome(name, kind, verdict, detail)


def _judged(result: Result, folder: Path, address: str, way: str, late: bool) -> tuple[str, str]:
    if result.timed_out:
        return HANG, result.text[-300:]
    if result.traceback:
        return TRACEBACK, result.traceback
    done = result.trace.get("updated", 0)
    if result.code == 0:
        return SILENT, f"the run finished without rewards: {result.text[-300:]}"
    if done > max(newest_step(folder / "run"), 0):
        return LOST, f"{done} iterations were done, {newest_step(folder / 'run')} saved"
    cause = WAYS[way][1] if not (late and way == "TLS") else WAYS["refused"][1]
    says = Expected(file=(re.escape(address), r"\bhttp\b"), found=cause, allowed=".")
    verdict, detail = refusal(result, says)
    if verdict == MESSAGE and detail.startswith("only after") and (late or way not in AT_THE_START):
        verdict, detail = OK, ""
    shown = [p.name for p in folder.rglob("*") if p.is_file() and b"very-secret-token" in p.read_bytes()]
    if "very-secret-token" in result.text or shown:
        return SILENT, f"the header's secret is in {', '.join(shown) or 'the output'}"
    return verdict, detail


def _serve(port: int, way: str, late: bool) -> int:
    """Starts a server in a process of its own and returns its number; `late`: two good answers come first."""
    listener = socket.create_server(("127.0.0.1", port))
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    answered = mmap.mmap(-1, 1)  # shared by the processes that answer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            try:
                _answer(connection, way, late, answered)
            finally:
                os._exit(0)
        connection.close()


def _answer(connection: socket.socket, way: str, late: bool, answered: mmap.mmap) -> None:
    """Answers the requests of one connection."""
    with connection:
        while (request := _request(connection)) is not None:
            _, body = request
            count = len(json.loads(body)["images"]) if body else 0
            if late and (not count or answered[0] < GOOD_ANSWERS):
                answered[0] += count > 0
                scores = ", ".join(str(0.1 * (i + 1)) for i in range(count)).encode()
                _send(connection, GOOD % scores)
                continue
            if not count and way not in AT_THE_START:
                _send(connection, b"{}")
                continue
            if not _fail(connection, way):
                return


def _request(connection: socket.socket) -> tuple[bytes, bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.I)
    while length and len(body) < int(length[1]):
        body += connection.recv(65536)
    return head, body


def _send(connection: socket.socket, body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def _fail(connection: socket.socket, way: str) -> bool:
    """Sends the failing answer; returns whether the connection stays open."""
    answer = WAYS[way][0]
    if answer == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        return False
    if answer == "hang":
        time.sleep(60)
        return False
    if answer == "drip":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
        for _ in range(600):
            connection.sendall(b" ")
            time.sleep(0.1)
        return False
    if answer == "big":
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n{"scores": [')
        for _ in range(4000):
            connection.sendall(b"1.0, " * 20000)
        return False
    if answer == "tls" or not answer:
        return False  # not a TLS server, or one that goes away
    if answer.startswith("json:"):
        _send(connection, answer.removeprefix("json:").encode())
        return True
    connection.sendall(answer.encode())
    return "Content-Length: 4000" not in answer
