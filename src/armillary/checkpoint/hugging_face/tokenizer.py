"""Tokenizer files on their way in and out; RUN/tokenizer keeps all that others want back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from armillary.checkpoint.hugging_face.files import Damaged, read_json
from armillary.data.tokenizer import (
    DESCRIPTION_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from armillary.data.tokenizer_bytes import ByteTokenizer
from armillary.data.tokenizer_subword import File
from armillary.foundation.errors import Problem, UserError

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"

_KEPT = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE, GENERATION_FILE)
_LARGEST = 256 * 2**20
_TEMPLATE = "chat_template"


def import_tokenizer(source: Path, target: Path) -> Tokenizer | None:
    """Copies a model's tokenizer into a run's; None where there is no tokenizer.json.

    Raises:
        UserError: a file is no tokenizer, or cannot be read.
    """
    if not (source / TOKENIZER_FILE).is_file():
        return None
    target.mkdir(parents=True, exist_ok=True)
    try:
        for name in _KEPT:
            path = source / name
            if path.is_file():
                if path.stat().st_size > _LARGEST:
                    raise UserError(Problem(f"{path} is larger than any of its kind"))
                shutil.copyfile(path, target / name)
        _take_template_out(target)
    except OSError as error:
        message = f"cannot copy the tokenizer of {source}: {error.strerror}"
        raise UserError(Problem(message)) from error
    tokenizer = File(path=str(target)).build()
    save_tokenizer(tokenizer, target)
    return tokenizer


def _take_template_out(folder: Path) -> None:
    """A chat template has a file of its own; older models keep it among other values."""
    if (folder / TEMPLATE_FILE).is_file() or not (folder / CONFIG_FILE).is_file():
        return
    try:
        template = read_json(folder / CONFIG_FILE).get(_TEMPLATE)
    except Damaged as reason:
        raise UserError(Problem(f"{folder}: {reason}")) from None
    if isinstance(template, list):  # several by name, of which one is for plain conversations
        default = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = default[0].get("template") if default else None
    if isinstance(template, str):
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")


def special_ids(folder: Path) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` of a run's tokenizer, for a config.json."""
    if not (folder / DESCRIPTION_FILE).is_file():
        return {}
    tokenizer = load_tokenizer(folder)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def export_tokenizer(source: Path, target: Path, *, max_seq_len: int) -> bool:
    """Writes a run's tokenizer as others load it; whether there was one.

    What came with an imported model goes out as it came; the rest is made.

    Raises:
        UserError: the run's tokenizer is damaged.
    """
    if not (source / DESCRIPTION_FILE).is_file():
        return False
    tokenizer = load_tokenizer(source)
    for name in _KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if isinstance(tokenizer, ByteTokenizer):
        (target / TOKENIZER_FILE).write_text(_of_bytes(tokenizer), encoding="utf-8")
    if not (target / CONFIG_FILE).is_file():
        names = {
            "bos_token": _name(target, tokenizer.bos_id),
            "eos_token": _name(target, tokenizer.eos_id),
        }
        values = {name: token for name, token in names.items() if token is not None} | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
        write_json(target / CONFIG_FILE, values)
    if not (target / GENERATION_FILE).is_file():
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        known = {name: number for name, number in ids.items() if number is not None}
        write_json(target / GENERATION_FILE, known)
    return True


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON file as these formats have them."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name(folder: Path, token: int | None) -> str | None:
    if token is None:
        return None
    import tokenizers

    parsed = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    name: str | None = parsed.id_to_token(token)
    return name


def _of_bytes(tokenizer: ByteTokenizer) -> str:
    """A tokenizer.json whose ids are those of `ByteTokenizer`: no merges, and a token a byte.

    Such files name bytes by printable characters: those that are printable in Latin-1 stand for
    themselves, the others, in order, for U+0100 and up. (Radford et al. 2019, `encoder.py`)
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = {names[byte]: byte for byte in range(256)}
    parsed = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    parsed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parsed.decoder = decoders.ByteLevel()
    special = [tokenizer.decode([i], skip_special_tokens=False) for i in (256, 257)]
    parsed.add_special_tokens(special)
    text: str = parsed.to_str()
    return text
