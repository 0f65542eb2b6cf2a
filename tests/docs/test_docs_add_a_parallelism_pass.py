"""docs/how-to/add-a-parallelism-pass.md, run as a reader would."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import torch

from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-parallelism-pass.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def check(folder: str) -> tuple[float, float]:
    """What the reader's check finds, and what it finds when `copy_to` is left out."""
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    reader = importlib.import_module("check")
    right = reader.check()
    reader.split_feed_forward.__globals__["copy_to"] = lambda x, group: x
    return right, reader.check()


def test_the_pages_pass_equals_one_process_and_its_check_finds_the_mistake(
    tmp_path: Path,
) -> None:
    for name, code in zip(("feed_forward_parallel.py", "check.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(code)
    assert blocks("shell") == ["torchrun --nproc-per-node 2 check.py\n"]
    for right, wrong in run_ranks(check, 2, str(tmp_path)):
        assert right < 2e-6
        assert wrong > 0.1


def test_the_page_names_what_is_there() -> None:
    source = PAGE.parents[2]
    for path in re.findall(r"`((?:parallel|tests)/[\w/]+\.py)`", PAGE.read_text()):
        assert (source / path).exists() or (source / "src" / "armillary" / path).exists(), path
