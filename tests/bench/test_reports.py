"""What is computed from records: statistics, tables, comparisons, and the page."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynaxla.bench.answers import Check
from dynaxla.bench.html_report import make_page, write_report_page
from dynaxla.bench.record_comparison import compare_records, print_comparison
from dynaxla.bench.records import BackendResult, BenchRecord
from dynaxla.bench.result_tables import make_rows
from dynaxla.bench.sample_statistics import find_speedup, padded_ratio, quantile, spread_of
from dynaxla.errors import OptionError
from tests.bench.results import make_case, make_record, make_result


def test_quantiles_lie_between_samples() -> None:
    assert [quantile([4.0, 1.0, 2.0, 3.0], share) for share in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert spread_of([1.0, 2.0, 3.0]).median == 2.0
    assert spread_of([1.0, 2.0]).overlaps(spread_of([1.4, 4.0, 1.4]))
    assert not spread_of([1.0, 1.1]).overlaps(spread_of([2.0, 2.1]))


def test_a_speed_up_is_of_one_round() -> None:
    """The machine was slow in the second round: each backend took ten times as long."""
    case = make_case(make_result("eager", [2.0, 20.0, 2.0]), make_result("dynaxla", [1.0, 10.0, 1.0]))
    found = find_speedup(case, case.results[1])
    assert found is not None
    assert (found.low, found.median, found.high) == (2.0, 2.0, 2.0)
    assert find_speedup(case, make_result("failed", [])) is None


def test_padding_is_summed_over_calls() -> None:
    assert padded_ratio(make_result("dynaxla", [1.0], elements=[(10, 16), (30, 32)])) == 48 / 40
    assert padded_ratio(make_result("dynaxla", [1.0])) is None


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = make_result("dynaxla", [1.0, 2.0], elements=[[3, 4]], facts={"GFLOP": 2.0})
    case = make_case(make_result("eager", [1.0, 2.0]), result, inputs=[{"tokens": 3}], items=3, unit="tokens")
    record, path = make_record(case), tmp_path / "a" / "record.json"
    record.write(path)
    read = BenchRecord.read(path)
    assert json.dumps(dataclasses.asdict(read)) == json.dumps(dataclasses.asdict(record))
    assert read.cases[0].results[1].first == dataclasses.replace(result.first, again_s=[])  # type: ignore[type-var]
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(OptionError, match="no record of format 1"):
        BenchRecord.read(tmp_path / "other.json")


def test_columns_that_say_nothing_are_left_out() -> None:
    case = make_case(make_result("eager", [1.0]), make_result("dynaxla", [0.5], facts={"GFLOP": 2.0}))
    headings, rows = make_rows(case)
    assert headings == [
        *("backend", "check", "median, ms", "speed-up", "quartiles", "first, s", "second, s", "programs"),
        *("recompiles", "peak, MB", "of the pass", "GFLOP"),
    ]
    assert rows[1] == [
        *("dynaxla", "same (1e-06)", "500", "2.00", "2.00 - 2.00", "1.5", "1.5", "2", "0", "300", "100", "2"),
    ]


def _compare(before: list[float], after: list[float], **fields: object) -> str:
    old, new = (
        make_record(make_case(make_result("eager", [1.0] * 3), make_result("dynaxla", samples, **more)))
        for samples, more in ((before, {}), (after, fields))
    )
    return compare_records(old, new)[1].verdict


def test_changes_beyond_the_noise_are_told() -> None:
    assert _compare([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == "slower"
    assert _compare([1.0, 1.0, 1.0], [0.5, 0.5, 0.5]) == "faster"
    assert _compare([1.0, 1.0, 1.0], [1.03, 1.03, 1.03]) == "same"  # below the least change
    assert _compare([0.5, 1.0, 2.0], [0.8, 1.5, 3.0]) == "same"  # the quartiles overlap
    assert _compare([1.0, 1.0, 1.0], [], check=Check("differs")) == "wrong"


def test_a_slower_machine_is_no_slower_backend(capsys: pytest.CaptureFixture[str]) -> None:
    before = make_record(make_case(make_result("eager", [1.0] * 3), make_result("dynaxla", [0.5] * 3)))
    after = make_record(make_case(make_result("eager", [3.0] * 3), make_result("dynaxla", [1.5] * 3)))
    changes = compare_records(before, after)
    assert [(each.verdict, each.is_bad) for each in changes] == [("slower", False), ("same", False)]
    assert print_comparison(before, dataclasses.replace(after, versions={"torch": "2.14.0"}))
    assert "torch: 2.13.0 -> 2.14.0" in capsys.readouterr().out


def test_records_of_other_cases_cannot_be_compared() -> None:
    before, after = (make_record(make_case(make_result("eager", [1.0]), name=name)) for name in ("a", "b"))
    with pytest.raises(OptionError, match="no case and backend in common"):
        compare_records(before, after)


class _Page(HTMLParser):
    """Reads a page whose elements are closed in order, and gathers cells, captions and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_has_the_rows_and_the_plots(tmp_path: Path) -> None:
    elements = [[8, 16], [20, 32]]
    case = make_case(
        make_result("eager", [1.0, 1.2, 1.1]),
        make_result("dynaxla", [0.5, 0.6, 0.5], elements=elements),
        make_result("inductor", [], check=Check("differs", 0.1, "result 0: off by <1>")),
        inputs=[{"tokens": 8}, {"tokens": 20}],
    )
    before = make_record(make_case(make_result("eager", [1.0] * 3), make_result("dynaxla", [0.1] * 3)))
    write_report_page(make_record(case), tmp_path / "page.html", before)
    page = _Page((tmp_path / "page.html").read_text())
    assert page.addresses == []  # it needs no other file
    for row in make_rows(case)[1]:
        assert [cell for cell in row if cell not in page.texts] == []
    assert {"Speed-up against eager", "Latency", "First pass by stage", "Buckets of dynaxla", "slower"} <= set(
        page.texts
    )
    assert "inductor: result 0: off by <1>" in page.texts
    assert any("a <processor>" in text for text in page.texts)


def test_a_page_of_facts_alone() -> None:
    result = BackendResult("v5e", facts={"GFLOP": 3.0})
    page = _Page(make_page(make_record(make_case(result))))
    assert {"GFLOP", "3"} <= set(page.texts)
