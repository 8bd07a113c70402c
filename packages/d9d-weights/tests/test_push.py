"""Tests of ``d9d state push`` against a local stand-in of the Hub, with the real library."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_weights.state.command as command
import d9d_weights.state.push as push
import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.state.command import app
from d9d_weights.state.push import Push, push_state
from safetensors.torch import save_file
from typer.testing import CliRunner

pytest.importorskip("huggingface_hub")

REPOSITORY = "someone/tiny"


@dataclass
class Hub:
    """Stand-in of the Hub: what its clients created and uploaded."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    commits: list[tuple[str, str]] = field(default_factory=list)
    refuses: bool = False


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, value: Any, status: int = 200, **headers: str) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            name = self.path.partition("/api/models/")[2].partition("?")[0]
            if hub.refuses:
                self.answer({"error": "Invalid username or password."}, 401)
            elif name in hub.private:
                self.answer({"id": name, "private": hub.private[name], "tags": [], "siblings": []})
            else:
                self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            content = self.body()
            if self.path.endswith("/repos/create"):
                asked = json.loads(content)
                hub.private[REPOSITORY] = (
                    asked.get("visibility", "private" if asked.get("private") else "public") == "private"
                )
                self.answer({"url": f"{hub.address}/{REPOSITORY}"})
            elif self.path.endswith("/validate-yaml"):  # the model card
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                # In one of the library's protocols; the choice for large files is the Hub's.
                names = [file["path"] for file in json.loads(content)["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                self.answer({"files": modes})
            else:
                for line in map(json.loads, content.splitlines()):
                    if line["key"] == "header":
                        hub.commits.append((self.path.rpartition("/")[2], line["value"]["summary"]))
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer({"success": True, "commitUrl": f"{hub.address}/{REPOSITORY}/commit/1", "commitOid": "1"})

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants
    import huggingface_hub.hf_api as hf_api

    stand_in = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(stand_in))
    stand_in.address = f"http://127.0.0.1:{server.server_port}"
    for module in (constants, hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", stand_in.address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield stand_in
    server.shutdown()
    server.server_close()


def export(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    save_file({"weight": torch.arange(6.0).reshape(2, 3)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}), "utf-8")
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n# tiny\n", "utf-8")
    return directory


def test_all_files_of_an_export_arrive_in_a_new_private_repository(tmp_path: Path, hub: Hub) -> None:
    model = export(tmp_path / "run" / "model")
    (model / "optimizer.pt").write_bytes(b"pickle")
    done = push_state(Push(str(tmp_path / "run"), REPOSITORY), lambda: True)
    assert done == f"{hub.address}/{REPOSITORY}/commit/1"
    assert hub.private == {REPOSITORY: True}
    assert hub.files == {
        name: (model / name).read_bytes() for name in ("README.md", "config.json", "model.safetensors")
    }
    assert hub.tokens == {"Bearer hf_of_the_environment"}


def test_nothing_is_created_without_consent(tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert push_state(Push(str(export(tmp_path / "model")), REPOSITORY), lambda: False) is None
    assert (hub.private, hub.files) == ({}, {})
    said = capsys.readouterr().out
    assert "model.safetensors" in said
    assert f"to {REPOSITORY}, which is new and private" in said


def test_a_public_repository_takes_files_only_with_the_option(tmp_path: Path, hub: Hub) -> None:
    hub.private[REPOSITORY] = False
    model = str(export(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"someone/tiny exists and is public; add --public"):
        push_state(Push(model, REPOSITORY), lambda: True)
    assert not hub.files
    push_state(Push(model, REPOSITORY, public=True), lambda: True)
    assert "model.safetensors" in hub.files


def test_a_path_of_this_machine_is_not_uploaded(tmp_path: Path, hub: Hub) -> None:
    model = export(tmp_path / "model", _name_or_path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"config\.json, line 1: .* is a path of this machine; remove the path"):
        push_state(Push(str(model), REPOSITORY), lambda: True)
    assert not hub.files


def test_an_adapter_is_uploaded_with_the_name_that_its_base_has_on_the_hub(tmp_path: Path, hub: Hub) -> None:
    base, adapter = export(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(2, 3)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 2}), "utf-8")
    (adapter / "README.md").write_text("---\nlibrary_name: peft\nbase_model: base\n---\n# tiny\n", "utf-8")
    with pytest.raises(CheckpointError, match="give the Hub's name of the base model by --base-model"):
        push_state(Push(str(adapter), REPOSITORY), lambda: True)
    push_state(Push(str(adapter), REPOSITORY, base_model="org/base"), lambda: True)
    assert json.loads(hub.files["adapter_config.json"]) == {"base_model_name_or_path": "org/base", "r": 2}
    assert b'base_model: "org/base"\n---' in hub.files["README.md"]
    assert str(base) in (adapter / "adapter_config.json").read_text("utf-8")  # the local files are unchanged


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "there is no model directory"),
        (lambda path: (export(path / "model"), export(path / "adapter")), "the run has a model and an adapter"),
        (lambda path: (export(path) / "link").symlink_to("config.json"), "this is a link"),
        (lambda path: (export(path) / "model.safetensors").unlink(), "weights"),
    ],
)
def test_a_directory_that_is_no_complete_export_is_refused(tmp_path: Path, make: Any, said: str, hub: Hub) -> None:
    make(tmp_path / "there")
    with pytest.raises(CheckpointError, match=said):
        push_state(Push(str(tmp_path / "there"), REPOSITORY), lambda: True)
    assert not hub.private


def test_a_refusal_of_the_hub_says_how_to_log_in(tmp_path: Path, hub: Hub) -> None:
    hub.refuses = True
    with pytest.raises(CheckpointError, match=r"the request to the Hub failed: .*401.*hf auth login"):
        push_state(Push(str(export(tmp_path / "model")), REPOSITORY), lambda: True)


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "a/..b", "a b/c", "/b", "-a/b"])
def test_a_name_that_is_no_repository_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="is no name of a repository; write OWNER/NAME"):
        push_state(Push(str(export(tmp_path / "model")), name), lambda: True)


@pytest.mark.parametrize(
    ("words", "commit", "private"),
    [
        (["--yes"], ("main", "Upload with d9d"), True),
        (["--yes", "--public", "--revision", "dev", "--message", "third try"], ("dev", "third try"), False),
    ],
)
def test_the_command_uploads_without_a_question_if_told_to(
    tmp_path: Path, hub: Hub, words: list[str], commit: tuple[str, str], private: bool
) -> None:
    result = CliRunner().invoke(app, ["push", str(export(tmp_path / "model")), REPOSITORY, *words])
    assert result.exit_code == 0, result.output
    assert f"{hub.address}/{REPOSITORY}/commit/1" in result.output
    assert (hub.commits, hub.private) == ([commit], {REPOSITORY: private})


def test_the_command_gives_an_adapter_the_name_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Push] = []
    monkeypatch.setattr(push, "push_state", lambda asked, _: seen.append(asked) or "uploaded")
    result = CliRunner().invoke(app, ["push", "adapter", REPOSITORY, "--base-model", "someone/base"])
    assert (result.exit_code, result.output) == (0, "uploaded\n")
    assert seen == [Push("adapter", REPOSITORY, base_model="someone/base")]


def test_the_command_uploads_nothing_if_no_terminal_can_answer(tmp_path: Path, hub: Hub) -> None:
    result = CliRunner().invoke(app, ["push", str(export(tmp_path / "model")), REPOSITORY], input="y\n")
    assert result.exit_code == 1
    assert "nothing was uploaded; to upload without a question, add --yes" in result.output
    assert (hub.private, hub.files) == ({}, {})


@pytest.mark.parametrize(("answer", "uploads"), [("y", True), ("n", False)])
def test_the_command_asks_at_a_terminal(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, answer: str, uploads: bool
) -> None:
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = CliRunner().invoke(app, ["push", str(export(tmp_path / "model")), REPOSITORY], input=f"{answer}\n")
    assert result.exit_code == 0, result.output
    assert "upload these files?" in result.output
    assert bool(hub.files) is uploads
