"""`python -m conformance.distributed_suites` on a made-up file of tests of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.distributed_suites import list_files
from conformance.distributed_worker import WHEEL, retarget
from conformance.upstream_table import read_outcomes
from conformance.upstream_worker import DIED, FAILS, NOT_RUN, SAME

ROOT = Path(__file__).parents[2]
MADE_UP = """
import os
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

class TestMadeUp(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.world_size)
        x = torch.full((3,), self.rank + 1.0).cuda(self.rank)
        dist.all_reduce(x)
        return x

    @skip_if_lt_x_gpu(2)
    def test_sum(self):
        self.assertEqual(self._sum(), torch.full((3,), 3.0, device="cuda"))

    def test_other(self):
        self.assertEqual(self._sum().device.type, "cpu")

    def test_ends(self):
        if self._sum().device.type != "cpu" and self.rank == 1:
            os._exit(7)

    @skip_if_lt_x_gpu(8)
    def test_of_eight(self):
        raise AssertionError
"""


def test_a_file_for_cuda_names_the_device() -> None:
    source = 'x.cuda(self.rank); torch.ones(2, device="cuda"); torch.cuda.device_count(); torch.cuda.synchronize()'
    assert retarget(source, "cpu", 2) == ('x.to("cpu"); torch.ones(2, device="cpu"); 2; torch.cpu.synchronize()')
    assert retarget("@skipIf(not TEST_CUDA, '')", "cpu", 2) == "@skipIf(False, '')"


def test_files_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "distributed" / "_tensor").mkdir(parents=True)
    for name in ("test_functional_api.py", "_tensor/test_b.py", "_tensor/helper.py", "test_c10d_nccl.py"):
        (tmp_path / "distributed" / name).touch()
    assert list_files(tmp_path) == [WHEEL, "test_functional_api.py", "_tensor/test_b.py"]
    assert list_files(None) == [WHEEL]


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "test_made_up.py").write_text(MADE_UP)
    log, page, expected = tmp_path / "log.jsonl", tmp_path / "page.md", tmp_path / "expected.tsv"
    expected.write_text("test_made_up.py\tTestMadeUp.test_other\tits reason\n")
    command = [
        sys.executable,
        "-m",
        "conformance.distributed_suites",
        "--tests",
        tmp_path,
        "--log",
        log,
        "--table",
        page,
    ]
    command += ["--files", "test_made_up.py", "--expected", expected]
    finished = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )
    statuses = {outcome.test.removeprefix("TestMadeUp."): outcome.status for outcome in read_outcomes(log)}
    assert statuses == {"test_sum": SAME, "test_other": FAILS, "test_ends": DIED, "test_of_eight": NOT_RUN}, finished
    assert finished.returncode == 1
    assert "died, not listed: test_made_up.py TestMadeUp.test_ends" in finished.stdout
    assert "| test_made_up.py | 4 | 4 | 1 | 1 | 0 | 1 | 0 | 1 | 33.3% |" in page.read_text()
