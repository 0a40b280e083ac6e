"""A server on this machine that answers, or fails to, as a test tells it."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, DROP = "hang", "drop"


@dataclass
class Reply:
    """body: text, or what becomes JSON. seconds: before it is sent."""

    body: object = ""
    status: int = 200
    headers: dict = field(default_factory=dict)
    seconds: float = 0.0


class Judge:
    """answer(request) -> Reply, HANG or DROP, for each POST; `models` answers GET.

    Attributes:
        asked: the JSON of all POSTs, in the order in which they came. times, headers: of each.
        most: the largest number of POSTs that were in flight at once.
    """

    def __init__(self, answer, models=("judge",), port=0):
        self.answer, self.asked, self.times, self.headers = answer, [], [], []
        self.most = self._now = 0
        self.get = Reply({"data": [{"id": name} for name in models]})
        self._lock, self._end = threading.Lock(), threading.Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(judge.get)

            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge._lock:
                    judge._now += 1
                    judge.most = max(judge.most, judge._now)
                    judge.asked.append(content)
                    judge.times.append(time.monotonic())
                    judge.headers.append(dict(self.headers))
                try:
                    said = judge.answer(content)
                    if said == HANG:
                        judge._end.wait(20)
                    elif said == DROP:
                        self.close_connection = True
                    else:
                        time.sleep(said.seconds)
                finally:
                    with judge._lock:
                        judge._now -= 1
                if isinstance(said, Reply):
                    self.reply(said)

            def reply(self, said):
                body = (said.body if isinstance(said.body, str) else json.dumps(said.body)).encode()
                self.send_response(said.status)
                for name, value in ({"Content-Length": str(len(body))} | said.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # a client that hung up

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
def judging(answer, **options):
    judge = Judge(answer, **options)
    try:
        yield judge
    finally:
        judge.close()


def in_turn(*replies):
    """The replies one after the other, then the last for ever."""
    left = list(replies)
    lock = threading.Lock()

    def answer(_):
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer
