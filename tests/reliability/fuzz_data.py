"""What reads texts, tokens, tokenizers and conversations, with valid files to begin from."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow.parquet
import tokenizers
import zstandard

from armillary.data.build import build
from armillary.data.chat.bundled import CHATML
from armillary.data.config import Bytes, Chat, JsonLines, Megatron, Olmo, Parquet
from armillary.data.corpus import CorpusConfig
from armillary.data.token_store import open_store
from armillary.data.token_store import verify as verify_tokens
from armillary.data.tokenizer import load_tokenizer, save_tokenizer
from armillary.data.tokenizer_subword import SubwordTokenizer
from armillary.foundation.errors import Problem, RunError
from reliability.fuzz_target import Target
from tiny_runs import tiny_recipe, write_corpus
from token_corpora import write_megatron, write_olmo


def make_tokens(folder: Path) -> None:
    """A token store, and where it is."""
    recipe = tiny_recipe(folder, steps=1)
    write_corpus(folder, documents=20)
    store = build(recipe.data)
    store.folder.rename(folder / "store")


def read_tokens(folder: Path) -> None:
    """Verified, opened, and some of it read."""
    verify_tokens(folder / "store")
    store = open_store(folder / "store")
    load_tokenizer(folder / "store" / "tokenizer")
    for split in (*store.train, *store.validation):
        for document in range(min(3, split.n_documents)):
            split.document(document)


def make_tokenizer(folder: Path) -> None:
    """A small byte-pair encoding."""
    parsed = tokenizers.Tokenizer(tokenizers.models.BPE())
    parsed.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    parsed.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, show_progress=False)
    parsed.train_from_iterator(["hello there, hello again"], trainer)
    save_tokenizer(SubwordTokenizer(parsed, None, None), folder)


def make_token_corpora(folder: Path) -> None:
    """A pair of Megatron-LM, and flat arrays of both kinds."""
    write_megatron(folder / "m", [[[1, 2], [3]], [], [[4, 5, 6]] * 3], "int32")
    write_olmo(folder / "raw.tokens", [[1, 2], [], [3] * 9], bounds=True)
    write_olmo(folder / "h.npy", [[1, 2, 0], [3] * 9], header=True)


def read_token_corpora(folder: Path) -> None:
    """As a build does, twice."""
    read_corpus(Megatron(files=(f"{folder}/m",)))
    read_corpus(Olmo(files=(f"{folder}/raw.tokens",)))
    read_corpus(Olmo(files=(f"{folder}/h.npy",), eos_id=0))


def make_packed_corpora(folder: Path) -> None:
    """Compressed lines, and a table."""
    lines = b'{"text": "one"}\n{"text": "' + b"long " * 200 + b'"}\n'
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    packers["zst"] = zstandard.ZstdCompressor(write_checksum=True).compress
    for suffix, pack in packers.items():
        (folder / f"a.jsonl.{suffix}").write_bytes(pack(lines))
    (folder / "a.jsonl").write_bytes(lines)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["one", None, "x" * 99]}), folder / "t.parquet"
    )


def read_packed_corpora(folder: Path) -> None:
    """As a build does."""
    read_corpus(JsonLines(files=(f"{folder}/a.jsonl*",)))
    read_corpus(Parquet(files=(f"{folder}/t.parquet",)))


def make_chats(folder: Path) -> None:
    """Conversations of both forms, and a template."""
    said = [("system", "be kind"), ("user", "hello"), ("assistant", "ho"), ("assistant", "<|eos|>")]
    records: list[dict[str, object]] = [
        {"messages": [{"role": role, "content": text} for role, text in said], "tools": [{"f": 1}]},
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    for text in ("a.jsonl", "b.jsonl"):
        (folder / text).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "blocks.jinja").write_text(CHATML.partition("\n")[2] + "{{ tools | tojson }}")
    (folder / "prefixes.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content | trim }}<|eos|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


def read_chats(folder: Path) -> None:
    """As a build does, with a template that says what the model writes, and with one that does not.

    Whatever comes of it, special tokens are the template's.
    """
    for lines, template in (("a.jsonl", "blocks.jinja"), ("b.jsonl", "prefixes.jinja")):
        chat = Chat(files=(f"{folder}/{lines}",), template=f"{folder}/{template}")
        read_corpus(chat.prepared(Bytes()))


def read_corpus(corpus: CorpusConfig) -> None:
    """All documents; what is wrong with them is an error."""
    items = [item for source in corpus.sources() for item in corpus.read(source)]
    if found := [item for item in items if isinstance(item, Problem)]:
        raise RunError(found)


NUMPY = ("tokens.npy", "offsets.npy", "bytes.npy", "id_offsets.npy", "ids.txt")
DATA_TARGETS = (
    Target(
        name="token stores: manifest, arrays, tokenizer",
        share=10,
        files=(
            *("store/manifest.json", "store/manifest.json"),
            "store/tokenizer/armillary_tokenizer.json",
            *(f"store/part-0/train/{name}" for name in NUMPY),
        ),
        make=make_tokens,
        read=read_tokens,
    ),
    Target(
        name="corpora of tokens: Megatron-LM's, flat arrays",
        share=4,
        files=("m.idx", "m.idx", "m.bin", "h.npy", "raw.tokens", "raw.tokens.csv.gz"),
        make=make_token_corpora,
        read=read_token_corpora,
    ),
    Target(
        name="corpora: compressed lines, tables",
        share=3,
        files=(
            *(f"a.jsonl.{suffix}" for suffix in ("gz", "bz2", "xz", "zst")),
            "t.parquet",
            "a.jsonl",
        ),
        make=make_packed_corpora,
        read=read_packed_corpora,
    ),
    Target(
        name="tokenizers",
        share=4,
        files=("tokenizer.json", "tokenizer.json", "armillary_tokenizer.json"),
        make=make_tokenizer,
        read=lambda folder: load_tokenizer(folder).encode("hello there"),
    ),
    Target(
        name="conversations and chat templates",
        share=4,
        files=("a.jsonl", "b.jsonl", "blocks.jinja", "prefixes.jinja"),
        make=make_chats,
        read=read_chats,
    ),
)
