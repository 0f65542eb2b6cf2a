"""What a config.json says, asked for one fact at a time; nothing in it is passed over unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armillary.foundation.errors import Problem, UserError
from armillary.models.rope_scaling import Llama31RopeScaling, YarnRopeScaling

_WITHOUT_EFFECT = frozenset({
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "output_router_logits",
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "initializer_range",
    "pretraining_tp", "ep_size", "moe_layer_freq", "max_window_layers",
    "_name_or_path", "is_encoder_decoder", "num_nextn_predict_layers", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "tf_legacy_loss",
    "problem_type", "id2label", "label2id", "sliding_window", "rope_interleave", "qk_head_dim",
    "initial_context_length", "experts_per_token", "num_local_experts", "swiglu_alpha",
    "torchscript", "is_decoder", "cross_attention_hidden_size", "add_cross_attention",
})  # fmt: skip
"""Keys that change no logits of these families, or are read by the family where they do."""

_MOST = 2**24
"""Of any width, length or number: a matrix of such sides still has a size that can be written."""
_OF_ROPE = frozenset({
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale",
    "mscale_all_dim", "attention_factor", "partial_rotary_factor",
})  # fmt: skip
"""Keys of `rope_scaling` and `rope_parameters` that are read."""


class Facts:
    """Reads a config.json and collects what is wrong; `finish` raises it all at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._seen: set[str] = set()
        self._problems: list[Problem] = []
        self._unread: list[str] = []
        """Names below others that nobody reads."""

    def integer(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        """A whole number from 0 to `most`."""
        value = self._get(name, default)
        if type(value) is not int or not 0 <= value <= most:
            self._wrong(name, value, f"a whole number up to {most}")
            return 1
        return value

    def optional(self, name: str, *, most: int = _MOST) -> int | None:
        """The same, or None where there is none."""
        return None if self._get(name, None) is None else self.integer(name, most=most)

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, value, "a number")
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
            return default
        return value

    def plain(self, name: str, default: Any = None) -> Any:
        """Whatever it is."""
        return self._get(name, default)

    def only(self, name: str, *allowed: Any) -> None:
        """A value that this implementation has in one way; absent is fine."""
        value = self._get(name, allowed[0])
        if value not in allowed:
            self._wrong(name, value, ", ".join(map(str, allowed)))

    def quantised(self, methods: tuple[str, ...]) -> None:
        """How values stand for others, if they do: by one of these methods."""
        held = self._get("quantization_config", None)
        if not held:
            return
        method = held.get("quant_method") if isinstance(held, Mapping) else held
        if method not in methods:
            allowed = ", ".join(methods) or "the model's unquantised weights"
            self._wrong("quantization_config.quant_method", method, allowed)

    def tokens_within(self, rows: int) -> None:
        """Names the special tokens that no row of the vocabulary stands for."""
        for name in ("bos_token_id", "eos_token_id"):
            value = self._get(name, None)
            tokens = value if isinstance(value, list) else [value]
            if any(t is not None and (type(t) is not int or not 0 <= t < rows) for t in tokens):
                self._unread.append(f"{name} (not in the vocabulary of {rows})")

    def refuse(self, message: str, allowed: str) -> None:
        """One more thing that is wrong."""
        self._problems.append(Problem(f"config.json: {message}", allowed))

    def rope(self, theta: float) -> tuple[float, Mapping[str, Any]]:
        """Base of the wavelengths, and the stretching: empty where there is none.

        Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` with all of it.
        """
        new, old = self._get("rope_parameters", None), self._get("rope_scaling", None)
        scaling = new or old or {}
        if not isinstance(scaling, Mapping):
            self._wrong("rope_scaling", scaling, "an object")
            scaling = {}
        if new and old and old != new:
            self._wrong("rope_scaling", old, "the same as rope_parameters, or none of it")
        if scaling.get("partial_rotary_factor") not in (None, 1.0):
            self._wrong("partial_rotary_factor", scaling["partial_rotary_factor"], "1.0")
        self._unread += [f"rope_scaling.{name}" for name in scaling.keys() - _OF_ROPE]
        base = scaling.get("rope_theta", self._get("rope_theta", theta))
        if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
            self._wrong("rope_theta", base, "a number above 0")
            base = theta
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        self._seen.add("rope_theta")
        return float(base), {} if kind == "default" else {**scaling, "rope_type": kind}

    def llama_scaling(self, scaling: Mapping[str, Any]) -> Llama31RopeScaling | None:
        """Stretching as Llama 3.1 does it, or none."""
        if not scaling:
            return None
        if scaling["rope_type"] != "llama3":
            self._wrong("rope_scaling.rope_type", scaling["rope_type"], "default, llama3")
            return None
        inner = Facts(scaling)
        made = Llama31RopeScaling(
            factor=inner.number("factor"),
            low_frequency_factor=inner.number("low_freq_factor"),
            high_frequency_factor=inner.number("high_freq_factor"),
            original_max_seq_len=inner.integer("original_max_position_embeddings"),
        )
        self._problems += inner._problems
        return made

    def yarn(self, scaling: Mapping[str, Any], max_seq_len: int) -> YarnRopeScaling | None:
        """Stretching as YaRN does it, or none.

        `mscale` and `mscale_all_dim`, where both are there, are the coefficients of the tables and
        of what is taken out of them again (DeepSeek-V2, arXiv 2405.04434, section 3.1.4).
        """
        if not scaling:
            return None
        if scaling["rope_type"] != "yarn":
            self._wrong("rope_scaling.rope_type", scaling["rope_type"], "default, yarn")
            return None
        inner = Facts(scaling)
        if scaling.get("attention_factor") is not None:
            self._wrong("rope_scaling.attention_factor", scaling["attention_factor"], "none")
        tables, scores = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
        both = tables != 0 and scores != 0
        if scores != 0 and not both:
            self._wrong("rope_scaling.mscale", None, "a number, beside mscale_all_dim")
        original = inner.plain("original_max_position_embeddings")
        made = YarnRopeScaling(
            factor=inner.number("factor"),
            original_max_seq_len=original if type(original) is int else max_seq_len,
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            truncate=inner.flag("truncate", True),
            table_sharpening=tables if both else 1.0,
            score_sharpening=scores if both else 0.0,
        )
        self._problems += inner._problems
        return made

    def finish(self) -> list[str]:
        """Names of keys that nobody asked for and that may mean something.

        Raises:
            UserError: all that is wrong.
        """
        if self._problems:
            raise UserError(self._problems)
        return sorted(self._config.keys() - self._seen - _WITHOUT_EFFECT) + sorted(self._unread)

    def _get(self, name: str, default: Any) -> Any:
        self._seen.add(name)
        value = self._config.get(name)
        return default if value is None else value

    def _wrong(self, name: str, value: Any, allowed: str) -> None:
        shown = "absent" if value is None else repr(value)[:80]
        self._problems.append(Problem(f"config.json: {name} is {shown}", allowed))


def rope_fields(
    theta: float, scaling: Llama31RopeScaling | YarnRopeScaling | None
) -> dict[str, Any]:
    """The inverse of `Facts.rope`, in the spelling that published models have."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    if isinstance(scaling, Llama31RopeScaling):
        fields: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    else:
        fields = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.score_sharpening:
            fields["mscale"] = scaling.table_sharpening
            fields["mscale_all_dim"] = scaling.score_sharpening
    fields["original_max_position_embeddings"] = scaling.original_max_seq_len
    return {"rope_theta": theta, "rope_scaling": fields}
