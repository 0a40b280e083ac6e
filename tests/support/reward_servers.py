"""A local HTTP server whose answers and failures are set by a test."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, DROP = "hang", "drop"


@dataclass
class Reply:
    """An answer: its body (text, or an object that is sent as JSON), sent after `seconds`."""

    body: object = ""
    status: int = 200
    headers: dict = field(default_factory=dict)
    seconds: float = 0.0


class RewardServer:
    """Answers each POST by `answer(request) -> Reply, HANG or DROP`, and GET by the list of `models`.

    Attributes:
        requests: the JSON of all POSTs, in the order of arrival.
        times, headers: arrival time and headers of each POST.
        most: maximum number of concurrent POSTs.
    """

    def __init__(self, answer, models=("judge",), port=0):
        self.answer, self.requests, self.times, self.headers = answer, [], [], []
        self.most = self._now = 0
        self.get = Reply({"data": [{"id": name} for name in models]})
        self._lock, self._end = threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(server.get)

            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server._now += 1
                    server.most = max(server.most, server._now)
                    server.requests.append(content)
                    server.times.append(time.monotonic())
                    server.headers.append(dict(self.headers))
                try:
                    reply = server.answer(content)
                    if reply == HANG:
                        server._end.wait(20)
                    elif reply == DROP:
                        self.close_connection = True
                    else:
                        time.sleep(reply.seconds)
                finally:
                    with server._lock:
                        server._now -= 1
                if isinstance(reply, Reply):
                    self.reply(reply)

            def reply(self, reply):
                body = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
                self.send_response(reply.status)
                for name, value in ({"Content-Length": str(len(body))} | reply.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # the client closed the connection

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.address = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.address}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(answer, **options):
    server = RewardServer(answer, **options)
    try:
        yield server
    finally:
        server.close()


def in_turn(*replies):
    """Returns an `answer` that gives the replies in order and then repeats the last one."""
    left = list(replies)
    lock = threading.Lock()

    def answer(_):
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer
