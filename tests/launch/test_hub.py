"""Models, tokenizers and datasets of the hub: found, cached, or refused in one line and at once."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from chats import ROWS, write_rows
from conftest import SMALL_LLAMA, Finished, run, slm

NOWHERE = "http://127.0.0.1:9"  # discard: nothing listens there
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRAIN = ("python", "-m", "slm_toolkit.train", "--seq_len", "64", "--max_steps", "2")


def env_of(home: Path, endpoint: str = NOWHERE) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}


def said(done: Finished) -> list[str]:
    assert done.code == 2, done.err
    return done.err.strip().splitlines()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a hub that takes connections and never answers, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_id_without_a_network_is_refused_in_one_line(tmp_path: Path) -> None:
    asked = ("estimate", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct", "--gpu", "l4")
    first, hint = said(slm(*asked, env=env_of(tmp_path)))
    assert first == (
        f"error: can't reach {NOWHERE}, and there is no cached copy of the model "
        "'HuggingFaceTB/SmolLM2-135M-Instruct'"
    )
    assert hint.startswith("hint: download it once")
    first, _ = said(slm(*asked, env={**env_of(tmp_path), "HF_HUB_OFFLINE": "1"}))
    assert first.startswith("error: HF_HUB_OFFLINE is set, and there is no cached copy of the model")


def test_a_hub_that_never_answers_costs_two_seconds(tmp_path: Path, silent: str) -> None:
    begun = time.monotonic()
    first, hint = said(slm("estimate", "--model", "no/such", "--gpu", "l4", env=env_of(tmp_path, silent)))
    assert time.monotonic() - begun < 15  # on a busy machine; it was more than a minute
    assert first == f"error: can't reach {silent}, and there is no cached copy of the model 'no/such'"
    assert hint.startswith("hint: download it once")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("model", ("--model", "no/such")),
        ("dataset", ("--dataset", "no/such", "--model", "slm-1m")),
        ("tokenizer", ("--tokenizer_name", "no/such", "--dataset", "README.md", "--model", "slm-1m")),
    ],
)
def test_training_without_a_network_ends_in_one_line(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    done = run(*TRAIN, *flags, "--output_dir", str(tmp_path / "runs"), env=env_of(tmp_path))
    error, hint = said(done)[-2:]
    assert error == f"error: can't reach {NOWHERE}, and there is no cached copy of the {kind} 'no/such'"
    assert hint.startswith("hint: ")
    assert "Retrying" not in done.err


def test_a_cached_dataset_is_read_offline(tmp_path: Path) -> None:
    """As `datasets` keeps what it once loaded from the hub: made from a local file, then renamed."""
    from datasets import load_dataset

    rows = write_rows(tmp_path / "rows.jsonl", [ROWS["alpaca"]] * 16)
    load_dataset("json", data_files=[str(rows)], cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made" / "json").glob("*/*/*/dataset_info.json")
    kept = tmp_path / "datasets" / "some___tiny" / "default" / "0.0.0" / COMMIT
    shutil.copytree(made.parent, kept)
    (kept / "json-train.arrow").rename(kept / "tiny-train.arrow")
    info = json.loads((kept / "dataset_info.json").read_text())
    info |= {"builder_name": "json", "dataset_name": "tiny", "config_name": "default"}
    info["splits"]["train"]["dataset_name"] = "tiny"
    (kept / "dataset_info.json").write_text(json.dumps(info))
    words = ("--model", "slm-1m", "--dataset", "some/tiny", "--output_dir", str(tmp_path / "runs"))
    done = run(*TRAIN, *words, env=env_of(tmp_path))
    assert done.code == 0, done.err
    assert "weights: random, seed 0; tokenizer: bytes\n" in done.err
    refused = run(*TRAIN, *words[:3], "some/other", *words[4:], env=env_of(tmp_path))
    assert said(refused)[-2].endswith("no cached copy of the dataset 'some/other'")


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as a model's config.json takes."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = json.dumps(SMALL_LLAMA).encode()
        is_here = self.path in ("/", "/some/small/resolve/main/config.json")
        self.send_response(200 if is_here else 404)
        for name, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if not is_here:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        return


def test_a_hub_that_answers_is_asked(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = env_of(tmp_path, f"http://127.0.0.1:{server.server_port}")
    words = ("--gpu", "l4", "--strategy", "single", "--json")
    try:
        done = slm("estimate", "--model", "some/small", *words, env=env)
        absent = slm("estimate", "--model", "some/other", *words, env=env)
    finally:
        server.shutdown()
    assert done.code == 0, done.err
    # 384 x 32, twice; a layer: four matrices 32 x 32, three 32 x 64, two norms; the last norm
    assert (
        json.loads(done.out)[0]["num_trainable_params"] == 2 * 384 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    )
    assert said(absent)[0].startswith("error: can't get model 'some/other' from the hub: ")
    cached = slm("estimate", "--model", "some/small", *words, env=env_of(tmp_path))
    assert cached.code == 0, cached.err
    assert cached.err.startswith(f"note: can't reach {NOWHERE}: using cached copies\n")
