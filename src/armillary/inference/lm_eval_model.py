"""The model as lm-eval knows models; imported where lm-eval is installed, on rank 0 only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from armillary.evaluation.items import Request
from armillary.foundation.errors import Problem, UserError
from armillary.inference.lm_eval_ranks import Company, Write

_PROMPTS_AT_ONCE = 16
_NEW_TOKENS = 256
"""What a task gets that does not say how much it wants, as in lm-eval's own models."""


class Adapter(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Tokens as in training: a text begins with a BOS where documents do.

    Raises:
        UserError: there is no token that lm-eval could put before a text without a context.
    """

    def __init__(self, company: Company) -> None:
        super().__init__()
        self._company = company
        self._tokenizer, self._encoder = company.trained.tokenizer, company.encoder
        prefix = next(iter(self._encoder.beginning), self._tokenizer.eos_id)
        if prefix is None:
            message = "the tokenizer has neither BOS nor EOS, which lm-eval puts before a text"
            raise UserError(Problem(message, "a tokenizer with one of them"))
        self._prefix: int = prefix

    @property
    def eot_token_id(self) -> int:
        """See TemplateLM."""
        end = self._tokenizer.eos_id
        return self._prefix if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """See TemplateLM."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Most tokens that are read before one."""
        return self._company.scorer.row_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """See TemplateLM."""
        begun = () if add_special_tokens is False else self._encoder.beginning
        return [*begun, *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [Request(tuple(context), tuple(more)) for _, context, more in requests]
        return [(-answer.nats, answer.greedy) for answer in self._company.score(asked)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See LM: of whole texts, read in windows where they are longer than a row."""
        texts = [self._tokenizer.encode(request.args[0]) for request in requests]
        answers = self._company.score([Request((self._prefix,), tuple(ids)) for ids in texts])
        return [-answer.nats for answer in answers]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See LM; requests with the same wishes are answered together."""
        written = [""] * len(requests)

        def wishes(index: int) -> str:
            return repr(requests[index].args[1])

        for _, group in itertools.groupby(sorted(range(len(requests)), key=wishes), wishes):
            indices = list(group)
            for first in range(0, len(indices), _PROMPTS_AT_ONCE):
                some = indices[first : first + _PROMPTS_AT_ONCE]
                texts = [requests[index].args[0] for index in some]
                for index, text in zip(some, self._write(texts, requests[some[0]]), strict=True):
                    written[index] = text
        return written

    def _write(self, texts: Sequence[str], request: Any) -> list[str]:
        """What follows each text; what leaves no room in the model's context is cut in front."""
        wishes = dict(request.args[1])
        until = wishes.get("until") or ()
        until = tuple(filter(None, [until] if isinstance(until, str) else until))
        context = self._company.trained.model.max_seq_len
        most = min(int(wishes.get("max_gen_toks", _NEW_TOKENS)), context - 1)
        sampled = bool(wishes.get("do_sample"))
        prompts = tuple(
            tuple(self.tok_encode(text)[most - context :] or [self._prefix]) for text in texts
        )
        rows = self._company.write(
            Write(
                prompts,
                until,
                most,
                temperature=float(wishes.get("temperature", 1.0)) if sampled else 0.0,
                top_k=int(wishes.get("top_k", 0)),
                top_p=float(wishes.get("top_p", 1.0)),
            )
        )
        return [_before(self._tokenizer.decode(row), until) for row in rows]


def _before(text: str, until: Sequence[str]) -> str:
    """What comes before the first of some texts."""
    places = [place for stop in until if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
