"""A reward server in 30 lines: put your model into `score`, then run `python http_reward_server.py 8765`."""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageStat


def score(image, prompt, metadata):
    """Returns the score, or None if the image has none. Here: its brightness, 0 to 1."""
    return ImageStat.Stat(image.convert("L")).mean[0] / 255


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"ready": True})  # g2rpo asks once, when it starts

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in request["images"]]
        samples = zip(images, request["prompts"], request["metadata"], strict=True)
        self.answer({"scores": [score(*sample) for sample in samples]})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 64  # connections that may wait
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
