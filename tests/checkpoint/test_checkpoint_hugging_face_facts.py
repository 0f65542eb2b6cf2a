"""What a config.json says beside the model's sizes: quantisation, windows, code, special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint.hugging_face.exporting import plan_export
from armillary.checkpoint.hugging_face.source import Filled
from armillary.checkpoint.hugging_face.weights import open_foreign, our_shapes
from armillary.foundation.errors import UserError
from hugging_face_cases import CASES


def ignored(folder: Path, name: str, **values: Any) -> tuple[str, ...]:
    """What is named in a note of a case's config.json with other values."""
    model = CASES[name]
    plan = plan_export(model, {n: Filled(shape) for n, shape in our_shapes(model).items()})
    (folder / "config.json").write_text(json.dumps(plan.config | values))
    return open_foreign(str(folder)).ignored


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "gptq"), ("qwen3", "awq"), ("llama", "fp8"), ("gpt-oss", "fp8"),
     ("deepseek v3", "mxfp4")],
)  # fmt: skip
def test_a_quantisation_that_is_not_undone_for_the_family_is_refused(
    name: str, method: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"quantization_config.quant_method is '{method}'"):
        ignored(tmp_path, name, quantization_config={"quant_method": method, "bits": 4})


@pytest.mark.parametrize(("name", "method"), [("deepseek v3", "fp8"), ("gpt-oss", "mxfp4")])
def test_a_quantisation_of_the_family_is_known_by_its_name(
    name: str, method: str, tmp_path: Path
) -> None:
    assert ignored(tmp_path, name, quantization_config={"quant_method": method}) == ()


def test_windows_are_refused_where_the_family_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sliding_window is 64"):
        ignored(tmp_path, "llama", sliding_window=64)
    assert ignored(tmp_path, "llama", sliding_window=None) == ()
    assert ignored(tmp_path, "qwen3", sliding_window=64) == (), "use_sliding_window is false"


def test_code_of_a_model_and_tokens_beyond_its_vocabulary_are_named(tmp_path: Path) -> None:
    named = ignored(tmp_path, "llama", auto_map={"AutoModel": "x.Y"}, eos_token_id=[1, 10**6])
    rows = CASES["llama"].vocab_size
    assert named == ("auto_map", f"eos_token_id (not in the vocabulary of {rows})")
