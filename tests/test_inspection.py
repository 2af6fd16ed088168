"""Measurements along the depth, on models whose angles are known, and the laws fitted to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from family_models import FAMILIES, prompts, rewired_model, stock_model
from geonorm import UserError
from geonorm.inspection import LAWS, fit_laws, gradient_norms, inspect_model, recorded_angles, watched
from geonorm.inspection.sample_text import make_windows, read_text
from geonorm.models import rewire, stock_placement
from geonorm.placements import Site
from geonorm.schedules import step_sizes
from known_walks import SPECIAL_TOKEN, known_walk
from tiny_models import TEXT, tiny_tokenizer
from tolerances import EPS

WINDOW = list(range(2, 12))
EXACT = 1e-9


def walk_of(attention, mlp):
    turns = [turn for pair in zip(attention, mlp, strict=True) for turn in pair]
    radii = [0.5 * 1.3**step for step in range(len(turns) + 1)]
    return known_walk(turns, radii), turns, radii


def test_every_quantity_on_a_known_walk():
    model, turns, radii = walk_of([0.6, 0.3, 0.2], [1.2, 0.05, 2.5])
    found = inspect_model(model, [WINDOW, WINDOW[:5]], skip_first=1)
    assert [(row.layer, row.sublayer) for row in found.sublayers[:3]] == [
        (1, "attention"),
        (1, "mlp"),
        (2, "attention"),
    ]
    assert (found.num_tokens, found.num_counted, found.num_layers) == (15, 13, 3)
    for row, turn, before, after in zip(found.sublayers, turns, radii, radii[1:], strict=False):
        along, across = after * math.cos(turn) - before, after * math.sin(turn)
        wanted = {
            "radius": before,
            "angle": turn,
            "along": along,
            "across": across,
            "update": math.hypot(along, across),
            "alpha": turn / across,
            "alpha_normalized": turn * math.hypot(along, across) / across,
        }
        for name, value in wanted.items():
            got = getattr(row, name)
            assert got.median == pytest.approx(value, rel=EXACT), name
            # Every token takes the same way, so nothing spreads.
            assert (got.q25, got.q75) == pytest.approx((value, value), rel=EXACT), name
        assert math.isclose(math.atan2(row.across.median, row.radius.median + row.along.median), turn)
    assert found.radius_end.median == pytest.approx(radii[-1])


def test_the_laws_that_a_model_follows_are_found():
    layers = range(1, 13)
    model, *_ = walk_of([0.9 / k for k in layers], [0.7 / math.sqrt(k) for k in layers])
    laws = inspect_model(model, [WINDOW]).laws
    for series, law, scale, exponent in (("attention", "harmonic", 0.9, 1.0), ("mlp", "sqrt", 0.7, 0.5)):
        for fits in laws[series]:
            assert fits.fit(law).scale == pytest.approx(scale)
            assert fits.fit(law).error == pytest.approx(0, abs=1e-6)
            assert fits.fit("power").exponent == pytest.approx(exponent)
            assert fits.best in (law, "power")
    # Step sizes are angle over length across, so here they follow the radius, which grows by 1.3 a step.
    found = inspect_model(model, [WINDOW]).alpha_laws["both"][0]
    alphas = [row.alpha.median for row in inspect_model(model, [WINDOW]).sublayers]
    assert found == fit_laws([1 + step // 2 for step in range(24)], alphas, 12)
    assert laws["both"][0].num_points == 24
    assert laws["both"][1].num_points == 20


@pytest.mark.parametrize("exponent", [-0.3, 0.0, 0.31, 0.5, 1.0, 1.4])
def test_exponents_are_recovered_from_noisy_data(exponent):
    rng = np.random.default_rng(7)
    layers = np.arange(1, 31)
    values = 0.8 * layers**-exponent * np.exp(rng.normal(0, 0.05, 30))
    fits = fit_laws(layers.tolist(), values.tolist(), 30)
    power = fits.fit("power")
    assert abs(power.exponent - exponent) < 3 * power.exponent_error < 0.1
    assert power.scale == pytest.approx(0.8, rel=0.15)
    assert power.error == pytest.approx(math.expm1(0.05), rel=0.5)


@pytest.mark.parametrize("law", ["none", "harmonic", "sqrt", "linear"])
def test_the_law_behind_noisy_data_wins_over_the_freer_one_or_nearly(law):
    rng = np.random.default_rng(0)
    wins = 0
    for _ in range(20):
        values = np.array(step_sizes(law, 0.5, 24)) * np.exp(rng.normal(0, 0.1, 24))
        fits = fit_laws(list(range(1, 25)), values.tolist(), 24)
        wins += fits.best == law
        assert fits.best in (law, "power")
    # A power law with its one number more is chosen by chance now and then; it must not be the rule.
    assert wins >= 12


def test_held_out_error_is_that_of_fits_without_the_point():
    layers, values = [1, 2, 3, 5, 8], [0.9, 0.7, 0.4, 0.3, 0.25]
    found = fit_laws(layers, values, 8)
    for law in LAWS:
        residuals = []
        for out in range(5):
            rest = fit_laws([k for i, k in enumerate(layers) if i != out], np.delete(values, out).tolist(), 8)
            residuals.append(math.log(values[out] / rest.fit(law).at(layers[out], 8)))
        assert found.fit(law).held_out == pytest.approx(math.expm1(np.sqrt(np.mean(np.square(residuals)))))


def test_few_points_and_zero_angles_make_no_law():
    assert fit_laws([1, 2], [0.5, 0.4], 2).best is None
    assert fit_laws([1, 1, 1], [0.5, 0.4, 0.3], 2).best is None
    fits = fit_laws([1, 2, 3, 4], [0.5, 0.0, 0.4, 0.3], 4)
    assert (fits.num_points, fits.num_left_out) == (3, 1)
    with pytest.raises(UserError, match=r"1\.\.3, got 1\.\.4"):
        fit_laws([1, 4], [0.5, 0.4], 3)
    with pytest.raises(UserError, match="equally many"):
        fit_laws([1], [0.5, 0.4], 3)


def test_the_step_size_of_a_geonorm_model_is_read_back():
    model = rewired_model("llama", "geonorm", options={"decay": "sqrt", "max_angle": None, "alpha": 0.4})
    for row in inspect_model(model, prompts(2, 12).tolist()).sublayers:
        alpha = model.config.placement_options["alpha"] / math.sqrt(row.layer)
        for value in (row.alpha.q25, row.alpha.median, row.alpha.q75):
            assert value == pytest.approx(alpha, rel=1e-4)


def test_normalised_updates_bound_the_angle_by_the_step_size():
    options = {"normalize_update": True, "alpha": 0.5, "max_angle": None}
    model = rewired_model("llama", "geonorm", options=options)
    for row in inspect_model(model, prompts(2, 12).tolist()).sublayers:
        alpha = model.model.layers[0].placement.alpha_at(Site(row.layer, row.sublayer, 2))
        assert row.angle.q75 <= alpha
        assert row.alpha_normalized.median == pytest.approx(alpha, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_model_is_measured_like_its_rewired_self_and_left_as_it_is(family):
    model, ids = stock_model(family), prompts(1, 13)  # an odd number has one median
    before = model(input_ids=ids).logits
    found = inspect_model(model, ids.tolist(), skip_first=0)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert type(model) is type(stock_model(family))
    loss = functional.cross_entropy(before[0, :-1], ids[0, 1:]).item()
    assert found.loss == pytest.approx(loss, rel=1e-5)
    with recorded_angles(rewire(model, stock_placement(model))) as angles, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for sublayer in ("attention", "mlp"):
        assert found.angles(sublayer) == pytest.approx(angles[sublayer], rel=1e-4)


@pytest.mark.parametrize("placement", ["pre", "sandwich", "output", "parallel"])
def test_the_update_is_what_was_added_to_the_stream(placement):
    model = rewired_model("gemma2", placement).double()
    moves = []
    with watched(model, lambda site, move: moves.append(move)), torch.no_grad():
        model(input_ids=prompts(1, 6))
    assert len(moves) == 4
    for move in moves:
        torch.testing.assert_close(move.x + move.update, move.y, rtol=1e-9, atol=1e-9)


def test_gradient_norms_are_those_of_the_mean_loss_and_leave_no_trace():
    model = stock_model("llama")
    windows = prompts(2, 10).tolist()
    found = inspect_model(model, windows, gradients=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    ids = torch.tensor(windows)
    logits = model(input_ids=ids).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert found.gradient_norms == pytest.approx(gradient_norms(rewire(model, "pre")), rel=1e-4)
    assert inspect_model(model, windows).gradient_norms is None


def test_the_first_token_is_left_out_and_its_influence_told():
    model, turns, radii = walk_of([0.6, 0.3], [0.2, 0.1])
    windows = [[SPECIAL_TOKEN, 5, 6], [SPECIAL_TOKEN, 7, 8]]
    found = inspect_model(model, windows, skip_first=1)
    assert found.sublayers[0].first_radius == pytest.approx(100 * radii[0])
    assert found.sublayers[0].first_angle < 0.01
    assert found.sublayers[0].angle.q25 == pytest.approx(turns[0])
    everything = inspect_model(model, windows, skip_first=0)
    assert everything.sublayers[0].angle.q25 < 0.9 * turns[0]
    odd = inspect_model(model, [[SPECIAL_TOKEN, 5]], skip_first=0)
    assert odd.first_token_influence == 0
    pair = inspect_model(model, [[SPECIAL_TOKEN, 5, 6]], skip_first=1)
    assert pair.first_token_influence == 0  # the median of three is not moved by one
    even = inspect_model(model, [[SPECIAL_TOKEN, SPECIAL_TOKEN, 5]], skip_first=1)
    assert even.first_token_influence > 0.3


def test_bfloat16_angles_are_near_those_of_float32():
    model = stock_model("llama")
    wide = inspect_model(model, prompts(1, 20).tolist())
    narrow = inspect_model(model.bfloat16(), prompts(1, 20).tolist())
    for one, other in zip(wide.sublayers, narrow.sublayers, strict=True):
        assert other.angle.median == pytest.approx(one.angle.median, rel=64 * EPS[torch.bfloat16] / 8)


def test_windows_may_be_a_tensor():
    model = stock_model("llama")
    assert inspect_model(model, torch.tensor([WINDOW, WINDOW])) == inspect_model(model, [WINDOW, WINDOW])


def test_a_sub_layer_that_does_nothing():
    model, *_ = walk_of([0.5, 0.4, 0.3], [0.3, 0.2, 0.1])
    with torch.no_grad():
        model.model.layers[1].mlp.update.zero_()
    found = inspect_model(model, [WINDOW])
    row = found.sublayers[3]
    assert row.angle.median == 0
    assert math.isnan(row.alpha.median)
    assert found.laws["mlp"][0].num_left_out == 1


def test_mistakes_are_one_clear_line():
    model = stock_model("llama")
    for windows, options, message in (
        ([], {}, "no window of tokens"),
        ([[1, 2]], {}, "window of 2 tokens is too short: with `skip_first` 1 it takes 3"),
        ([[1, 2, 64]], {}, "token id 64 is outside the model's vocabulary of 64"),
        ([[1, 2, -1]], {}, "token id -1"),
        ([[1, 2, 3]], {"skip_first": -1}, "`skip_first` must be a whole number of at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            inspect_model(model, windows, **options)
    for value in (math.nan, math.inf):
        broken = stock_model("llama")
        with torch.no_grad():
            broken.model.layers[1].mlp.down_proj.weight[0, 0] = value
        with pytest.raises(UserError, match="the stream at mlp 2 is not finite"):
            inspect_model(broken, [WINDOW])
    with pytest.raises(UserError, match="no language-model head"):
        inspect_model(model.model, [[1, 2, 3]], gradients=True)
    assert inspect_model(model.model, [[1, 2, 3]]).loss is None
    with pytest.raises(UserError, match="every weight of this model is frozen"):
        inspect_model(model.requires_grad_(False), [[1, 2, 3]], gradients=True)
    with pytest.raises(UserError, match="cannot rewire a Linear"):
        inspect_model(torch.nn.Linear(2, 2), [[1, 2, 3]])


def test_windows_are_spread_over_the_text_and_start_at_words():
    tokenizer = tiny_tokenizer()
    words = [f"word{number:04d}" for number in range(3000)]
    windows = make_windows(" ".join(words), tokenizer, num_windows=4, length=30)
    assert [len(window) for window in windows.ids] == [30] * 4
    starts = [tokenizer.decode(window).split()[0] for window in windows.ids]
    assert [words.index(start) // 700 for start in starts] == [0, 1, 2, 3]
    assert windows.added == ()


def test_a_short_text_gives_fewer_windows_and_then_shorter_ones():
    tokenizer = tiny_tokenizer()
    whole = tokenizer(TEXT)["input_ids"]
    assert len(make_windows(TEXT, tokenizer, num_windows=4, length=len(whole) // 2).ids) <= 2
    (only,) = make_windows(TEXT, tokenizer, num_windows=4, length=500).ids
    assert list(only) == whole
    with pytest.raises(UserError, match="fewer than two tokens"):
        make_windows("", tokenizer, num_windows=1, length=5)


def test_special_tokens_of_the_tokenizer_are_named_and_can_be_left_out():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    token, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A {token}", special_tokens=[(token, number)]
    )
    windows = make_windows(TEXT * 20, tokenizer, num_windows=2, length=20)
    assert windows.added == (token,)
    assert all(window[0] == number and number not in window[1:] for window in windows.ids)
    plain = make_windows(TEXT * 20, tokenizer, num_windows=2, length=20, special_tokens=False)
    assert plain.added == ()
    assert all(number not in window for window in plain.ids)


def test_the_default_text_is_english_documentation_from_this_machine():
    text = read_text(())
    assert "standard library" in text.name
    assert text.text.lower().count(" the ") > 1000
    assert read_text(()).digest == text.digest
