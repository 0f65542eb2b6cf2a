"""What of a conversation is learned from: the turns of the assistant, as the template writes them.

Where the template says so itself, by `{% generation %}` blocks, it is these. Elsewhere a turn is
what comes between two renderings: of the messages before it, with the prompt for an answer, and of
the messages up to it. These must be beginnings of the whole conversation's text. Templates that
write earlier turns in another way than the last one (without their reasoning, say) do not comply;
then each turn can be a document of its own, exactly as the model reads when it gives that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from armillary.data.chat.conversation import BadConversation, Conversation
from armillary.data.chat.template import Rendering, TemplateError
from armillary.data.corpus import Marks, Span

TRAIN_ON_CHOICES = ("assistant", "last", "all")

Render = Callable[[Conversation, bool], Rendering]
"""Renders a conversation; with True, as a prompt for the next answer."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text and what is special about it."""

    text: str
    marks: Marks
    turn: int | None = None
    """The one message that is learned, where turns are apart."""


def lessons(
    conversation: Conversation, render: Render, *, train_on: str, turns_apart: bool
) -> Iterator[Lesson]:
    """The texts that a conversation teaches; none where no turn of it is learned.

    Args:
        conversation: the turns.
        render: by the template.
        train_on: `assistant` turns, the `last` of them, or `all` the text, whatever the weights.
        turns_apart: one text for each turn that is learned, which ends with it.

    Raises:
        BadConversation: the template refuses it, or does not tell whose what is.
    """
    try:
        if train_on == "all":
            if conversation.messages:
                found = render(conversation, False)
                yield Lesson(found.text, Marks(found.special, ((0, len(found.text)),)))
            return
        turns = conversation.assistant_turns()
        turns = turns[-1:] if train_on == "last" else turns
        turns = [turn for turn in turns if conversation.learned[turn]]
        if turns_apart:
            for turn in turns:
                found, scored = _scored(conversation.first(turn + 1), [turn], render)
                yield Lesson(found.text, Marks(found.special, scored), turn)
        elif turns:
            found, scored = _scored(conversation, turns, render)
            yield Lesson(found.text, Marks(found.special, scored))
    except TemplateError as error:
        raise BadConversation(f"cannot be rendered: {error}") from error


def _scored(
    conversation: Conversation, turns: list[int], render: Render
) -> tuple[Rendering, tuple[Span, ...]]:
    whole = render(conversation, False)
    if whole.generated:
        return whole, _of_blocks(conversation, whole, turns)
    spans = (_between_prefixes(conversation, whole, turn, render) for turn in turns)
    return whole, tuple(_without_last_blanks(whole, span) for span in spans)


def _of_blocks(conversation: Conversation, whole: Rendering, turns: list[int]) -> tuple[Span, ...]:
    """The `{% generation %}` blocks of some turns."""
    every = conversation.assistant_turns()
    if turns == every:
        return whole.generated
    if len(whole.generated) != len(every):
        raise BadConversation(
            f"has {len(every)} assistant turns, but {len(whole.generated)} generation blocks, so "
            "that it cannot be told which of them are to be learned",
            "one block for each turn",
            "--data.corpus.train-on assistant, without weights",
        )
    return tuple(whole.generated[every.index(turn)] for turn in turns)


def _between_prefixes(
    conversation: Conversation, whole: Rendering, turn: int, render: Render
) -> Span:
    before = render(conversation.first(turn), True).text
    after = render(conversation.first(turn + 1), False).text
    if not (whole.text.startswith(after) and after.startswith(before)):
        raise BadConversation(
            f"is not written by the template turn after turn: with more messages the text up to "
            f"message {turn} is another one",
            "a template that only ever adds text, or one with {% generation %} blocks",
            "--data.corpus.turns-apart true, or --data.corpus.train-on last",
        )
    return len(before), len(after)


def _without_last_blanks(whole: Rendering, span: Span) -> Span:
    """Without blanks after the special token that ends a turn: they are never asked for."""
    start, end = span
    last = max((past for _, past in whole.special if start < past <= end), default=end)
    return (start, last) if whole.text[last:end].isspace() else span
