"""Corpora of conversations, of which only the assistant's turns are learned."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.data.chat.bundled import TEMPLATES
from armillary.data.chat.conversation import BadConversation, Conversation, parse_conversation
from armillary.data.chat.masks import TRAIN_ON_CHOICES, lessons
from armillary.data.chat.template import LARGEST_TEMPLATE, ChatTemplate, Rendering
from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.files import find_files
from armillary.data.lines import line_sources, place_of, read_objects
from armillary.data.tables import read_rows, table_sources
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

if TYPE_CHECKING:
    from armillary.data.tokenizer import TokenizerConfig

_PARQUET = ".parquet"
_Record = tuple[str, Callable[[], str], dict[str, Any]]


@component("chat")
@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(CorpusConfig):
    """Conversations in JSON lines or Parquet; the assistant's turns are learned (extra `chat`).

    Each line or row has `messages`: objects with `role`, `content`, what else the template reads,
    and perhaps `weight`, 0 for a turn that is only read. ShareGPT's `conversations` of `from` and
    `value` do as well. The template alone decides about BOS and EOS.
    """

    files: tuple[str, ...] = ()
    """Globs of .jsonl files, also compressed, or of .parquet files; addresses as for jsonl."""
    field: str = ""
    """Field that holds the messages; empty: messages, or else conversations."""
    template: str = ""
    """Jinja file, or chatml or llama3, which are built in; empty: the tokenizer's own template."""
    train_on: str = "assistant"
    """What is learned: assistant (all its turns), last (its last turn), or all (the whole text)."""
    turns_apart: bool = False
    """Whether each turn that is learned is a document of its own, with the turns before it."""
    arguments: tuple[str, ...] = ()
    """What else the template is told, as NAME=JSON; for example enable_thinking=false."""
    today: str = "2024-07-26"
    """Date that a template is told when it asks for today's, as YEAR-MONTH-DAY."""
    on_bad_text: str = "error"
    """What to do with text that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def masks(self) -> bool:
        """See `CorpusConfig.masks`."""
        return True

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        tables = tuple(name for name in self.files if name.endswith(_PARQUET))
        others = tuple(name for name in self.files if not name.endswith(_PARQUET))
        sources = table_sources(tables, self.columns(), "field") if tables else []
        lines = find_files(others) if others or not tables else []
        if strays := [file.path for file in lines if file.path.endswith(_PARQUET)]:
            raise UserError(
                Problem(
                    f"data.corpus.files: {strays[0]} is a Parquet file among others",
                    "patterns that end in .parquet for Parquet files, and other ones for lines",
                )
            )
        return sources + line_sources(lines)

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`; `prepared` has a tokenizer, this has not."""
        raise AssertionError("a chat corpus is read once its template is known: see `prepared`")

    def prepared(self, tokenizer: TokenizerConfig) -> CorpusConfig:
        """See `CorpusConfig.prepared`: with the template, and the tokenizer's special tokens.

        Raises:
            UserError: there is no template, or a wrong one.
        """
        built = tokenizer.build()
        try:
            template = ChatTemplate.of(built, self._template_text())
        except UserError as error:
            fix = "--data.corpus.template NAME_OR_FILE"
            raise UserError(
                Problem(f"data.corpus.template: {one.message}", one.allowed, one.fix and fix)
                for one in error.problems
            ) from error
        return PreparedChat(
            chat=self,
            template=template.text,
            special=tuple(built.special_tokens),
            bos=template.bos,
            eos=template.eos,
        )

    def problems(self) -> list[Problem]:
        """See `CorpusConfig.problems`."""
        found = CorpusConfig.problems(self)
        if self.train_on not in TRAIN_ON_CHOICES:
            found.append(
                Problem(f"data.corpus.train_on = {self.train_on!r}", ", ".join(TRAIN_ON_CHOICES))
            )
        try:
            datetime.date.fromisoformat(self.today)
        except ValueError as error:
            found.append(Problem(f"data.corpus.today = {self.today!r}: {error}", "2024-07-26"))
        try:
            self.template_arguments()
        except ValueError as error:
            found.append(Problem(f"data.corpus.arguments: {error}", "NAME=JSON"))
        return found

    def template_arguments(self) -> dict[str, Any]:
        """What else the template is told.

        Raises:
            ValueError: not of the form NAME=JSON.
        """
        pairs = [argument.partition("=") for argument in self.arguments]
        return {name: json.loads(value) for name, _, value in pairs}

    def columns(self) -> tuple[str, ...]:
        """The columns of Parquet files of which one holds the messages."""
        return (self.field,) if self.field else ("messages", "conversations")

    def _template_text(self) -> str:
        if self.template in TEMPLATES or not self.template:
            return TEMPLATES.get(self.template, "")
        try:
            with Path(self.template).expanduser().open(encoding="utf-8") as file:
                return file.read(LARGEST_TEMPLATE + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                Problem(
                    f"{self.template!r} cannot be read ({error})",
                    f"a Jinja file, or one of {', '.join(TEMPLATES)}",
                    "--data.corpus.template FILE",
                )
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedChat(CorpusConfig):
    """A `Chat` with all that its documents follow from."""

    chat: Chat
    template: str
    """The template itself."""
    special: tuple[str, ...]
    """Names of the tokenizer's special tokens."""
    bos: str | None
    eos: str | None
    """Names of the tokens that begin and end a text."""

    def masks(self) -> bool:
        """See `CorpusConfig.masks`."""
        return True

    def chat_template(self) -> str:
        """See `CorpusConfig.chat_template`."""
        return self.template

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        return self.chat.sources()

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`: a conversation of which nothing is learned is empty."""
        for found in self._records(source):
            if isinstance(found, Problem):
                yield found
                continue
            identifier, where, record = found
            try:
                conversation = parse_conversation(record, self.chat.field, self.chat.on_bad_text)
                if conversation is not None:
                    yield from self._documents(identifier, conversation)
            except BadConversation as error:
                yield error.problem(where())

    def _records(self, source: Source) -> Iterator[_Record | Problem]:
        """Each record with its id and what says where it lies."""
        if not source.path.endswith(_PARQUET):
            for found in read_objects(source, self.chat.on_bad_text):
                if isinstance(found, Problem):
                    yield found
                else:
                    offset, record = found
                    where = partial(place_of, source, offset)
                    yield f"{source.name}@{offset}", where, record
            return
        for found in read_rows(source, (*self.chat.columns(), "tools")):
            if isinstance(found, Problem):
                yield found
            else:
                row, record = found
                where = partial("{} row {}".format, source.path, row)
                yield f"{source.name}:{row}", where, _without_nulls(record)

    def _documents(self, identifier: str, conversation: Conversation) -> Iterator[Document]:
        chat = self.chat
        found = lessons(
            conversation, self._render, train_on=chat.train_on, turns_apart=chat.turns_apart
        )
        empty = True
        for lesson in found:
            empty = False
            name = identifier if lesson.turn is None else f"{identifier}#{lesson.turn}"
            yield Document(name, lesson.text, marks=lesson.marks, group=identifier)
        if empty:
            yield Document(identifier, "")

    def _render(self, conversation: Conversation, prompt: bool) -> Rendering:
        template = ChatTemplate(self.template, self.special, bos=self.bos, eos=self.eos)
        return template.render(
            conversation.messages,
            tools=conversation.tools,
            prompt=prompt,
            today=datetime.date.fromisoformat(self.chat.today),
            arguments=self.chat.template_arguments(),
        )


def _without_nulls(value: Any) -> Any:
    """A table's value without members that are null: its rows all have those of any row."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
