"""--export: files read back, they are the rows of --json and the table's cells."""

import csv
import html
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from conftest import Finished, made_record

from slm_toolkit.cli.main import main
from slm_toolkit.record.files import write_record
from slm_toolkit.report.rows import Row, ranked
from slm_toolkit.report.tables.export import markdown_text

NASTY = 'a|b_c & 100% of $x,\n"quoted" [1] *# {~^\\}'
"what CSV and Markdown each give a meaning to"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: ddp, at 16,384 tokens per second, and one that failed for a reason of odd characters."""
    write_record(made_record(identity="1"), tmp_path / "runs" / "ddp")
    failed = made_record(identity="2", status="failed", reason=NASTY, strategy="mine", engine=None, losses=[])
    write_record(failed, tmp_path / "runs" / "mine")
    return tmp_path / "runs"


def report(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Finished:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return Finished(ended.value.code, *capsys.readouterr())


def rows_with(strategy: str) -> list[Row]:
    made = [made_record(strategy=name) for name in (strategy, "ddp")]
    return ranked([Row([(Path("r"), record)]) for record in made])


def test_csv_has_the_names_and_values_of_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (runs, "--baseline", runs)
    objects = json.loads(report(capsys, *words, "--json").out)
    done = report(capsys, *words, "--export", runs / "rows.csv")
    read = list(csv.DictReader(io.StringIO((runs / "rows.csv").read_text())))
    assert "│ mine" in done.out  # the table is printed, too
    assert done.code == 1  # a run failed, whatever is printed
    assert [list(row) for row in read] == [list(row) for row in objects]
    ddp, mine = read
    # 2 ranks x 4 sequences x 1024 tokens in 0.5 s
    assert float(ddp["tokens_per_second"]) == 16384
    assert (ddp["reason"], ddp["world_size"], ddp["kernels"]) == ("", "2", "plain")
    assert json.loads(ddp["losses"]) == [10.0] * 33
    assert json.loads(ddp["asked"])["seq_len"] == 1024
    assert json.loads(ddp["baseline"])["speed"] == "tie"
    assert mine["reason"] == NASTY
    assert mine["final_loss"] == mine["engine"] == ""


def test_markdown_escapes_and_aligns() -> None:
    lines = markdown_text(rows_with("a|b_c [x] *_d_")).splitlines()
    title, rule, first, second = lines[2:6]
    assert title.startswith("| strategy | status | rank | tokens/s | interval |")
    assert rule.startswith("| --- | --- | ---: | ---: | ---: |")
    assert first.startswith(r"| a\|b_c \[x\] \*\_d\_ | ok | 1= | 16,384 | ±5.0% |")
    assert second.startswith("| ddp | ok | 1= | 16,384 |")
    assert r"\$ per 1M tokens" in title  # GitHub takes what stands between two dollars as a formula
    assert lines[7] == "- **No row is clearly fastest: both tie (16,384 tokens/s).**"


def test_markdown_shows_html_as_it_was_typed_in_both_dialects() -> None:
    """CommonMark as on GitHub, and Python-Markdown as in mkdocs, which knows no backslash before < and &."""
    from markdown_it import MarkdownIt

    typed = "<script>alert(1)</script> & &lt;b&gt; <img src=x onerror=alert(1)>"
    text = markdown_text(rows_with(typed))
    pages = [MarkdownIt("commonmark").enable("table").render(text)]
    if importlib.util.find_spec("markdown") is not None:
        pages.append(importlib.import_module("markdown").markdown(text, extensions=["tables", "fenced_code"]))
    for page in pages:
        assert f"<td>{html.escape(typed, quote=False)}</td>" in page
        assert not re.search("<(script|img|b)[ >]", page)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--csv", "rows.csv"), "--csv was removed: --export FILE.csv"),
        (("--export", "rows.txt"), "rows.txt is no .csv or .md or .html file"),
        (("--export", "FOLDER.html"), "file in an existing folder"),
    ],
)
def test_what_cannot_be_written_is_bad_input(
    words: tuple[str, ...],
    said: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    Path("FOLDER.html").mkdir()
    done = report(capsys, runs, *words)
    assert done.code == 2
    assert said in done.err
    assert "hint: " in done.err
    assert done.out == ""
