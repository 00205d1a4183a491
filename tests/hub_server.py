"""A small HTTP server that stands for the Hub: what huggingface_hub's client asks when it pushes and loads a model.

Repositories live in memory. Writing takes the token; a commit is applied whole or not at all, as the real one is.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


class Hub(ThreadingHTTPServer):
    """Use as `with Hub(token) as hub`, with HF_ENDPOINT set to `hub.url`.

    Attributes:
        repositories: by "owner/name".
        requests: method and path of all that was asked.
        broken: the name of a handler that answers with an error of the server, if any.
    """

    daemon_threads = True

    def __init__(self, token: str, user: str = "me"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.user, self.broken = token, user, None
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str) -> dict[str, bytes]:
        repository = self.repositories[repo]
        return repository.commits[repository.branches["main"]]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "", **more):
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _handle(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        body = self._body()
        headers, answer, status = {}, {}, 200
        try:
            verb = self.command.replace("HEAD", "GET")
            matches = ((re.fullmatch(pattern, path), name) for method, pattern, name in ROUTES if method == verb)
            found, name = next((match for match in matches if match[0]), (None, ""))
            if found is None:
                raise _Refused(404, f"nothing at {path}")
            if self.server.broken == name:
                raise _Refused(500, "the server broke down")
            if verb != "GET" and name not in ("validate", "upload"):
                self._authorize()
            with self.server.lock:
                answer, headers = getattr(self, name)(body, **found.groupdict())
        except _Refused as refused:
            status, answer = refused.status, {"error": str(refused), **refused.more}
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(content), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _authorize(self):
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            raise _Refused(401, "Invalid username or password.")

    def _repository(self, repo: str) -> Repository:
        repository = self.server.repositories.get(repo)
        if repository is None:
            raise _Refused(404, "Repository not found", "RepoNotFound")
        if repository.private:
            self._authorize()
        return repository

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(repo)
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise _Refused(404, "Invalid rev id", "RevisionNotFound")
        return sha, repository.commits[sha]

    def whoami(self, body):
        self._authorize()
        return {"type": "user", "name": self.server.user, "orgs": [], "auth": {}}, {}

    def create(self, body):
        wish = json.loads(body)
        repo = f"{wish.get('organization') or self.server.user}/{wish['name']}"
        url = f"{self.server.url}/{repo}"
        if repo in self.server.repositories:
            raise _Refused(409, "You already created this model repo", url=url)
        private = wish.get("private") or wish.get("visibility") == "private"
        self.server.repositories[repo] = Repository(private=bool(private))
        self.server.repositories[repo].commit("main", {".gitattributes": b""})
        return {"url": url, "name": repo, "id": repo}, {}

    def validate(self, body):
        errors = card_errors(json.loads(body)["content"])
        if errors:
            raise _Refused(400, "; ".join(errors))
        return {"errors": [], "warnings": []}, {}

    def preupload(self, body, repo, revision):
        self._files(repo, revision)
        large = (".safetensors", ".png", ".bin")
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(large) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        return {"files": modes}, {}

    def batch(self, body, repo):
        self._repository(repo)
        objects = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.server.uploads:
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/storage/{wanted['oid']}"}}
        return {"transfer": "basic", "objects": objects}, {}

    def upload(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "the content is not what was announced")
        self.server.uploads[oid] = body
        return {}, {}

    def commit(self, body, repo, revision):
        repository, (_, former) = self._repository(repo), self._files(repo, revision)
        files = dict(former)
        for line in filter(None, body.splitlines()):
            operation = json.loads(line)
            of = operation["value"]
            if operation["key"] == "file":
                files[of["path"]] = base64.b64decode(of["content"])
            elif operation["key"] == "lfsFile":
                if of["oid"] not in self.server.uploads:
                    raise _Refused(400, "the file was not uploaded")
                files[of["path"]] = self.server.uploads[of["oid"]]
            elif operation["key"] == "deletedFile":
                del files[of["path"]]
        sha = repository.commit(revision, files)
        return {"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None}, {}

    def info(self, body, repo, revision="main"):
        sha, files = self._files(repo, revision)
        siblings = [{"rfilename": name} for name in files]
        private = self.server.repositories[repo].private
        answer = {"id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": siblings, "tags": []}
        if "README.md" in files:
            answer["cardData"] = metadata(files["README.md"].decode())
        return answer, {}

    def tree(self, body, repo, revision, folder=""):
        _, files = self._files(repo, revision)
        inside = {name: content for name, content in files.items() if name.startswith(folder)}
        if not inside:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        oids = {name: hashlib.sha1(content).hexdigest() for name, content in inside.items()}
        return [{"type": "file", "path": name, "oid": oids[name], "size": len(inside[name])} for name in inside], {}

    def resolve(self, body, repo, revision, path):
        sha, files = self._files(repo, revision)
        if path not in files:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        return files[path], {"ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"', "X-Repo-Commit": sha}


ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>.+)", "preupload"),
    ("POST", rf"/api/models/{NAME}/commit/(?P<revision>.+)", "commit"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/storage/(?P<oid>\w+)", "upload"),
    ("GET", rf"/api/models/{NAME}", "info"),
    ("GET", rf"/api/models/{NAME}/revision/(?P<revision>.+)", "info"),
    ("GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)/?(?P<folder>.*)", "tree"),
    ("GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


def metadata(card: str) -> dict | None:
    """The metadata of a card, if it has any."""
    front = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    return yaml.safe_load(front[1]) if front else None


def card_errors(text: str) -> list[str]:
    """What is wrong with a card's metadata by the Hub's specification of model cards, of the fields that we write."""
    data, errors = metadata(text), []
    if data is None:
        return ["no metadata"]
    repo_ids = [*filter(None, [data.get("base_model")]), *data.get("datasets", [])]
    errors += [f"{name!r} is no id" for name in repo_ids if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)]
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append("tags must be words")
    if not re.fullmatch(r"[a-z0-9.-]*", data.get("license", "")):
        errors.append(f"license {data['license']!r} is no identifier")
    for model in data.get("model-index", []):
        for result in model["results"]:
            task, dataset = result["task"], result["dataset"]
            if not (model["name"] and task["type"] and dataset["type"] and dataset["name"]):
                errors.append("a result lacks its model, task or dataset")
            for metric in result["metrics"]:
                if not isinstance(metric["type"], str) or not isinstance(metric["value"], (int, float)):
                    errors.append(f"{metric} is no metric")
    return errors
