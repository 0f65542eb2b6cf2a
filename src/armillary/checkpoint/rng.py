"""Random states of this process as bytes: python, numpy, torch on the CPU and on its CUDA device.

Plain JSON, so that reading a checkpoint never runs code that lies in it.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.strict_json import parse_json


def seed_all(seed: int, rank: int) -> None:
    """Starts the random states of this process where every fresh run of a recipe starts them."""
    mixed = np.random.SeedSequence([seed, rank]).generate_state(2)
    random.seed(int(mixed[0]))
    np.random.seed(int(mixed[1]))
    torch.manual_seed(int(mixed[0]))


def capture() -> bytes:
    """The random states of this process, now."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": _encode(np.asarray(numpy_state["state"]["key"], dtype="<u4").tobytes()),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode_tensor(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _encode_tensor(torch.cuda.get_rng_state())
    return json.dumps(states).encode()


def restore(states: bytes) -> None:
    """Puts the states of `capture` back; a CUDA state is left out where there is no CUDA.

    Raises:
        UserError: they are not what `capture` gives; some may have been put back.
    """
    try:
        _restore(parse_json(states))
    except (ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        words = f"these are no random states: {type(error).__name__}: {error}"
        raise UserError(Problem(words, fix="take another checkpoint")) from None


_WORDS = 624
"""Of the state of a Mersenne Twister, MT19937 (Matsumoto and Nishimura 1998)."""


def _restore(read: dict[str, Any]) -> None:
    version, words, gauss = read["python"]
    random.setstate((version, tuple(words), gauss))
    saved = read["numpy"]
    key = np.frombuffer(base64.b64decode(saved["key"]), dtype="<u4").astype(np.uint32)
    if len(key) != _WORDS or not 0 <= saved["pos"] <= _WORDS:  # NumPy would read beyond them
        raise ValueError("these are not the words of a Mersenne Twister")
    np.random.set_state(
        {
            "bit_generator": saved["bit_generator"],
            "state": {"key": key, "pos": saved["pos"]},
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )
    torch.set_rng_state(_decode_tensor(read["torch"]))
    if "cuda" in read and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode_tensor(read["cuda"]))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_tensor(state: Tensor) -> str:
    return _encode(state.numpy().tobytes())


def _decode_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
