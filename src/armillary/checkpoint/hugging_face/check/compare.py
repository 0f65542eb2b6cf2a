"""Our modules with converted weights against the reference with published ones, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from armillary.checkpoint.hugging_face.check import reference
from armillary.checkpoint.hugging_face.check.lent import lend
from armillary.checkpoint.hugging_face.check.raw import Raw
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.source import Source, Sources, replaced, whole
from armillary.checkpoint.hugging_face.views import Indexed, Stacked
from armillary.foundation.errors import Problem, UserError
from armillary.models.config import ModelConfig
from armillary.models.deepseek import DeepSeek
from armillary.models.dense import DenseDecoder
from armillary.models.layers.backends import backend_for
from armillary.models.layers.documents import Documents
from armillary.models.layers.rope import Rope
from armillary.models.moe import MoEDecoder

if TYPE_CHECKING:
    from armillary.checkpoint.hugging_face.weights import Weights

_TOLERANCE = 1e-3
"""Largest difference, as a share of the largest value: float32 beside float64 stays below 1e-4, and
a wrong order of rows is far above."""
_TOKENS = 24
_MOST_TOKENS = 256
_MOST_NEAR_TIES = 0.25
"""Share of tokens that may be routed differently: where two experts score nearly the same."""

Part = tuple[str, Tensor, Tensor]
"""Name of what made it, ours, and the reference's."""


@torch.no_grad()
def check_conversion(weights: Weights, model: ModelConfig) -> tuple[str, ...]:
    """Compares the first block, and the first with experts, on random inputs.

    Rotary positions are those of config.json: a recipe may stretch them to begin with.

    Args:
        weights: of Hugging Face format, for the model.
        model: what they are for.

    Returns:
        What was compared.

    Raises:
        UserError: something differs; each part that does is named.
    """
    foreign, raw = weights.foreign, weights.raw
    assert foreign is not None and raw is not None, "only what comes from elsewhere is checked"
    assert isinstance(model, DenseDecoder)
    written = foreign.model
    model = replace(model, rope_theta=written.rope_theta, rope_scaling=written.rope_scaling)
    comparison = _Comparison(foreign.config, Raw(raw), weights.sources, model)
    compared: list[str] = []
    problems = []
    for name, ours, theirs in comparison.parts():
        compared.append(name)
        share = _difference(ours, theirs)
        if not share <= _TOLERANCE:  # nor is NaN
            problems.append(
                Problem(
                    f"{name}: our result differs from that of the published weights by {share:.1e}"
                    " of its largest value",
                    f"up to {_TOLERANCE:.0e}",
                )
            )
    if problems:
        raise UserError(problems)
    return tuple(dict.fromkeys(compared))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    most = theirs.abs().max().clamp(min=1e-30)
    return float((ours.double() - theirs).abs().max() / most)


class _Comparison:
    """One model's parts, ours and the reference's."""

    def __init__(self, config: Config, raw: Raw, ours: Sources, model: DenseDecoder) -> None:
        self._config, self._raw, self._ours, self._model = config, raw, ours, model
        window = getattr(model, "window", None)
        self._length = min(_TOKENS + (window or 0), _MOST_TOKENS)
        self._generator = torch.Generator().manual_seed(0)

    def parts(self) -> Iterator[Part]:
        """All of them."""
        yield from self._outside()
        yield from self._attention(0)
        moe = self._model if isinstance(self._model, MoEDecoder) else None
        if moe is None or moe.n_dense_layers > 0:
            yield from self._dense(0)
        if moe is not None:
            yield from self._mixture(moe, moe.n_dense_layers)
        if isinstance(self._model, DeepSeek) and self._model.predict_ahead:
            yield from self._ahead(self._model)

    def _random(self) -> Tensor:
        shape = (self._length, self._model.dim)
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _module(self, build: Callable[[], nn.Module], prefix: str) -> nn.Module:
        with torch.device("meta"):
            module = build().eval()
        lend(module, prefix, self._ours)
        return module

    def _outside(self) -> Iterator[Part]:
        """First, middle and last rows of embedding and head, and the last norm."""
        tables = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
        for name, theirs in tables.items():
            if name not in self._ours:
                continue
            common = min(self._ours[name].shape[0], self._raw.shape(theirs)[0])
            for row in (0, common // 2, common - 1):
                box = replaced(whole(self._ours[name].shape), 0, row, row + 1)
                yield name, self._ours[name].read(box), self._raw.rows(theirs, row, row + 1)
        last = self._ours["norm.weight"]
        yield "norm.weight", last.read(whole(last.shape)), self._raw.vector("model.norm.weight")

    def _normalised(self, name: str, theirs: str) -> Part:
        """A norm of random numbers; the reference's result is what the next part reads."""
        x = self._random()
        build = self._model.build_block
        norm = self._module(lambda: getattr(build(0), name.rpartition(".")[2]), name)
        gain = self._raw.vector(f"{theirs}.weight")
        return name, norm(x.float()), reference.rms_norm(x, gain, self._config)

    def _attention(self, index: int) -> Iterator[Part]:
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        norm = self._normalised(f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield norm
        x = norm[2]
        latent = isinstance(self._model, DeepSeek)
        expect = reference.latent_attention if latent else reference.grouped_attention
        expected = expect(x, self._raw, theirs, self._config)
        attention = self._module(lambda: self._model.build_attention(index), f"{ours}.attention")
        given, output = self._attended(attention, x)
        for name, found in zip(("query", "key", "value"), given, strict=True):
            part = "key_value" if latent and name != "query" else name
            yield f"{ours}.attention.{part}", found, getattr(expected, name)
        yield f"{ours}.attention.output", output, expected.output

    def _attended(self, attention: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Query, key and value as the core of attention is given them, and what comes out."""
        model, given = self._model, list[Tensor]()
        core = attention.get_submodule("core")
        core.register_forward_pre_hook(lambda module, inputs: given.extend(inputs[:3]))
        rope = Rope(
            head_dim=model.rotated_width, theta=model.rope_theta, scaling=model.rope_scaling
        )
        tables = rope.tables(torch.arange(self._length))
        tokens = torch.zeros(1, self._length, dtype=torch.int64)
        window = core.window
        documents = None
        if isinstance(window, int):
            documents = Documents.whole_rows(tokens).within(window)
        visible = backend_for("sdpa", "cpu", model.head_width).prepare(documents, tokens)
        core.backend = "sdpa"  # type: ignore[assignment]  # nn.Module types it as a module
        output = attention(x[None].float(), tables, visible)
        return [each[0] for each in given], output[0]

    def _gated(
        self, name: str, module: nn.Module, expected: reference.Gated, x: Tensor
    ) -> Iterator[Part]:
        """A SwiGLU: its two inner projections, and what comes out."""
        inner: dict[str, Tensor] = {}
        for part in ("gate", "up"):

            def keep(module: nn.Module, inputs: object, out: Tensor, part: str = part) -> None:
                inner[part] = out

            getattr(module, part).register_forward_hook(keep)
        output = module(x[None].float())
        for part, found in inner.items():
            yield f"{name}.{part}", found[0], getattr(expected, part)
        yield f"{name}.down", output[0], expected.output

    def _dense(self, index: int) -> Iterator[Part]:
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        norm_name = f"{theirs}.post_attention_layernorm"
        norm = self._normalised(f"{ours}.feed_forward_norm", norm_name)
        yield norm
        name = f"{ours}.feed_forward"
        module = self._module(lambda: self._model.build_feed_forward(index), name)
        expected = reference.feed_forward(norm[2], self._raw, f"{theirs}.mlp")
        yield from self._gated(name, module, expected, norm[2])

    def _mixture(self, model: MoEDecoder, index: int) -> Iterator[Part]:
        ours, theirs = f"layers.{index}.feed_forward", f"model.layers.{index}"
        norm_name = f"{theirs}.post_attention_layernorm"
        norm = self._normalised(f"layers.{index}.feed_forward_norm", norm_name)
        yield norm
        x = norm[2]
        moe = self._module(lambda: model.build_feed_forward(index), ours)
        yield self._routing(f"{ours}.router", moe.get_submodule("router"), x, theirs)
        yield from self._experts(model, index, x)
        if model.n_shared_experts:
            expected = reference.feed_forward(x, self._raw, f"{theirs}.mlp.shared_experts")
            yield from self._gated(f"{ours}.shared", moe.get_submodule("shared"), expected, x)

    def _routing(self, name: str, router: nn.Module, x: Tensor, theirs: str) -> Part:
        """Dense weights of experts, of the tokens on whose experts both agree if nearly all do."""
        expected = reference.routing(x, self._raw, theirs, self._config)
        found = router(x[None].float())
        ours = torch.zeros(expected.shape).scatter(-1, found.expert, found.weight.float())
        differs = ((ours > 0) != (expected > 0)).any(-1)
        if float(differs.double().mean()) <= _MOST_NEAR_TIES:
            ours, expected = ours[~differs], expected[~differs]
        return name, ours, expected

    def _experts(self, model: MoEDecoder, index: int, x: Tensor) -> Iterator[Part]:
        """The first and the last expert."""
        name, theirs = f"layers.{index}.feed_forward.experts", f"model.layers.{index}.mlp.experts"
        chosen = sorted({0, model.n_experts - 1})
        with torch.device("meta"):
            experts = replace(model, n_experts=len(chosen)).build_experts(index)
        few: dict[str, Source] = {
            f"{name}.{own}": Stacked(tuple(Indexed(self._ours[f"{name}.{own}"], e) for e in chosen))
            for own, _ in experts.named_parameters()
        }
        lend(experts, name, few)
        inner: list[Tensor] = []
        activation = experts.activation

        def keeping(gate: Tensor, up: Tensor) -> Tensor:
            inner.extend((gate, up))
            return activation(gate, up)

        experts.activation = keeping
        counts = torch.full((len(chosen),), len(x))
        output = experts(x.float().repeat(len(chosen), 1), counts)
        for place, expert in enumerate(chosen):
            if f"{theirs}.gate_up_proj_bias" in self._raw:
                expected = reference.fused_expert(x, self._raw, theirs, expert, self._config)
            else:
                expected = reference.feed_forward(x, self._raw, f"{theirs}.{expert}")
            rows = slice(place * len(x), (place + 1) * len(x))
            yield f"{name}.gate", inner[0][rows], expected.gate
            yield f"{name}.up", inner[1][rows], expected.up
            yield f"{name}.down", output[rows], expected.output

    def _ahead(self, model: DeepSeek) -> Iterator[Part]:
        """What the extra layer makes of a hidden state and the next token's embedding."""
        ours, theirs = f"layers.{model.n_layers}", f"model.layers.{model.n_layers}"
        hidden, following = self._random(), self._random()
        with torch.device("meta"):
            *_, block = model.build().eval().layers.values()
        lend(block, ours, self._ours)
        both = (
            block.get_submodule("hidden_norm")(hidden.float()),
            block.get_submodule("embedding_norm")(following.float()),
        )
        found = block.get_submodule("projection")(torch.cat(both, dim=-1))
        normed = (
            reference.rms_norm(following, self._raw.vector(f"{theirs}.enorm.weight"), self._config),
            reference.rms_norm(hidden, self._raw.vector(f"{theirs}.hnorm.weight"), self._config),
        )
        expected = self._raw.product(torch.cat(normed, dim=-1), f"{theirs}.eh_proj.weight")
        yield f"{ours}.projection", found, expected
