"""The families that can be read and written, by the `model_type` of a config.json."""

from __future__ import annotations

from armillary.checkpoint.hugging_face.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from armillary.checkpoint.hugging_face.families.family import Family
from armillary.checkpoint.hugging_face.families.gpt_oss import GPT_OSS
from armillary.checkpoint.hugging_face.families.llama import LLAMA
from armillary.checkpoint.hugging_face.families.qwen3 import QWEN3
from armillary.checkpoint.hugging_face.families.qwen3_moe import QWEN3_MOE
from armillary.checkpoint.hugging_face.files import Config
from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem, UserError, nearest
from armillary.models.config import ModelConfig

FAMILIES = {
    family.model_type: family
    for family in (LLAMA, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
}

__all__ = ["FAMILIES", "Family", "family_for", "family_of"]


def family_of(config: Config) -> Family:
    """The family that a config.json is of.

    Raises:
        UserError: none of these.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    close = nearest(kind, FAMILIES) if isinstance(kind, str) else None
    fix = f"a model of {close}" if close else None
    message = f"config.json: model_type is {str(kind)[:60]!r}, which is not known"
    raise UserError(Problem(message, ", ".join(FAMILIES), fix))


def family_for(model: ModelConfig) -> Family:
    """The family that a model of ours is written as.

    Raises:
        UserError: there is none, or the model has what no such family has.
    """
    problems = []
    for family in FAMILIES.values():
        if type(model) is family.config:
            found = family.refusals(model)
            if not found:
                return family
            problems += found
    if problems:
        raise UserError(problems)
    message = f"model = {name_of(type(model))} has no counterpart in Hugging Face format"
    allowed = ", ".join(dict.fromkeys(name_of(f.config) for f in FAMILIES.values()))
    raise UserError(Problem(message, allowed))
