"""`python -m conformance.upstream` on a made-up device-generic file, its strict list and its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import upstream
from conformance.upstream_record import RECORD, join_outcomes, read_record, write_record
from conformance.upstream_table import (
    append_outcome,
    find_errors,
    read_expected,
    read_outcomes,
    write_page,
    write_table,
)
from conformance.upstream_worker import DIED, FAILS, NOT_RUN, SAME, SKIPPED, SLOW, Outcome

ROOT = Path(__file__).parents[2]
MADE_UP = """
import os
import unittest
import torch
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, onlyCPU, onlyNativeDeviceTypes
from torch.testing._internal.common_utils import TestCase

class TestMadeUp(TestCase):
    def setUp(self):
        super(self.__class__, self).setUp()

    @dtypes(torch.float32, torch.int64)
    @onlyNativeDeviceTypes
    def test_add(self, device, dtype):
        x = torch.ones(3, device=device, dtype=dtype)
        self.assertEqual(x.device.type, torch.device(device).type)
        self.assertEqual(x + x, torch.full((3,), 2, device=device, dtype=dtype))

    def test_differs(self, device):
        self.assertEqual(torch.device(device).type, "cpu", msg="no CPU")

    def test_ends(self, device):
        if torch.device(device).type != "cpu":
            os._exit(7)

    def test_never_ends(self, device):
        while torch.device(device).type != "cpu":
            pass

    @onlyCPU
    def test_of_the_cpu(self, device):
        pass

    def test_fails_everywhere(self, device):
        raise unittest.SkipTest("not today") if "cpu" in device else ValueError

class TestOfNoDevice(TestCase):
    def test_is_left_out(self):
        raise ValueError

instantiate_device_type_tests(TestMadeUp, globals())
"""


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(MADE_UP)
    (tmp_path / "test_broken.py").write_text("import no_such_module_anywhere")
    expected, log, page = tmp_path / "expected.tsv", tmp_path / "log.jsonl", tmp_path / "page.md"
    record = tmp_path / "outcomes.tsv"
    write_record([Outcome("test_made_up.py", "TestMadeUp.test_never_ends_dynaxla", SLOW, "over 3 s", 3.0)], record)
    listed = ["TestMadeUp.test_differs_dynaxla", "TestMadeUp.test_add_dynaxla_int64"]
    expected.write_text("".join(f"test_made_up.py\t{name}\tits reason\n" for name in listed))
    command = [
        sys.executable,
        "-m",
        "conformance.upstream",
        "--tests",
        tmp_path,
        "--limit",
        "3",
        "--log",
        log,
        "--resume",
        "--record",
        "--outcomes",
        record,
    ]
    command += ["--files", "test_broken.py", "test_made_up.py", "--expected", expected, "--table", page]
    finished = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )

    statuses = {outcome.test.removeprefix("TestMadeUp."): outcome.status for outcome in read_outcomes(log)}
    assert statuses == {
        "": NOT_RUN,
        "test_add_dynaxla_float32": SAME,
        "test_add_dynaxla_int64": SAME,
        "test_differs_dynaxla": FAILS,
        "test_ends_dynaxla": DIED,
        "test_fails_everywhere_dynaxla": NOT_RUN,
        "test_of_the_cpu_dynaxla": SKIPPED,
    }
    in_record = {outcome.test.removeprefix("TestMadeUp."): outcome.status for outcome in read_record(record)}
    assert {"": NOT_RUN, **in_record} == {**statuses, "test_never_ends_dynaxla": SLOW}
    assert finished.returncode == 1
    assert "passes though listed: test_made_up.py TestMadeUp.test_add_dynaxla_int64" in finished.stdout
    assert "died, not listed: test_made_up.py TestMadeUp.test_ends_dynaxla: exit code 7" in finished.stdout
    assert "not run, not listed: test_broken.py" in finished.stdout
    assert "test_differs" not in finished.stdout
    assert "All tests of test_made_up.py." in " ".join(page.read_text().split())  # wherever the line ends
    assert "| test_made_up.py | 7 | 7 | 2 | 1 | 1 | 1 | 1 | 1 | 40.0% |" in page.read_text()


def _outcome(test: str, status: str) -> Outcome:
    return Outcome("test_x.py", test, status)


def test_the_list_is_strict() -> None:
    outcomes = [
        _outcome("a", SAME),
        _outcome("b", FAILS),
        _outcome("c", SLOW),
        _outcome("d", DIED),
        _outcome("e", SKIPPED),
    ]
    names = {"test_x.py": ["a", "b", "c", "d", "e"]}
    assert find_errors(outcomes, {("test_x.py", "b"): "why", ("test_x.py", "d"): "why"}, names) == []
    assert find_errors(outcomes, {("test_x.py", "b"): "why"}, names) == ["died, not listed: test_x.py d: "]
    wrong = {("test_x.py", name): "why" for name in "abdz"}
    assert find_errors(outcomes, wrong, names) == [
        "passes though listed: test_x.py a",
        "listed, but there is no such test: test_x.py z",
    ]
    assert find_errors(outcomes, {("test_x.py", "[bd]"): "why"}, names) == []
    assert find_errors(outcomes, {("test_x.py", "[a-d]"): "why"}, names) == ["passes though listed: test_x.py a"]
    assert find_errors([_outcome("", NOT_RUN)], {}, {}) == ["not run, not listed: test_x.py : "]
    assert find_errors([_outcome("", NOT_RUN)], {("test_x.py", ""): "why"}, {}) == []


def test_a_log_that_was_cut_off_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_outcomes(log) == []
    first = Outcome("test_x.py", "a", FAILS, "a tab\tand a line\nmore", 1.5)
    append_outcome(log, first)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"file": "test_x.py"})[:9])
    assert read_outcomes(log) == [first]


def test_the_latest_outcome_of_a_test_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = [_outcome("a", FAILS), _outcome("b", SAME), _outcome("a", SAME)]
    for outcome in outcomes:
        append_outcome(log, outcome)
    assert read_outcomes(log) == [outcomes[2], outcomes[1]]


def test_the_page_says_which_tests_were_taken() -> None:
    names = {file: [f"test_{i}" for i in range(9)] for file in ("test_a.py", "test_b.py", "test_c.py")}
    taken = {"test_a.py": names["test_a.py"], "test_b.py": upstream.draw(names["test_b.py"], "test_b.py", 7)[:4]}
    taken["test_c.py"] = [upstream.draw(names["test_c.py"], "test_c.py", 7)[8]]
    outcomes = [Outcome(file, test, SAME) for file, tests in taken.items() for test in tests]
    assert upstream.tell_choice(outcomes, names, 7) == (
        "All tests of test_a.py. 4 tests drawn at random (`--sample 4 --seed 7`) of test_b.py. 1 chosen tests of test_c.py."
    )


def test_the_rate_is_of_what_runs() -> None:
    outcomes = [
        _outcome(name, status)
        for name, status in zip("abcdef", (SAME, SAME, FAILS, SLOW, SKIPPED, NOT_RUN), strict=True)
    ]
    assert "| test_x.py | 9 | 6 | 2 | 1 | 1 | 0 | 1 | 1 | 50.0% | 0.0 |" in write_table(outcomes, {"test_x.py": 9})
    page = write_page(outcomes, {"test_x.py": 9}, {("test_x.py", "c"): "its reason"}, 20.0, "how")
    assert "| 1 | its reason |" in page
    assert "- test_x.py d" in page


def test_files_count_by_their_tests_in_the_weighted_rate() -> None:
    outcomes = [Outcome("test_x.py", name, status) for name, status in zip("abc", (SAME, SAME, NOT_RUN), strict=True)]
    outcomes += [Outcome("test_y.py", name, status) for name, status in zip("ab", (SAME, FAILS), strict=True)]
    totals = {"test_x.py": 300, "test_y.py": 100}
    page = write_page(outcomes, totals, {}, 20.0, "how")
    assert "the rate is 83.3% (standard error 11.8%)." in page  # 50 * sqrt(1 / 2) of 300
    assert "the rate is 100.0%." in write_page(outcomes, totals, {}, 20.0, "how", drawn=outcomes[:3])


def test_chosen_tests_say_nothing_of_the_others() -> None:
    names = [f"test_{i}" for i in range(9)]
    by_first, by_second = (upstream.draw(names, "test_x.py", seed) for seed in upstream.SEEDS)
    taken = {*by_first[:3], *by_second[:2], by_first[8]} - {by_second[2], by_first[3]}
    outcomes = [Outcome("test_x.py", name, SAME) for name in names if name in taken]
    drawn = {outcome.test for outcome in upstream.take_drawn(outcomes, {"test_x.py": names})}
    assert drawn == {*by_first[:3], *by_second[:2]}


def test_a_larger_sample_has_the_smaller() -> None:
    names = [f"test_{i}" for i in range(50)]
    small, large, all_, matching = (
        upstream.choose(names, "test_x.py", upstream.parse(["--tests", ".", *arguments]))
        for arguments in (["--sample", "5"], ["--sample", "20"], [], ["-k", "_1$"])
    )
    assert len(small) == 5
    assert large[:5] == small
    assert len(set(large)) == 20
    assert (all_, matching) == (names, ["test_1"])


def test_one_test_of_those_that_differ_in_dtype() -> None:
    names = [f"T.test_{op}_dynaxla_{dtype}" for op in "abc" for dtype in ("float32", "int64")]
    left = upstream.take_one_of_each(names[::-1], ["T.test_b_dynaxla_int64"])
    assert left == ["T.test_a_dynaxla_int64", "T.test_c_dynaxla_int64"]
    outcomes = [Outcome("test_x.py", test, SAME) for test in (*left, "T.test_b_dynaxla_int64")]
    assert upstream.tell_choice(outcomes, {"test_x.py": names}, 0) == (
        "At least one test of those that differ in dtype alone (`--one-dtype`) of test_x.py."
    )


def _recorded() -> list[Outcome]:
    name = "T.test_mul_broadcast"
    return [
        Outcome("test_x.py", f"{name}_dynaxla_complex64", FAILS, "Error: 1e-3", 0.4),
        Outcome("test_x.py", f"{name}_dynaxla_float32", SAME, "", 0.1),
        Outcome("test_x.py", f"{name}_dynaxla_float32_bfloat16", SAME, "", 0.1),
        Outcome("test_x.py", f"{name}_dynaxla_int64", SAME, "", 12.0),
        Outcome("test_x.py", "T.test_mul_dynaxla", NOT_RUN, "on the CPU: skipped"),
        Outcome("test_x.py", "U.test_mul_dynaxla", DIED, "exit code 7"),
        Outcome("test_y.py", "T.test_mul_dynaxla", SLOW, "over 25 s", 25.0),
    ]


def test_a_record_gives_back_its_outcomes(tmp_path: Path) -> None:
    record = tmp_path / "outcomes.tsv"
    assert read_record(record) == []
    write_record(_recorded(), record)
    text = record.read_text()
    assert sorted(read_record(record), key=lambda outcome: (outcome.file, outcome.test)) == _recorded()
    assert "0 test_mul\t0 -\tnot run\ton the CPU: skipped\n2 broadcast\t0.1 f32 f32_bf16; 12 i64\n3 \t0.4 c64" in text
    write_record(reversed(read_record(record)), record)
    assert record.read_text() == text
    write_record([Outcome("test_x.py", "T.test_a_dynaxla", FAILS, "a tab\tand a line\nmore" + "." * 999, 1.26)], record)
    detail = "a tab and a line more".ljust(160, ".")
    assert read_record(record) == [Outcome("test_x.py", "T.test_a_dynaxla", FAILS, detail, 1.3)]


@pytest.mark.parametrize("test", ["T.test_a_cpu", "T.test_a_dynaxla_f32", "T.test_a_dynaxla0_float32"])
def test_a_name_that_a_record_cannot_have_is_an_error(tmp_path: Path, test: str) -> None:
    with pytest.raises(ValueError, match=r"device|names that end in"):
        write_record([Outcome("test_x.py", test, SAME)], tmp_path / "outcomes.tsv")


def test_a_log_goes_before_the_record(tmp_path: Path) -> None:
    options = upstream.parse(["--tests", ".", "--log", str(tmp_path / "log"), "--outcomes", str(tmp_path / "record")])
    old = [Outcome("test_x.py", f"T.test_{name}_dynaxla", FAILS) for name in "ab"]
    write_record(old, options.outcomes)
    new = Outcome("test_x.py", "T.test_b_dynaxla", SAME)
    append_outcome(options.log, new)
    assert upstream.read_known(options) == [new]
    options.retry = True
    assert upstream.read_known(options) == [old[0], new] == join_outcomes(old, [new])


def test_the_committed_record_can_be_read(tmp_path: Path) -> None:
    outcomes = read_record()
    assert {outcome.file for outcome in outcomes} <= set(upstream.FILES)
    write_record(outcomes, tmp_path / "again.tsv")
    assert (tmp_path / "again.tsv").read_text() == RECORD.read_text()


def test_the_committed_list_can_be_read() -> None:
    for (file, _), reason in read_expected().items():
        assert file in upstream.FILES
        assert reason
