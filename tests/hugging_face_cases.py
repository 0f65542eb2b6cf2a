"""Tiny models of every family as transformers writes them, and folders of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face.families import family_for
from armillary.data.tokenizer_subword import Bpe
from armillary.models.dense import DenseDecoder
from model_cases import FAMILIES
from moe_cases import MOE_FAMILIES

TOKENS = 290
"""Of the tokenizer; the models have some more rows, so that four ranks share them unevenly."""
VOCABULARY = 302

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEXT = "the ring turns and the sky above it shows where every star stands "


def _sized(config: DenseDecoder) -> DenseDecoder:
    """With room for the tokenizer, and a context that YaRN leads to exactly."""
    scaling = config.rope_scaling
    length = 512 if scaling is None else int(scaling.factor * scaling.original_max_seq_len)
    return replace(config, vocab_size=VOCABULARY, max_seq_len=length)


CASES: dict[str, DenseDecoder] = {
    name: _sized(config) for name, config in {**FAMILIES, **MOE_FAMILIES}.items()
}
"""One or two of each family."""


def transformers_model(name: str, *, seed: int = 0, **options: Any) -> Any:
    """The model of a case as transformers has it, with weights that all show in the logits.

    Its config is made of our writer's, which transformers reads by its own lights.
    """
    import transformers

    model = CASES[name]
    family = family_for(model)
    fields = family.write(model) | {"bos_token_id": 0, "eos_token_id": 1} | options
    config = transformers.AutoConfig.for_model(family.model_type, **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for own, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in own else 0.0, 0.2, generator=generator)
        for own, buffer in theirs.named_buffers():
            if own.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    return theirs


def write_model(name: str, folder: Path, **options: Any) -> Any:
    """Writes a case as transformers does, with a tokenizer; returns the model."""
    theirs = transformers_model(name, **options)
    theirs.save_pretrained(folder, max_shard_size="100KB")
    for file, content in Bpe(vocab_size=TOKENS).build([TEXT * 20]).files().items():
        if file == "tokenizer.json":
            (folder / file).write_text(content)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE,
                    "tokenizer_class": "PreTrainedTokenizerFast"})
    )  # fmt: skip
    return theirs


@torch.no_grad()
def logits_of(theirs: Any, tokens: Tensor) -> Tensor:
    """What transformers computes."""
    found: Tensor = theirs(tokens).logits
    return found


def ids(*shape: int) -> Tensor:
    """Token ids of this shape."""
    return torch.randint(0, TOKENS, shape, generator=torch.Generator().manual_seed(7))
