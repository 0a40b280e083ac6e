"""A local server with the endpoints of the Hugging Face Hub by which a folder is uploaded.

GET  /api/whoami-v2                       the user of the token
POST /api/repos/create                    a repository, 409 if there is one
POST /api/validate-yaml                   the head of README.md
POST /api/models/REPO/preupload/main      file by file: "regular" (in the commit) or "lfs"
POST /REPO.git/info/lfs/objects/batch     where an LFS file goes; files that are there have no action
PUT  /lfs/OID, POST /lfs/OID/verify       its bytes
POST /api/models/REPO/commit/main         NDJSON: a header, and each file with its content or its LFS oid
"""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

WRITE, READ, NO_WRITE = "hf_write", "hf_read", "hf_nowrite"
"""Tokens: one that may write, one whose role is to read, and one that is refused for repositories."""

LFS_BYTES = 1000
"""Files from this size on are LFS files."""


class HubServer:
    """What was uploaded, and how the hub answers.

    Attributes:
        repos: repository -> {"private": bool, "files": name -> bytes}.
        requests: method and path of each request, in order.
        fail: path of requests (a part of it) -> status with which they are answered.
        tokens: tokens of the requests.
    """

    def __init__(self):
        self.repos, self.lfs, self.requests, self.fail, self.tokens = {}, {}, [], {}, set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = urlsplit(self.path).path
                hub.requests.append(f"{self.command} {path}")
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                hub.tokens.add(token) if token else None
                status = next((status for part, status in hub.fail.items() if part in path), None)
                status, reply = (
                    (status, {"error": "set by the test"}) if status else hub.reply(path, token, body)
                )
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, path, token, body):
        """Status and JSON of an answer."""
        if path.startswith("/lfs/"):
            return self._store(path, body)
        if token not in (WRITE, READ, NO_WRITE):
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
            role = "read" if token == READ else "write"
            return 200, {"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": role}}}
        if token == NO_WRITE:
            return 403, {"error": "you don't have the rights"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        return self._upload(path, body)

    def _create(self, asked):
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        private = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
        self.repos[name] = {"private": private, "files": {}}
        return 200, {"url": f"{self.url}/{name}"}

    def _upload(self, path, body):
        name = path.removeprefix("/api/models").lstrip("/").partition(".git/")[0]
        name = "/".join(name.split("/")[:2])
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._lfs_object(entry) for entry in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        if name not in self.repos:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LFS_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if "/commit/" in path:
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 200, {"id": name, "sha": "0" * 40}

    def _lfs_object(self, entry):
        href = f"{self.url}/lfs/{entry['oid']}"
        action = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
        return entry if entry["oid"] in self.lfs else {**entry, "actions": action}

    def _store(self, path, body):
        oid = path.split("/")[2]
        if path.endswith("/verify"):
            known = len(self.lfs.get(oid, b"")) == json.loads(body)["size"]
            return (200 if known else 404), {}
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "the content does not have this hash"}
        self.lfs[oid] = body
        return 200, {}

    def _commit(self, name, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[name]["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[name]["files"][value["path"]] = self.lfs[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


@contextmanager
def hub_server():
    """A running HubServer."""
    hub = HubServer()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
