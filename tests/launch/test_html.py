"""The page of `slm report --export FILE.html` in a real browser: marks, table, colours, size, no network."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser
from conftest import made_record, slm
from made_records import made, needs_browser, write_records, write_scaled_records

from slm_toolkit.record.files import find_records, write_record
from slm_toolkit.report.charts.html_page import html_page
from slm_toolkit.report.rows import Row

pytestmark = pytest.mark.quick

NUM_RECORDS = 200
SIZE_LIMIT_BYTES = 6e6
PANELS = ("speed", "losses")
NUM_FIRST = 24
"rows of a long table that are not folded up"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_records(folder / "runs", num_records=NUM_RECORDS)
    done = slm("report", str(folder / "runs"), "--export", str(folder / "out.html"))
    assert done.code == 0, done.err
    assert "left out" not in done.err
    return folder / "out.html"


@pytest.fixture(scope="module")
def tab(page: Path) -> Iterator[Browser]:
    pytest.importorskip("websockets", reason="pip install websockets")
    with browser() as started:
        started.resize(width=1280)
        started.open(page)
        yield started


def test_200_records_make_less_than_6_mb(page: Path) -> None:
    assert page.stat().st_size < SIZE_LIMIT_BYTES
    assert "The above copyright notice and this permission notice shall be included" in page.read_text()


@needs_browser
def test_nothing_is_fetched_and_the_console_is_silent(tab: Browser, page: Path) -> None:
    requests = [
        event["params"]["request"]["url"]
        for event in tab.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert requests[0] == page.as_uri()
    assert [url for url in requests[1:] if not url.startswith(("data:", "blob:"))] == []
    said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in tab.events if event["method"] in said] == []


@needs_browser
def test_plotly_knows_every_key_that_figures_use(tab: Browser) -> None:
    problems = tab.evaluate(  # plotly.js 4.1.1 can't check a legend, it raises
        "Object.values(figures).flatMap(({name, data, layout: {legend, ...layout}}) =>"
        " (Plotly.validate(data, layout) || [])"
        " .filter(problem => !['unused', 'invisible'].includes(problem.code))"
        " .map(problem => name + ': ' + problem.msg))"
    )
    assert problems == []


MARKS = (
    "Object.fromEntries([...document.querySelectorAll('.chart')].map(chart =>"
    " [chart.id.replace('chart-', ''), {"
    " bars: chart.querySelectorAll('.bars .point').length,"
    " lines: chart.querySelectorAll('.js-line').length}]))"
)


def type_into_filter(tab: Browser, words: str) -> None:
    tab.evaluate(
        f"(box => {{ box.value = {json.dumps(words)}; box.dispatchEvent(new Event('input')) }})"
        "(document.getElementById('filter'))"
    )


@needs_browser
def test_long_lists_begin_with_their_first_rows_and_no_box_scrolls_down(tab: Browser) -> None:
    assert tab.evaluate("document.querySelectorAll('tbody tr[data-label]').length") == NUM_FIRST
    assert tab.evaluate("document.querySelector('tbody tr.more').textContent") == "show the other 176 rows"
    marks = tab.evaluate(MARKS)
    assert marks["speed"]["bars"] == NUM_FIRST
    assert marks["losses"]["lines"] == 173  # curves lie on each other: there is room for all
    rest = "document.querySelector('#speed .rest').textContent"
    assert tab.evaluate(rest) == "without the 176 rows that are folded up in the table"
    scrolls = (
        "[...document.querySelectorAll('main *')].filter(each => each.scrollHeight > each.clientHeight + 1"
        " && ['auto', 'scroll'].includes(getComputedStyle(each).overflowY)).length"
    )
    assert tab.evaluate(scrolls) == 0


@needs_browser
def test_every_chart_has_its_marks(tab: Browser) -> None:
    tab.evaluate("document.querySelector('tbody tr.more button').click()")
    assert tab.evaluate("document.querySelectorAll('tbody tr[data-label]').length") == NUM_RECORDS
    marks = tab.evaluate(MARKS)
    assert tuple(marks) == PANELS
    # 180 measured runs, of which 7 (24, 49, ... 174) are out of memory
    assert marks["speed"]["bars"] == 173
    assert marks["losses"]["lines"] == 173


@needs_browser
def test_charts_follow_the_filter_of_the_table(tab: Browser) -> None:
    height = "document.getElementById('chart-speed').clientHeight"
    before = tab.evaluate(height)
    type_into_filter(tab, "ds_zero1 ok")
    # 180 measured runs of five strategies: 36 of each, and none of ds_zero1's is out of memory
    tab.wait_for("document.querySelectorAll('#chart-speed .bars .point').length === 36")
    marks = tab.evaluate(MARKS)
    assert marks["losses"]["lines"] == 36
    assert tab.evaluate(height) < before
    assert tab.evaluate("document.getElementById('count').textContent") == "40 of 200 rows"
    type_into_filter(tab, "")
    tab.wait_for("document.querySelectorAll('#chart-speed .bars .point').length === 173")


@needs_browser
def test_the_table_sorts_both_ways_by_number_with_unknown_last(tab: Browser) -> None:
    titles = tab.evaluate("[...document.querySelectorAll('th')].map(head => head.textContent)")
    column = titles.index("tokens/s")
    shown = (
        f"[...document.querySelectorAll('tbody tr[data-label]')].map(row => row.cells[{column}].textContent)"
    )
    click = f"document.querySelectorAll('th button')[{column}].click()"

    def numbers() -> list[float]:
        cells = tab.evaluate(shown)
        known = [cell for cell in cells if cell != "-"]
        assert cells[len(known) :] == ["-"] * (NUM_RECORDS - len(known))
        return [float(cell.replace(",", "")) for cell in known]

    tab.evaluate(click)
    first = numbers()
    assert first == sorted(first)
    assert len(set(first)) > 20
    tab.evaluate(click)
    assert numbers() == first[::-1]


@needs_browser
def test_a_phone_scrolls_down_only(tab: Browser) -> None:
    tab.resize(width=390, height=844)
    tab.wait_for("document.querySelector('#chart-speed .main-svg').clientWidth <= 390")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    tab.resize(width=1280)


@needs_browser
def test_a_phone_shows_strategy_status_and_rate_first_and_that_the_table_scrolls(tab: Browser) -> None:
    titles = "[...document.querySelectorAll('thead th')].map(head => head.textContent)"
    cells = "[...document.querySelector('tbody tr[data-label]').cells].map(cell => cell.textContent)"
    tab.resize(width=1280)  # whatever the test before left
    tab.wait_for(f"{titles}[0] !== 'strategy'")
    wide, row = tab.evaluate(titles), tab.evaluate(cells)
    tab.resize(width=390, height=844)
    tab.wait_for(f"{titles}[0] === 'strategy'")
    assert tab.evaluate(titles)[:3] == ["strategy", "status", "tokens/s"]
    assert tab.evaluate(cells)[:3] == [row[wide.index(title)] for title in ("strategy", "status", "tokens/s")]
    num_hidden = len(wide) - 3, len(wide) - 4  # the fourth column is seen if labels are short
    hint = tab.evaluate("document.getElementById('scrolls').textContent")
    assert hint in [f"scrolls sideways: {count} more columns\u00a0\u2192" for count in num_hidden]
    tab.resize(width=1280)
    tab.wait_for(f"{titles}[0] === {json.dumps(wide[0])}")


@needs_browser
def test_rows_fold_up_by_model_and_their_bars_with_them(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="pip install websockets")
    write_scaled_records(tmp_path / "runs")
    done = slm("report", str(tmp_path / "runs"), "--export", str(tmp_path / "page.html"))
    assert done.code == 0, done.err
    with browser() as page:
        page.resize(width=1280)
        page.open(tmp_path / "page.html")
        headings = page.evaluate("[...document.querySelectorAll('tr.fold')].map(line => line.textContent)")
        assert headings == [f"slm-{size}: 6 rows" for size in ("100m", "500m", "1b", "2b")]
        assert "model" not in page.evaluate(
            "[...document.querySelectorAll('thead th')].map(h => h.textContent)"
        )
        assert page.evaluate("document.querySelectorAll('#chart-speed .bars .point').length") == 24
        page.evaluate("document.querySelector('tr.fold button').click()")
        assert page.evaluate("document.querySelectorAll('tbody tr[data-label]').length") == 18
        assert page.evaluate("document.querySelectorAll('#chart-speed .bars .point').length") == 18
        # a title for each row
        assert page.evaluate("document.querySelectorAll('#chart-speed .annotation').length") == 18


def test_a_page_has_parity_and_commands_and_no_chart_without_data(tmp_path: Path) -> None:
    page, table = tmp_path / "out.html", tmp_path / "out.md"
    assert slm("report", "results/cpu", "--export", str(page), "--export", str(table)).code == 0
    text = page.read_text()
    assert "<li>parity holds against ddp over 20 steps" in text
    assert "- parity holds against ddp over 20 steps" in table.read_text()
    assert "# ddp\naccelerate launch --config_file /tmp/cpu/slm-10m-ddp-b2b65027c5e8/launch/ddp.yaml" in text
    assert 'id="chart-speed"' in text
    assert 'id="chart-losses"' not in html_page([Row([(Path("r"), made_record(losses=[]))])], left_out=[])


def test_no_text_of_a_record_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>{{table}}"
    path = write_record(dataclasses.replace(made(0), strategy=evil), tmp_path)
    records, _ = find_records([path])
    row = Row(records)
    text = html_page([row], left_out=[evil])
    assert "<script>alert" not in text
    assert "<b>{{" not in text
    assert "&lt;b&gt;{{table}}" in text
