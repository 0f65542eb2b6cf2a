"""Comparisons of runs whose figures are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comparison_examples import STEPS, fall, with_rate, write_group, write_run

from armillary.analysis.comparison import Comparison, compare
from armillary.analysis.contenders import Contender, contenders_of
from armillary.analysis.curves import Curve, band_of, smoothed
from armillary.analysis.document import document_of
from armillary.analysis.runs import read_run
from armillary.analysis.verdict import verdict_of
from armillary.cli.compare_text import comparison_text
from armillary.data.config import Mixture, Part, Text
from armillary.data.tokenizer_subword import Bpe
from armillary.foundation.errors import UserError
from armillary.recipe.registry import get
from armillary.telemetry.events import EventLog

EMPTY = Curve(tokens=np.empty(0), flops=np.empty(0), seconds=np.empty(0), values=np.empty(0))
GOOD, BAD = [2.00, 2.02, 1.98], [2.30, 2.33, 2.27]


def of(folders: list[Path]) -> list[Contender]:
    return contenders_of(folders, {}, {})


def good_and_bad(folder: Path) -> Comparison:
    runs = write_group(folder, "good", GOOD, with_rate(1e-3))
    return compare(of([*runs, *write_group(folder, "bad", BAD, with_rate(2e-3))]))


def test_runs_that_differ_by_seed_alone_are_one_recipe(tmp_path: Path) -> None:
    comparison = good_and_bad(tmp_path)
    assert [each.seeds for each in comparison.contenders] == [[0, 1, 2], [0, 1, 2]]
    assert [(row.name, row.values) for row in comparison.leaves] == [("optimizer.lr", (1e-3, 2e-3))]


def test_a_difference_is_found_with_its_size_and_its_test(tmp_path: Path) -> None:
    verdict = verdict_of(good_and_bad(tmp_path))
    assert verdict.kind == "different"
    assert verdict.text.startswith("A is better by 0.300 bits per byte (95 % interval")
    assert "paired t, 3 seeds" in verdict.text


def test_no_difference_is_said_to_be_none_with_what_would_have_been_found(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "one", [2.0, 2.1, 1.9], with_rate(1e-3))
    runs += write_group(tmp_path, "two", [2.1, 1.9, 2.0], with_rate(2e-3))
    verdict = verdict_of(compare(of(runs)))
    assert verdict.kind == "no significant difference"
    assert "No significant difference between A and B" in verdict.text
    assert "would be found in 4 of 5" in verdict.text


def test_one_seed_is_said_to_tell_nothing(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "one", [2.0], with_rate(1e-3))
    runs += write_group(tmp_path, "two", [2.5], with_rate(2e-3))
    verdict = verdict_of(compare(of(runs)))
    assert verdict.kind == "cannot be told"
    assert "cannot be told with one seed" in verdict.text
    assert "A lower by 0.500" in verdict.text


def test_a_diverged_run_is_counted_and_its_siblings_do_not_win(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "good", GOOD, with_rate(1e-3))
    runs += write_group(tmp_path, "wild", [1.0, 1.0], with_rate(2e-3))
    runs.append(
        write_run(
            tmp_path / "wild-2",
            seed=2,
            recipe=with_rate(2e-3),
            loss=lambda number: fall(number) if number < 30 else math.nan,
        )
    )
    comparison = compare(of(runs))
    assert [run.outcome for run in comparison.contenders[1].runs][-1] == "diverged"
    assert "B: 1 of 3 runs diverged" in comparison.notes
    assert verdict_of(comparison).kind == "no significant difference"
    assert "would flatter" in verdict_of(comparison).text
    assert comparison.pairs[0].interval is None


def test_a_failed_run_and_one_that_is_not_finished_have_no_result(tmp_path: Path) -> None:
    failed = write_run(tmp_path / "failed", exit_code=1, seed=0)
    unfinished = write_run(tmp_path / "stopped", exit_code=75, seed=1)
    fine = write_run(tmp_path / "fine", seed=2)
    runs = of([failed, unfinished, fine])[0].runs
    assert [run.outcome for run in runs] == ["failed", "unfinished", "finished"]
    assert [run.bits_per_byte for run in runs] == [None, None, 2.0]


def test_other_tokenizers_are_compared_by_bits_per_byte_alone(tmp_path: Path) -> None:
    debug = get("debug")
    words = replace(debug, data=replace(debug.data, tokenizer=Bpe(vocab_size=260)))
    runs = [*write_group(tmp_path, "a", GOOD), *write_group(tmp_path, "b", BAD, words)]
    comparison = compare(of(runs))
    assert (comparison.comparable.bits, comparison.comparable.loss) == (True, False)
    assert any("tokenizers differ" in note for note in comparison.notes)
    assert {equal.figure for equal in comparison.equals} == {"bits_per_byte"}
    assert "nats" not in comparison_text(comparison)


def test_one_recipe_held_against_itself_stays_two_when_it_is_shown_again(tmp_path: Path) -> None:
    runs = tmp_path / "out" / "runs"
    one, other = (
        [write_run(runs / key / f"seed-{seed}", seed=seed) for seed in seeds]
        for key, seeds in (("A", (0, 1)), ("B", (2, 3)))
    )
    names = dict.fromkeys(one, "debug #1") | dict.fromkeys(other, "debug #2")
    found = contenders_of([*one, *other], {}, names)
    assert [(each.name, each.seeds) for each in found] == [
        ("debug #1", [0, 1]),
        ("debug #2", [2, 3]),
    ]
    assert len(of([*one, *other])) == 1


def test_the_winner_among_the_survivors_is_not_ranked_first(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "good", GOOD, with_rate(1e-3))
    runs += write_group(tmp_path, "wild", [1.0, 1.0], with_rate(2e-3))
    runs.append(write_run(tmp_path / "died", seed=2, recipe=with_rate(2e-3), exit_code=1))
    assert [each.key for each in compare(of(runs)).ranked()] == ["A", "B"]


def test_other_shares_of_a_mixture_leave_bits_per_byte_alone(tmp_path: Path) -> None:
    runs = []
    for name, losses, weight in (("a", GOOD, 1.0), ("b", BAD, 3.0)):
        corpus = Mixture(parts=(Part(corpus=Text()), Part(corpus=Text(), weight=weight)))
        recipe = replace(get("debug"), data=replace(get("debug").data, corpus=corpus))
        runs += write_group(tmp_path, name, losses, recipe)
    may = compare(of(runs)).comparable
    assert (may.bits, may.loss) == (True, False)
    assert "shares" in may.why


def test_a_run_with_stages_is_known_by_all_its_documents_and_costs_what_each_stage_costs(
    tmp_path: Path,
) -> None:
    runs = []
    for name, second in (("one", "c1"), ("other", "c2")):
        folder = write_run(tmp_path / name, seed=len(runs), exit_code=None, flops_per_token=1e6)
        with EventLog(folder / "events.jsonl") as log:
            spans = ((1, STEPS // 2, "c0", 1e6), (STEPS // 2 + 1, STEPS, second, 3e6))
            for index, (first, last, corpus, cost) in enumerate(spans):
                log.emit(
                    "stage", first - 1, name=str(index), index=index, first_step=first,
                    last_step=last, set=[], data_fingerprint="d", corpus_fingerprint=corpus,
                    flops_per_token=cost,
                )  # fmt: skip
        runs.append(read_run(folder))
    assert [run.text.corpus for run in runs] == [("c0", "c1"), ("c0", "c2")]
    assert runs[0].flops_per_token == pytest.approx(2e6)


def test_bits_asked_as_a_target_are_never_held_against_nats(tmp_path: Path) -> None:
    runs = [
        replace(each, runs=tuple(replace(run, looks=EMPTY) for run in each.runs))
        for each in good_and_bad(tmp_path).contenders
    ]
    asked = compare(runs, target_loss=2.5)
    assert asked.figure == "bits_per_byte"
    assert asked.target is None
    assert any("time to the target is not known" in note for note in asked.notes)
    own = compare(runs).target
    assert own is not None
    assert own.figure == "loss"


def test_other_documents_are_not_compared_at_all(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "a", GOOD, with_rate(1e-3), corpus_fingerprint="one")
    runs += write_group(tmp_path, "b", BAD, with_rate(2e-3), corpus_fingerprint="other")
    comparison = compare(of(runs))
    assert comparison.figure is None
    assert verdict_of(comparison).kind == "cannot be told"
    assert "different documents" in verdict_of(comparison).text
    assert not comparison.pairs


def test_without_held_out_text_the_training_loss_decides(tmp_path: Path) -> None:
    runs = []
    for name, shift, rate in (("a", 0.0, 1e-3), ("b", 0.4, 2e-3)):
        for seed in range(3):

            def loss(number: int, shift: float = shift, seed: int = seed) -> float:
                return fall(number) + shift + 0.01 * seed * (1 + shift)

            folder = tmp_path / f"{name}-{seed}"
            runs.append(write_run(folder, seed=seed, bits=None, loss=loss, recipe=with_rate(rate)))
    comparison = compare(of(runs))
    assert comparison.figure == "loss"
    assert "nats per token" in verdict_of(comparison).text
    assert verdict_of(comparison).kind == "different"


def test_a_repeat_with_the_same_seed_is_no_further_sample(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=3) for name in ("once", "again")]
    with pytest.raises(UserError, match="one seed, 3"):
        of(runs)


def test_runs_that_do_not_tell_their_seed_are_not_paired(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "a", GOOD, with_rate(1e-3))
    runs += write_group(tmp_path, "b", BAD, with_rate(2e-3))
    unknown = [
        replace(each, runs=tuple(replace(run, seed=None) for run in each.runs)) for each in of(runs)
    ]
    assert compare(unknown).pairs[0].test == "Welch t"


def test_losses_at_equal_time_are_read_where_the_slowest_ends(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "fast", GOOD, with_rate(1e-3), seconds=0.5)
    runs += write_group(tmp_path, "slow", GOOD, with_rate(2e-3), seconds=2.0)
    comparison = compare(of(runs))
    at = {(equal.axis, equal.figure): equal for equal in comparison.equals}
    equal = at["seconds", "loss"]
    assert equal.point == pytest.approx(STEPS * 0.5)
    fast, slow = equal.means
    assert fast is not None and slow is not None
    assert fast.value < slow.value
    one, other = at["tokens", "loss"].means
    assert one is not None and other is not None
    assert one.value == pytest.approx(other.value)


def test_the_time_to_a_target_and_the_cost_follow_from_the_steps(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "fast", GOOD, with_rate(1e-3), seconds=0.5)
    runs += write_group(tmp_path, "slow", [2.5, 2.6, 2.4], with_rate(2e-3), seconds=2.0)
    comparison = compare(of(runs), target_loss=2.075, price_per_hour=3.6)
    target = comparison.target
    assert target is not None
    fast, slow = target.reached
    assert (fast.runs, slow.runs) == (3, 0)
    # the looks of seed 0 are 2.1 at step 10 and 2.05 at step 20: 2.075 half-way between
    first = comparison.contenders[0].runs[0]
    assert first.looks.first_reaching("seconds", 2.075) == pytest.approx(7.5)
    assert comparison.cost(first) == pytest.approx(STEPS * 0.5 / 1000)


def test_several_recipes_are_ranked_with_holms_correction(tmp_path: Path) -> None:
    runs = write_group(tmp_path, "a", GOOD, with_rate(1e-3))
    runs += write_group(tmp_path, "b", [2.01, 2.00, 1.99], with_rate(2e-3))
    runs += write_group(tmp_path, "c", BAD, with_rate(3e-3))
    comparison = compare(of(runs))
    text = verdict_of(comparison).text
    assert "No significant difference from" in text
    assert "significantly better than C" in text
    assert "Holm" in text
    raw = {(pair.first, pair.second): pair for pair in comparison.pairs}
    pair = raw["A", "C"]
    assert pair.p is not None and pair.adjusted_p is not None
    assert pair.adjusted_p > pair.p


def test_three_sizes_are_fitted(tmp_path: Path) -> None:
    runs = []
    for size, bits in ((1, 2.4), (4, 2.2), (16, 2.1)):
        recipe = replace(get("debug"), model=replace(get("debug").model, n_layers=2 * size))
        figures = {"parameters": 1_000_000 * size, "flops_per_token": 6e6 * size}
        losses = [bits, bits + 0.01]
        runs += write_group(tmp_path, f"size-{size}", losses, recipe, **figures)
    fit = compare(of(runs)).fit
    assert fit is not None
    assert fit.sizes == 3
    assert fit.intervals is not None
    assert fit.compute[-1] / fit.compute[0] == pytest.approx(16, rel=5e-3)


def test_the_document_is_json_without_surprises_and_the_text_has_the_verdict(
    tmp_path: Path,
) -> None:
    comparison = good_and_bad(tmp_path)
    document = json.loads(json.dumps(document_of(comparison), allow_nan=False))
    assert document["verdict"]["kind"] == "different"
    assert document["pairs"][0]["significant"] is True
    means = document["recipes"][0]["means"]
    assert means["bits_per_byte"]["mean"] == pytest.approx(2.0)
    curve = document["recipes"][0]["curves"]["loss"]["tokens"]
    assert len(curve["x"]) == len(curve["mean"]) == len(curve["half_width"]) == STEPS
    text = comparison_text(comparison)
    assert text.startswith("verdict: A is better by 0.300")
    assert "optimizer.lr" in text


def test_a_folder_that_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "step"}\n')
    with pytest.raises(UserError, match="not the events of a run"):
        of([tmp_path])


def test_figures_of_odd_types_are_unknown_and_break_nothing(tmp_path: Path) -> None:
    odd = {"seed": [1], "device": {}, "world_size": "2", "corpus_fingerprint": ["c0"]}
    runs = [
        write_run(tmp_path / str(rate), recipe=with_rate(rate), **odd, flops_per_token=1e308)
        for rate in (1e-3, 2e-3)
    ]
    comparison = compare(of(runs))
    json.dumps(document_of(comparison), allow_nan=False)
    assert comparison.contenders[0].runs[0].device is None
    assert "do not say which" in comparison.comparable.why


def test_smoothing_looks_back_only_and_weighs_by_tokens() -> None:
    losses, weights = np.array([4.0, 2.0, math.nan, 1.0]), np.array([1.0, 1.0, 1.0, 3.0])
    assert smoothed(losses, weights, 0.5) == pytest.approx([4.0, 3.0, 3.0, 1.0])
    assert np.isnan(smoothed(np.array([1.0, math.nan]), np.ones(2), 0.5)[1])


def test_a_band_covers_what_all_seeds_have() -> None:
    def curve(values: list[float], last: int) -> Curve:
        x = np.arange(1.0, last + 1)
        return Curve(tokens=x, flops=x, seconds=x, values=np.array(values))

    band = band_of([curve([3, 2, 1], 3), curve([5, 4], 2)], "tokens", 50)
    assert band is not None
    assert band.points.tolist() == [1, 2]
    assert band.mean.tolist() == [4, 3]
    assert band.half_width is not None
    assert band.half_width == pytest.approx([12.7062, 12.7062], rel=1e-5)
