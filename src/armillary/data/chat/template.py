"""Chat templates: a conversation as the text that a model reads, and where that text is from.

Before a template is compiled, each name of a special token in its own text is replaced by a mark of
two characters that no conversation may contain. What comes out is searched for marks: only there
are special tokens. So a name in what somebody wrote is text, whatever the template does with it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from armillary.data.corpus import Span
from armillary.foundation.errors import Problem, UserError, missing_extra

if TYPE_CHECKING:
    import jinja2

    from armillary.data.tokenizer import Tokenizer

LARGEST_TEMPLATE = 1 << 20
"""Characters."""
RESERVED = re.compile("[\ufdd0-\ufdd2]")
"""Characters that a conversation or a template must not contain; Unicode has them for no text."""

_MARK, _BEGINS, _ENDS = "\ufdd0", "\ufdd1", "\ufdd2"
_FIRST_NUMBER = 0xF0000
"""After a mark comes the number of the special token, as a character of a private plane."""

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class TemplateError(Exception):
    """A template cannot be rendered with a conversation; the message is for people."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text."""

    text: str
    special: tuple[Span, ...]
    """Where the template names special tokens."""
    generated: tuple[Span, ...]
    """What stands in `{% generation %}`, in order."""


class ChatTemplate:
    """A compiled template; see the module. Not for several threads at once.

    Args:
        text: the template, in Jinja.
        special: names of the special tokens.
        bos: the name of the token that begins a text, if there is one.
        eos: the name of the token that ends one.

    Raises:
        UserError: the template is no Jinja, or asks for what templates may not do.
    """

    def __init__(
        self,
        text: str,
        special: Sequence[str] = (),
        *,
        bos: str | None = None,
        eos: str | None = None,
    ) -> None:
        self.text = text
        """The template as it was given."""
        self._special = tuple(special)
        self.bos, self.eos = bos, eos
        self._template = _compiled(text, self._special)

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str = "") -> ChatTemplate:
        """The template of a tokenizer, or another text with that tokenizer's special tokens.

        Raises:
            UserError: see above; or the tokenizer has no template.
        """
        text = text or tokenizer.chat_template
        if not text:
            raise UserError(
                Problem(
                    "the tokenizer has no chat template",
                    "a chat_template.jinja beside its tokenizer.json",
                    "choose one by name, such as chatml, or by its file",
                )
            )
        names = {number: name for name, number in tokenizer.special_tokens.items()}
        bos, eos = (
            None if number is None else names.get(number)
            for number in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(text, tuple(tokenizer.special_tokens), bos=bos, eos=eos)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        prompt: bool = False,
        today: datetime.date | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """The text of a conversation.

        Args:
            messages: the turns, each with its `role` and what else the template reads.
            tools: descriptions of the functions that the model may call.
            prompt: end it where the model is to write (`add_generation_prompt`).
            today: what `strftime_now` tells; None is today.
            arguments: what else the template may ask for.

        Raises:
            TemplateError: the template refuses the conversation, or cannot cope with it.
        """
        now = datetime.datetime.combine(today or datetime.date.today(), datetime.time())
        tokens = {"bos_token": self.bos, "eos_token": self.eos}
        values = {
            name: _with_marks(token, self._special) for name, token in tokens.items() if token
        }
        values |= dict(arguments or {}) | {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": prompt,
            "strftime_now": lambda form: now.strftime(str(form)[:100]),
        }
        found = self._read(_rendered(self._template, values))
        self._check_names(found, [messages, tools, arguments])
        return found

    def _read(self, marked: str) -> Rendering:
        """Marks become names and places."""
        pieces: list[str] = []
        special: list[Span] = []
        generated: list[Span] = []
        length = last = 0
        begun: int | None = None
        for found in RESERVED.finditer(marked):
            pieces.append(marked[last : found.start()])
            length += found.start() - last
            last = found.end()
            if found[0] in (_BEGINS, _ENDS):
                if (begun is None) != (found[0] == _BEGINS):
                    raise TemplateError("its generation blocks lie within each other")
                if begun is not None:
                    generated.append((begun, length))
                begun = length if begun is None else None
            else:
                name = self._name(marked[last : last + 1])
                pieces.append(name)
                special.append((length, length + len(name)))
                length += len(name)
                last += 1
        if begun is not None:
            raise TemplateError("it leaves a generation block before its end")
        pieces.append(marked[last:])
        return Rendering("".join(pieces), tuple(special), tuple(generated))

    def _name(self, number: str) -> str:
        index = ord(number) - _FIRST_NUMBER if number else -1
        if not 0 <= index < len(self._special):
            raise TemplateError("the template takes the names of special tokens apart")
        return self._special[index]

    def _check_names(self, found: Rendering, given: object) -> None:
        """Raises unless each name of a special token in the text is a mark's or the conversation's.

        Another one is made of pieces: by the template, which would have meant the token, or by what
        was written, in which case somebody means mischief.
        """
        names = _names(self._special)
        matches = [] if names is None else list(names.finditer(found.text))
        if len(matches) == len(found.special):
            return
        marked = {start for start, _ in found.special}
        written = "\n".join(_texts_in(given))
        for match in matches:
            if match.start() not in marked and match[0] not in written:
                raise TemplateError(
                    f"{match[0]} comes out of pieces; a template has to name special tokens whole"
                )


@lru_cache(maxsize=8)
def _names(special: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _with_marks(text: str, special: tuple[str, ...]) -> str:
    """The text with a mark for each name of a special token."""
    names = _names(special)
    if names is None:
        return text
    number = {name: _MARK + chr(_FIRST_NUMBER + index) for index, name in enumerate(special)}
    return names.sub(lambda match: number[match[0]], text)


@lru_cache(maxsize=8)
def _compiled(text: str, special: tuple[str, ...]) -> jinja2.Template:
    try:
        import jinja2
    except ImportError:
        raise missing_extra("chat", "a chat template") from None
    from armillary.data.chat.sandbox import Sandbox, rewritten

    if len(text) > LARGEST_TEMPLATE or (RESERVED.search(text) is not None):
        raise UserError(
            Problem(
                f"the chat template has {len(text)} characters, or U+FDD0 to U+FDD2 among them",
                f"{LARGEST_TEMPLATE} characters, none of these",
            )
        )
    environment = Sandbox()
    try:
        tree = rewritten(environment.parse(text), lambda part: _with_marks(part, special))
        return jinja2.Template.from_code(
            environment, environment.compile(tree), environment.make_globals(None)
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            Problem(f"the chat template is wrong in line {error.lineno}: {error.message}")
        ) from error
    except Exception as error:  # what a constant expression raises, or Python's own parser
        raise UserError(Problem(f"the chat template cannot be compiled: {error}")) from error


def _rendered(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    from armillary.data.chat.sandbox import Sandbox

    sandbox = template.environment
    assert isinstance(sandbox, Sandbox)
    sandbox.begin()
    pieces = []
    try:
        for piece in template.generate(**values):
            sandbox.spend(len(piece))
            pieces.append(piece)
    except Exception as error:  # an expression of a template can raise whatever Python can
        raise TemplateError(str(error)[:1_000] or type(error).__name__) from error
    return "".join(pieces)


def _texts_in(value: object) -> list[str]:
    """All texts of a conversation, at any depth."""
    texts, waiting = [], [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            texts.append(found)
        elif isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            waiting += found
    return texts
