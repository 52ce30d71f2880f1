"""A server on this machine that speaks the hub's protocol, with what may go wrong there."""

import contextlib
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass
class Hub:
    """Repositories by name, each the files by name; and what goes wrong.

    Attributes:
      url: where it is.
      commit: what `main` means.
      sizes: what is said of the sizes of files that are not as large.
      gated: repositories whose files may not be read.
      down: whether every answer is 503.
      cut: how many bytes of a file are sent before the connection ends, for the next so many times.
      slow: seconds between two parts of a file.
      after: called with a file's name when it was sent.
      requests: what was asked for: "HEAD ORG/NAME/FILE", "GET ORG/NAME/FILE 100-", "ORG/NAME".
    """

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    commit: str = COMMIT
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    down: bool = False
    cut: list[int] = dataclasses.field(default_factory=list)
    slow: float = 0.0
    after: dict[str, object] = dataclasses.field(default_factory=dict)
    requests: list[str] = dataclasses.field(default_factory=list)

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were sent, in part or whole."""
        return [request.split()[1].split("/", 2)[2] for request in self.requests if request.startswith("GET ")]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve on a free port; afterwards nothing answers there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.hub.down:
            return self._error(503, "")
        if path[:2] == ["api", "models"]:
            name, revision = "/".join(path[2:4]), path[5]
            self.hub.requests.append(name)
        elif path[2:3] != ["resolve"]:
            return self._error(404, "")
        else:
            name, revision = "/".join(path[:2]), path[3]
        if name not in self.hub.repositories:
            return self._error(404, "RepoNotFound")
        if revision not in ("main", self.hub.commit):
            return self._error(404, "RevisionNotFound")
        files = self.hub.repositories[name]
        if path[:2] == ["api", "models"]:
            siblings = [
                {"rfilename": file, "size": self.hub.sizes.get(file, len(content))} for file, content in files.items()
            ]
            return self._send(json.dumps({"id": name, "sha": self.hub.commit, "siblings": siblings}).encode(), {})
        file = "/".join(path[4:])
        asked = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {name}/{file} {asked.removeprefix('bytes=')}".strip())
        if name in self.hub.gated:
            return self._error(401, "GatedRepo")
        if file not in files:
            return self._error(404, "EntryNotFound")
        etag = hashlib.sha256(files[file]).hexdigest()
        linked = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit, "X-Linked-Size": str(len(files[file]))}
        self._send(files[file], linked, file)

    def _send(self, content: bytes, headers: dict[str, str], file: str = "") -> None:
        total, first = len(content), 0
        if asked := self.headers.get("Range"):
            first = int(asked.removeprefix("bytes=").split("-")[0])
            headers = {**headers, "Content-Range": f"bytes {first}-{total - 1}/{total}"}
        self.send_response(206 if asked else 200)
        for name, value in {**headers, "Content-Length": str(total - first)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(ConnectionError):
            if file.endswith((".safetensors", ".gguf")) and self.hub.cut:
                self.wfile.write(content[first : first + self.hub.cut.pop(0)])
                self.close_connection = True
                return
            step = 4096 if self.hub.slow and file.endswith(".safetensors") else max(1, total)
            for start in range(first, total, step):
                self.wfile.write(content[start : start + step])
                self.wfile.flush()
                time.sleep(self.hub.slow if step == 4096 else 0)
        if callable(after := self.hub.after.get(file)):
            after()

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
