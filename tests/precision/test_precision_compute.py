"""Number formats: computation in one, everything that lasts in float32."""

from __future__ import annotations

import pytest
import torch

from armillary.models.llama.config import Llama
from armillary.parallel.materialise import materialise
from armillary.precision import Precision
from armillary.precision.compute import set_compute_dtype

SMALL = Llama(vocab_size=16, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=8)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_activations_take_the_format_and_weights_and_gradients_do_not(name: str) -> None:
    precision = Precision(compute=name)
    assert precision.problems() == []
    with torch.device("meta"):
        model = SMALL.build()
    set_compute_dtype(model, precision.compute_dtype)
    materialise(model, torch.device("cpu"), 0)
    logits = model(torch.arange(8)[None])
    assert logits.dtype == precision.compute_dtype
    logits.float().sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_an_update_too_small_for_bfloat16_moves_the_weights() -> None:
    with torch.device("meta"):
        model = SMALL.build()
    set_compute_dtype(model, torch.bfloat16)
    materialise(model, torch.device("cpu"), 0)
    before = model.norm.weight.detach().clone()
    model(torch.arange(8)[None])[..., 0].float().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0).step()
    moved = (model.norm.weight - before).abs()
    assert torch.all(moved > 0)
    assert torch.equal(model.norm.weight.bfloat16(), before.bfloat16())


def test_formats_that_do_not_exist_are_refused() -> None:
    (problem,) = Precision(compute="bf16").problems()
    assert problem.render() == (
        "error: precision.compute = bf16 is not a format for computation\n"
        "       allowed: bfloat16, float32\n"
        "       try: --precision.compute bfloat16"
    )
    with pytest.raises(AssertionError, match="output_dtype"):
        set_compute_dtype(torch.nn.Linear(1, 1), torch.bfloat16)
