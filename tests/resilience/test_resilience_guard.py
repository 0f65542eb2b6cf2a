"""The guard against values that are not finite, and the guard's own detection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from armillary.foundation.errors import RunError
from armillary.resilience.guard import require_finite


def test_finite_values_come_back_as_numbers() -> None:
    loss, norm = torch.tensor(1 + 2**-40, dtype=torch.float64), torch.tensor(0.125)
    values = require_finite(loss, norm, step=1, samples=(0, 8))
    assert values == {"loss": 1 + 2**-40, "gradient_norm": 0.125}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update_and_names_step_and_samples(
    value: float, where: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)

    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    if where == "loss":
        loss = loss * value
    else:
        gradient = model[1].weight.grad
        assert gradient is not None
        gradient[0, 1] = value
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with pytest.raises(RunError) as error:
        require_finite(
            loss,
            norm,
            step=2,
            samples=(8, 16),
            gradients=((name, p.grad) for name, p in model.named_parameters()),
        )
        optimizer.step()
    text = str(error.value)
    assert "at step 2, samples [8, 16)" in text and "those of step 1" in text
    assert ("gradients not finite: 1.weight" in text) == (where == "gradient")
    assert f"error: {'loss' if where == 'loss' else 'gradient norm'} " in text
    assert error.value.exit_code == 1
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))


def test_the_host_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = torch.Tensor.tolist
    for name in ("item", "__bool__", "__float__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("another host read"))

    def read(tensor: torch.Tensor) -> Any:
        reads.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    require_finite(
        torch.ones(()), torch.ones(()), step=1, samples=(0, 1), gradients=[("w", torch.ones(3))]
    )
    assert reads == [torch.Size([2])]


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = list(model.parameters())
    for state in optimizer.state.values():
        tensors += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.detach().clone() for tensor in tensors]
