"""A small HTTP server that stands for the Hub: what huggingface_hub's client asks of it when it pushes a model."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Use as `with Hub() as hub`, with the client's endpoint set to `hub.url`.

    Attributes:
        repositories: the files of each, as bytes by name.
        is_broken: whether commits are answered with an error of the server.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.is_broken = False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.send_error(404)  # no card is there yet

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, answer = 200, {}
        if self.path == "/api/repos/create":
            answer = self._create(json.loads(body))
        elif "/preupload/" in self.path:
            answer = {
                "files": [
                    {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
                ]
            }
        elif "/commit/" in self.path and self.server.is_broken:
            status, answer = 500, {"error": "the server broke down"}
        elif "/commit/" in self.path:
            answer = self._commit(body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Error-Message", answer.get("error", ""))
        self.end_headers()
        self.wfile.write(content)

    def _create(self, wish: dict) -> dict:
        repo = f"{wish.get('organization') or 'me'}/{wish['name']}"
        self.server.repositories[repo] = {}
        return {"url": f"{self.server.url}/{repo}", "name": repo, "id": repo}

    def _commit(self, body: bytes) -> dict:
        """Each line of the body is an operation; the files of this server are all sent in the commit itself."""
        repo = re.match("/api/models/(.+)/commit/", self.path)[1]
        for operation in map(json.loads, body.splitlines()):
            if operation["key"] == "file":
                file = operation["value"]
                self.server.repositories[repo][file["path"]] = base64.b64decode(file["content"])
        return {"commitUrl": f"{self.server.url}/{repo}/commit/0", "commitOid": "0" * 40, "pullRequestUrl": None}
