"""What a family answers: a config.json to a model and back, and the table of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary.checkpoint.hugging_face.facts import Facts
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.source import Source, Sources
from armillary.checkpoint.hugging_face.table import Rule, rename
from armillary.foundation.errors import Problem
from armillary.models.dense import DenseDecoder

BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
}
HEAD_NORMS = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
MOST_LAYERS, MOST_HEADS, MOST_EXPERTS, WIDEST_HEAD = 1000, 1024, 4096, 4096
"""Several times those of any published model: a table has a line for each."""
SEQUENCE_LOSS = 1e-3
"""Our coefficient of even loads, of training only. `router_aux_loss_coef` is not read: it weighs
another loss, over a batch and not a row, and GPT-OSS is published with 0.9."""


def _as_they_are(theirs: Sources, config: Config) -> dict[str, Source]:
    return dict(theirs)


def _nothing(name: str, model: Any) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family, read and written by the same table."""

    model_type: str
    """In config.json."""
    architecture: str
    """The class that others load it with."""
    config: type[DenseDecoder]
    """Our models of it."""
    read: Callable[[Facts], Any]
    """A config.json to the model."""
    write: Callable[[Any], dict[str, Any]]
    """The model to what is the family's own in config.json."""
    rules: Callable[[Any, Config], list[Rule]]
    """The table, for a model and the config.json beside the tensors."""
    refusals: Callable[[Any], list[Problem]] = lambda model: []
    """What of a model the family cannot express."""
    unpack: Callable[[Sources, Config], dict[str, Source]] = _as_they_are
    """Their tensors with numbers in the place of quantised ones."""
    quantised: tuple[str, ...] = ()
    """Methods of quantisation, by their names in config.json, that `unpack` undoes."""
    loadable: Callable[[Any], Any] = lambda model: model
    """The part of a model that other tools load without a warning."""
    left_out: Callable[[str, Any], str | None] = _nothing
    """Why a tensor of theirs, by name, is rightly not read; None: it has to be."""


def outer(model: DenseDecoder) -> list[Rule]:
    """What lies around the blocks; of tied weights, there is the embedding."""
    rules = [
        rename("embedding.weight", "model.embed_tokens.weight"),
        rename("norm.weight", "model.norm.weight"),
    ]
    tied = [] if model.tied_embeddings else [rename("head.weight", "lm_head.weight")]
    return [*rules, *tied]


def read_common(facts: Facts) -> dict[str, Any]:
    """Fields that all families have under the same names."""
    facts.only("hidden_act", "silu")
    facts.only("partial_rotary_factor", 1.0)
    return {
        "vocab_size": facts.integer("vocab_size"),
        "dim": facts.integer("hidden_size"),
        "n_layers": facts.integer("num_hidden_layers", most=MOST_LAYERS),
        "n_heads": facts.integer("num_attention_heads", most=MOST_HEADS),
        "norm_eps": facts.number("rms_norm_eps"),
        "max_seq_len": facts.integer("max_position_embeddings", 2048),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
    }


def read_heads(facts: Facts, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of grouped-query attention."""
    heads = fields["n_heads"]
    width = facts.optional("head_dim", most=WIDEST_HEAD)
    return {
        "n_kv_heads": facts.integer("num_key_value_heads", heads, most=MOST_HEADS),
        "head_dim": width or fields["dim"] // max(heads, 1),
    }


def write_common(model: DenseDecoder) -> dict[str, Any]:
    """The inverse of `read_common`."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "intermediate_size": model.ffn_dim,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": model.max_seq_len,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def stretched_context(model: DenseDecoder) -> int:
    """`max_position_embeddings` with YaRN: what stretching leads to, as others insist on."""
    scaling = model.rope_scaling
    if scaling is None:
        return model.max_seq_len
    return int(scaling.factor * scaling.original_max_seq_len)


def different(model: Any, **wanted: Any) -> list[Problem]:
    """Problems of fields that are not as the family has them; `router__score` is in the router."""
    found = []
    for path, value in wanted.items():
        held = model
        for name in path.split("__"):
            held = getattr(held, name)
        if held != value:
            shown = f"model.{path.replace('__', '.')}"
            message = f"{shown} = {held} cannot be written in Hugging Face format"
            option = f"--{shown.replace('_', '-')} {str(value).lower()}"
            found.append(Problem(message, str(value), option))
    return found


def is_rotary_table(name: str, model: Any) -> str | None:
    """Old releases keep the rotary wavelengths, which follow from config.json."""
    return "follows from config.json" if name.endswith(".rotary_emb.inv_freq") else None
