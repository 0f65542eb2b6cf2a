"""Tokenizer files on their way in and out; RUN/tokenizer keeps all that others want back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
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
from armillary.data.tokenizer_subword import File, parse_tokenizer
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
    template = _read(folder / CONFIG_FILE).get(_TEMPLATE)
    if isinstance(template, list):  # several by name, of which one is for plain conversations
        default = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = default[0].get("template") if default else None
    if isinstance(template, str):
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")


def special_ids(folder: Path, turn_ends: Collection[int] = ()) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` of a run's tokenizer, for a config.json.

    Other tools stop at all that is in `eos_token_id`: a number, or a list of several, of which the
    first is EOS.

    Args:
        folder: of the tokenizer.
        turn_ends: further tokens after which a model's answer is over.
    """
    if not (folder / DESCRIPTION_FILE).is_file():
        return {}
    tokenizer = load_tokenizer(folder)
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    stated = [token for token in _stated_ends(folder) if 0 <= token < tokenizer.vocab_size]
    ends = list(dict.fromkeys([*own, *stated, *sorted(turn_ends)]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one_or_list(ends)}


def require_rows(rows: int, folder: Path | None, option: str) -> None:
    """Refuses a vocabulary in which tokens of a run's tokenizer would have no row.

    Raises:
        UserError: it has fewer rows than the tokenizer has tokens.
    """
    if folder is None or not (folder / DESCRIPTION_FILE).is_file():
        return
    tokens = load_tokenizer(folder).vocab_size
    if rows < tokens:
        message = f"{option} {rows}: the tokenizer has {tokens} tokens, which need a row each"
        raise UserError(Problem(message, f"{tokens} or more", f"{option} {tokens}"))


def _stated_ends(folder: Path) -> list[int]:
    """Tokens at which generation stops, as the file that came with an imported model says."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return []
    stated = _read(path).get("eos_token_id")
    found = stated if isinstance(stated, list) else [stated]
    return [token for token in found if type(token) is int]


def _one_or_list(ends: list[int]) -> list[int] | int | None:
    return ends if len(ends) > 1 else next(iter(ends), None)


def export_tokenizer(
    source: Path,
    target: Path,
    *,
    max_seq_len: int,
    bos: bool = False,
    turn_ends: Collection[int] = (),
) -> bool:
    """Writes a run's tokenizer as others load it; whether there was one.

    What came with an imported model goes out as it came; the rest is made.

    Args:
        source: the run's tokenizer.
        target: the folder to write into.
        max_seq_len: of the model.
        bos: other tools are to begin a plain text with BOS.
        turn_ends: see `special_ids`.

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
    if bos and tokenizer.bos_id is not None:
        _begin_with(target, tokenizer.bos_id)
    ids = special_ids(source, turn_ends)
    if not (target / GENERATION_FILE).is_file():
        known = {name: number for name, number in ids.items() if number is not None}
        write_json(target / GENERATION_FILE, known)
    elif missing := set(turn_ends).difference(stated := _stated_ends(source)):
        values = _read(target / GENERATION_FILE)
        ends = _one_or_list([*stated, *sorted(missing)])
        write_json(target / GENERATION_FILE, values | {"eos_token_id": ends})
    return True


def _begin_with(folder: Path, bos: int) -> None:
    """Has a tokenizer.json put BOS before each text, unless it does so and nothing else.

    (Post-processors: https://huggingface.co/docs/tokenizers/api/post-processors.) They are passed
    over where a chat template was rendered, and by our own tokenizers.
    """
    path = folder / TOKENIZER_FILE
    parsed = parse_tokenizer(path)
    parsed.no_padding()
    parsed.no_truncation()
    plain = parsed.encode("a", add_special_tokens=False).ids
    added = parsed.encode("a").ids
    if added != [bos, *plain]:
        definition = _read(path)
        name = parsed.id_to_token(bos)
        former = definition.get("post_processor") if added == plain else None
        begun = [{"SpecialToken": {"id": name, "type_id": 0}}, _text("A", 0)]
        second = [{"SpecialToken": {"id": name, "type_id": 1}}, _text("B", 1)]
        processor = {
            "type": "TemplateProcessing",
            "single": begun,
            "pair": begun + second,
            "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
        }
        if former is not None:
            processor = {"type": "Sequence", "processors": [former, processor]}
        write_json(path, definition | {"post_processor": processor})
    config = _read(folder / CONFIG_FILE)
    if config.get("add_bos_token", True) is not True:  # it would take BOS away again
        write_json(folder / CONFIG_FILE, config | {"add_bos_token": True})


def _text(which: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": which, "type_id": kind}}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Damaged as reason:
        raise UserError(Problem(f"{path.parent}: {reason}")) from None


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
