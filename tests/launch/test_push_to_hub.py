"""--push_to_hub, against a small server that answers as the hub does."""

import base64
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import launch, record_under
from huggingface_hub import HfApi

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.command_line import check_training
from slm_toolkit.run.hub_upload import upload_model

pytestmark = pytest.mark.quick


class Hub(ThreadingHTTPServer):
    """Keeps the files of each commit, by name, and every request's body by its path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.bodies: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.bodies[self.path] = body
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            return self._answer({"error": "you may not write here"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            return self._answer({"url": f"{self.server.url}/{name}"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            return self._answer({"files": modes})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            url = f"{self.server.url}/{repository}/commit/{'1' * 40}"
            return self._answer({"commitUrl": url, "commitOid": "1" * 40})
        return self._answer({})

    def do_GET(self) -> None:
        if self.server.refuses:
            return self._answer({"error": "you may not read here"}, 403)
        return self._answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def _answer(self, content: object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def environment(hub: Hub) -> dict[str, str]:
    token = {"HF_TOKEN": "hf_test", "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return {**token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def test_the_saved_model_is_uploaded_once_by_two_ranks(hub: Hub, tmp_path: Path) -> None:
    done = launch(
        *("--model", "slm-1m", "--max_steps", "2", "--seq_len", "32", "--run_name", "pushed"),
        *("--push_to_hub", "--hub_model_id", "team/mine", "--hub_private_repo"),
        *("--output_dir", str(tmp_path)),
        config="accel_configs/ddp.yaml",
        env=environment(hub),
    )
    assert done.code == 0, done.err
    asked = json.loads(hub.bodies["/api/repos/create"])
    assert (asked["organization"], asked["name"]) == ("team", "mine")
    assert asked.get("private") is True or asked.get("visibility") == "private"
    saved = {path.name: path.read_bytes() for path in (tmp_path / "pushed" / "model").iterdir()}
    assert hub.files == saved
    assert {"config.json", "model.safetensors"} <= saved.keys()
    assert hub.tokens == {"Bearer hf_test"}
    assert record_under(tmp_path)["hub_url"] == f"{hub.url}/team/mine"
    assert f"uploaded: {hub.url}/team/mine" in done.err
    assert "hf_test" not in done.err + (tmp_path / "pushed" / "record.json").read_text()


def test_a_hub_that_refuses_leaves_the_model_and_the_command_to_upload_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    here = partial(HfApi, endpoint=hub.url, token="hf_test")
    monkeypatch.setattr("slm_toolkit.run.hub_upload.HfApi", here)
    hub.refuses = True
    with pytest.raises(ValueError, match="can't upload the model to me/mine: ") as error:
        upload_model(tmp_path, RunConfig(hub_model_id="me/mine"), run_name="run")
    assert str(error.value).endswith(f"after `hf auth login`: hf upload me/mine {tmp_path}")
    assert "403" in str(error.value)


def test_a_missing_token_is_noticed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="--push_to_hub without a token\nhint: `hf auth login`"):
        check_training([RunConfig(push_to_hub=True)])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="--push_to_hub with HF_HUB_OFFLINE"):
        check_training([RunConfig(push_to_hub=True)])


def test_an_upload_needs_a_saved_model() -> None:
    problems = RunConfig(push_to_hub=True, save_final_model=False).problems()
    assert problems == ["--push_to_hub with --save_final_model false: it needs a saved model"]
    assert RunConfig(push_to_hub=True).with_defaults(has_gpu=False).save_final_model is True
    assert RunConfig(hub_model_id="me/mine").problems() == ["--hub_model_id without --push_to_hub"]
