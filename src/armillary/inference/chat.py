"""Conversations as prompts: rendered by the tokenizer's chat template, up to the model's turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armillary.data.chat.conversation import BadConversation, Conversation, parse_conversation
from armillary.data.chat.template import ChatTemplate, TemplateError
from armillary.data.config import Chat
from armillary.data.corpus import corpus_parts
from armillary.data.tokenizer import Tokenizer
from armillary.foundation.errors import Problem, UserError
from armillary.recipe.recipe import Recipe

_ANSWER = "6174"
"""Found again in a rendering, in which words may be part of a special token's name."""


def chat_prompt(
    tokenizer: Tokenizer, recipe: Recipe, record: Mapping[str, Any], *, system: str, where: str
) -> list[int]:
    """Token ids of a conversation, after which the model is to write.

    Names of special tokens in what somebody wrote are text. The template gets the arguments that it
    had in training.

    Args:
        tokenizer: has the template.
        recipe: of the run.
        record: `messages` and what else a file of conversations has.
        system: a turn before all others; empty: none.
        where: the conversation comes from, for messages.

    Raises:
        UserError: the tokenizer has no template, its template refuses the conversation, or that is
            none.
    """
    if not tokenizer.chat_template:
        message = "--chat: the run's tokenizer has no chat template"
        allowed = "a run of conversations, or a chat_template.jinja in its folder tokenizer"
        raise UserError(Problem(message, allowed, "--prompt TEXT, without --chat"))
    conversation = _parsed(record, where)
    messages = list(conversation.messages)
    if not messages:
        raise UserError(Problem(f"{where}: a conversation without a message", "one or more"))
    if system:
        if messages[0]["role"] == "system":
            message = f"{where}: the conversation has a system turn of its own, beside --system"
            raise UserError(Problem(message, "one of them"))
        turn = {"role": "system", "content": system}
        messages = [*_parsed({"messages": [turn]}, "--system").messages, *messages]
    template = ChatTemplate.of(tokenizer)
    corpora = [part.corpus for part in corpus_parts(recipe.data.corpus)]
    told = [corpus.template_arguments() for corpus in corpora if isinstance(corpus, Chat)]
    try:
        rendering = template.render(
            messages,
            tools=conversation.tools,
            prompt=True,
            arguments=told[0] if told else None,
        )
    except ValueError as error:  # a run's recipe has been checked, unless somebody wrote it since
        raise UserError(Problem(f"data.corpus.arguments: {error}", "NAME=JSON")) from error
    except TemplateError as error:
        message = f"{where}: the chat template refuses the conversation: {error}"
        raise UserError(Problem(message)) from error
    ids: list[int] = tokenizer.encode_marked(rendering.text, rendering.special).ids.tolist()
    return ids


def turn_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a turn of the model: its EOS, and what the template puts after an answer."""
    ends = {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
    turns = [{"role": "user", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendering = ChatTemplate.of(tokenizer).render(turns)
    except TemplateError:
        return frozenset(ends)
    last = rendering.text.rfind(_ANSWER)
    following = [span for span in rendering.special if span[0] > last]
    if following and not rendering.text[last + len(_ANSWER) : following[0][0]].strip():
        start, end = following[0]
        ends.add(tokenizer.special_tokens[rendering.text[start:end]])
    return frozenset(ends)


def _parsed(record: Mapping[str, Any], where: str) -> Conversation:
    try:
        conversation = parse_conversation(record, "", "error")
    except BadConversation as error:
        raise UserError(Problem(f"{where}: {error}", error.allowed)) from error
    assert conversation is not None, "bad text is an error"
    return conversation
