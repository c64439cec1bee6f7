"""A Hugging Face hub on this machine, as far as loading a model asks it: real HTTP, real files."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from http_stub import Answer, HTTPStub


class Hub(HTTPStub):
    """Serves the folders of models; in a thread.

    Attributes:
        repositories: by name, its revisions: a name or a commit, and the folder with its files.
        gated: names of models whose files need a licence.
        mode: "ok"; "hang" takes connections and never answers; "503" is out of order.
        asked: the path of each request so far.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, tuple[str, Path]]] = {}
        self.gated: set[str] = set()
        self.mode = "ok"
        self.asked: list[str] = []
        self.released = threading.Event()  # what hangs
        super().__init__(self._answer)

    def publish(self, name: str, folder: Path, revision: str = "main") -> str:
        """Have the files of the folder be the revision of the model; its commit."""
        contents = [(file.name, file.read_bytes()) for file in sorted(folder.iterdir())]
        commit = hashlib.sha1(repr(contents).encode()).hexdigest()
        revisions = self.repositories.setdefault(name, {})
        revisions[revision] = revisions[commit] = (commit, folder)
        return commit

    def close(self) -> None:
        """From now on connections are refused."""
        self.released.set()
        super().close()

    def _answer(self, path: str, _: bytes) -> Answer | None:
        self.asked.append(path)
        if self.mode == "hang":
            self.released.wait()
            return None
        return (503, {}, b"out of order") if self.mode == "503" else self.answer(path)

    def answer(self, path: str) -> Answer:
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        revisions = self.repositories.get(name)
        if revisions is None:
            return _refused(401, "RepoNotFound")
        asked = rest[1] if len(rest) > 1 else "main"
        if asked not in revisions:
            return _refused(404, "RevisionNotFound")
        commit, folder = revisions[asked]
        if is_api:
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            body: Any = {
                "id": name, "modelId": name, "sha": commit, "pipeline_tag": "fill-mask",
                "library_name": "transformers", "siblings": files, "tags": [], "private": False,
            }  # fmt: skip
            if rest[:1] == ["tree"]:
                body = [
                    {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "0"}
                    for each in folder.iterdir()
                ]
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        if name in self.gated:
            return _refused(403, "GatedRepo")
        file = folder / "/".join(rest[2:])
        if not file.is_file():
            status, headers, content = _refused(404, "EntryNotFound")
            return status, {**headers, "X-Repo-Commit": commit}, content
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content


def _refused(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, code.encode()
