"""What a record or a name of somebody else's may not do where it is shown; no secret is ever shown."""

import csv
import io
import json
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_LLAMA, made_record, slm
from made_records import needs_browser, traced

from slm_toolkit.base.secrets import is_secret, without_secrets
from slm_toolkit.record.files import find_records, write_record
from slm_toolkit.strategy.strategy import find_strategy

SECRETS = {"HF_TOKEN": "hf_aNeverToBeSeenToken01", "WANDB_API_KEY": "wandbNeverToBeSeen0123456789"}
EVIL = "</script><script>window.ran=1</script><img src=x onerror='window.ran=2'><b>"


@pytest.fixture(scope="module")
def evil_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that failed, two that ran, one traced; EVIL in every text that is shown."""
    import dataclasses

    folder = tmp_path_factory.mktemp("evil")
    base = made_record()
    model = {**base.model, "name": EVIL, "source": EVIL}
    config = {**base.asked["config"], "dataset": EVIL, "attn_implementation": EVIL}
    changes = {
        **{"model": model, "asked": {**base.asked, "config": config}, "gpu": EVIL, "cpu": EVIL},
        "versions": {"allocator": EVIL},
        **{"eval_losses_by_set": {EVIL: [2.0]}, "run_name": EVIL, "attn_implementation": EVIL},
        "phase_seconds": [{EVIL: [0.1] * 33, "data": [0.1] * 33}] * 2,
        "gpu_watch": [{"throttle_reasons": {EVIL: 3}}] * 2,
    }
    for number, more in enumerate(
        (
            {"strategy": f"{EVIL}1", "identity": "1"},
            {"strategy": f"{EVIL}[/][red]", "identity": "2"},
            {
                "strategy": "ddp",
                "identity": "3",
                "status": "failed",
                "reason": f"{EVIL}\x1b]0;owned\x07\x1b[2J",
            },
        )
    ):
        write_record(dataclasses.replace(base, **{**changes, **more}), folder / str(number))
    (folder / "3").mkdir()
    at = traced(0)
    write_record(dataclasses.replace(at, strategy=EVIL, model=model, identity="4"), folder / "3")
    return folder


@needs_browser
def test_a_page_of_hostile_records_has_no_element_of_theirs(evil_records: Path, tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="pip install websockets")
    from browser import browser

    done = slm("report", str(evil_records), "--export", str(tmp_path / "page.html"))
    assert done.code == 1, done.err  # one failed
    assert "Traceback" not in done.err
    with browser() as tab:
        tab.open(tmp_path / "page.html")
        tab.wait_for("document.querySelectorAll('.js-plotly-plot').length > 0")
        for element in tab.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.id)"):
            tab.evaluate(f"document.getElementById({json.dumps(element)}).scrollIntoView()")
        assert tab.evaluate("window.ran === undefined")
        assert tab.evaluate("document.querySelectorAll('img, b, iframe, a[href^=javascript]').length") == 0
        # our page's own: figures, plotly and the page's script
        own = (ROOT / "slm_toolkit/report/charts/page/report.html").read_text().count("<script")
        assert tab.evaluate("document.querySelectorAll('script').length") == own
        assert tab.evaluate("document.body.textContent.includes('window.ran=1')")
        said = ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
        assert [event for event in tab.events if event["method"] in said] == []


def test_a_terminal_is_told_nothing_by_a_record(evil_records: Path) -> None:
    for folder in (evil_records, evil_records / "3"):  # of one traced run also its memory
        done = slm("report", str(folder))
        assert done.code in (0, 1), done.err
        assert "Traceback" not in done.err, done.err
        assert not [sign for sign in ("\x1b", "\x07", "\x9b") if sign in done.out + done.err]
    assert "[/][red]" in slm("report", str(evil_records)).out  # markup is text


def test_a_models_name_is_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[" / "]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    for words in (("estimate", "--gpu", "l4"), ("doctor", "--gpu", "l4"), ("recommend", "--gpu", "l4:1")):
        done = slm(words[0], "--model", str(folder), "--strategy", "ddp", *words[1:], cwd=tmp_path)
        assert done.code in (0, 1), done.err
        assert "Traceback" not in done.err


def test_an_error_quotes_no_escape_sequence_and_no_book(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text('distributed_type: "\\e[2J\\a"\nnum_processes: 2\n')
    done = slm("estimate", "--strategy", "evil.yaml", cwd=tmp_path)
    assert (done.code, "\x1b" in done.err, "hint: " in done.err) == (2, False, True)
    (tmp_path / "long.yaml").write_text(f"distributed_type: {'x' * 100_000}\n")
    done = slm("estimate", "--strategy", "long.yaml", cwd=tmp_path)
    assert (done.code, len(done.err) < 5000) == (2, True)


def test_exports_hold_no_formula_and_no_cell_of_their_own(evil_records: Path, tmp_path: Path) -> None:
    import dataclasses

    record = find_records([evil_records / "0"])[0][0][1]
    for number, name in enumerate(("=cmd|' /C calc'!A0", "+1", "@SUM(A1)", "a|b\n| c |", "-2")):
        write_record(
            dataclasses.replace(record, strategy=name, identity=f"x{number}"), tmp_path / "runs" / str(number)
        )
    files = [tmp_path / "rows.csv", tmp_path / "rows.md"]
    slm("report", str(tmp_path / "runs"), "--export", str(files[0]), "--export", str(files[1]))
    rows = list(csv.DictReader(io.StringIO(files[0].read_text())))
    names = {row["strategy"] for row in rows}
    assert names == {"'=cmd|' /C calc'!A0", "'+1", "'@SUM(A1)", "a|b\n| c |", "'-2"}
    table = files[1].read_text().splitlines()
    table = [line.replace("\\|", "") for line in table if line.startswith("|")]
    assert len(table) == 2 + 5  # a head, a rule and a line per row
    assert len({line.count("|") for line in table}) == 1


# secrets


@pytest.mark.quick
def test_names_of_secrets() -> None:
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "hub_token",
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_TRACKING_PASSWORD",
    ):
        assert is_secret(name), name
    for name in (
        "num_tokens",
        "pad_token",
        "tokenizer_name",
        "TOKENIZERS_PARALLELISM",
        "max_tokens",
        "author",
    ):
        assert not is_secret(name), name


@pytest.mark.quick
def test_a_commands_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    words = ["COMET_API_KEY=abc", "--hub_token", "abc", "--hf-token=abc", "--x", f"u:{SECRETS['HF_TOKEN']}@h"]
    hidden = ["COMET_API_KEY=***", "--hub_token", "***", "--hf-token=***", "--x", "u:***@h"]
    assert without_secrets(words) == hidden


@pytest.mark.quick
def test_settings_that_hold_a_secret_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"comet": {"enabled": True, "api_key": "abc"}}))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("distributed_type: NO\nenv:\n  HF_TOKEN: abc\n")
    for name, key in (("mine.yaml", "comet.api_key"), ("other.yaml", "env.HF_TOKEN")):
        with pytest.raises(ValueError, match=f"{key} is a secret") as refused:
            find_strategy(str(tmp_path / name))
        assert "abc" not in str(refused.value)


def test_a_comparison_leaves_no_secret_of_the_environment_behind(tmp_path: Path) -> None:
    words = ("--model", "slm-1m", "--strategy", "ddp", "--max_steps", "2", "--num_processes", "1")
    words += ("--report_to", "tensorboard", "--output_dir", str(tmp_path / "runs"))
    done = slm("compare", *words, env=SECRETS, cwd=tmp_path)
    assert done.code == 0, done.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"record.json", "log.txt", "ddp.yaml"} <= {path.name for path in files}
    for value in SECRETS.values():
        assert [str(path) for path in files if value.encode() in path.read_bytes()] == []
        assert value not in done.out + done.err


def test_characters_that_a_terminal_obeys_or_nobody_sees_are_spelt_out(tmp_path: Path) -> None:
    """JSON's short escapes, marks of direction, characters of no width; letters of other languages stay."""
    hidden = "\r\b\f\x1b\x7f\x9b\u202e\u2066\u200b\u200d\ufeff\u2028\U000e0041"
    path = write_record(
        made_record(status="failed", strategy=f"grün 中{hidden}", reason=f"é{hidden}"), tmp_path
    )
    for text in (path.read_text(), json.dumps(json.loads(path.read_text()), ensure_ascii=False)):
        path.write_text(text)
        files = [tmp_path / name for name in ("rows.csv", "rows.md")]
        done = [
            slm("report", str(path), "--export", str(files[0]), "--export", str(files[1])),
            slm("report", str(path), "--json"),
        ]
        for shown in (*(each.out + each.err for each in done), *(file.read_text() for file in files)):
            assert not set(hidden) & set(shown)
            assert "é" in shown or "\\u00e9" in shown
