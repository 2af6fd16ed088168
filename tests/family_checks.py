"""What has to hold for every family in every placement: one function a check, ``check(family, placement, folder)``."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
import re

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from family_models import VOCABULARY, adapter_of, moved, prompts, rewired_model, stock_config, stock_model
from geonorm import UserError
from geonorm.models import base_model, current_placement, init_report, init_weights, rewire, stock_placement
from geonorm.placements import Wiring, create
from geonorm.placements.base import WEIGHT_ROLES
from tolerances import EPS, SAME_LOGITS

# A learnable step size is a parameter that is no weight; every other option is on its default.
OPTIONS = {"geonorm": {"learnable": True, "decay": "sqrt"}}
FIRST_QUERY = r"\.0\.attention_connection\.query\.weight$"


def make(family, placement, seed=0, **changes):
    return rewired_model(family, placement, seed, OPTIONS.get(placement), **changes)


def same_state(one, two):
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value), name
    for (name, mine), (other, theirs) in zip(one.named_buffers(), two.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs), name


def save_and_reload(family, placement, folder):
    """Altered weights come back bit for bit, through the automatic classes and through ours."""
    model, ids = make(family, placement), prompts(2, 9)
    expected = model(ids).logits
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    adapter = adapter_of(family)
    for kind in (AutoModelForCausalLM, adapter.rewired.causal_lm):
        loaded, info = kind.from_pretrained(folder, output_loading_info=True)
        assert type(loaded) is adapter.rewired.causal_lm
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert loaded.config.placement_options == model.config.placement_options
        same_state(model, loaded)
        assert torch.equal(loaded.eval()(ids).logits, expected)
    headless = AutoModel.from_pretrained(folder).eval()
    assert type(headless) is adapter.rewired.model
    assert torch.equal(headless(ids).last_hidden_state, base_model(model)(ids).last_hidden_state)


def generate(family, placement, folder):
    """Prompts of 3 and 9 tokens, left-padded together and alone, cache on and off; also sampling and beams."""
    model = make(family, placement)
    short, long = prompts(1, 3), prompts(1, 9, seed=1)
    padded = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(padded)
    mask[0, :6] = 0
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings["return_dict_in_generate"] = True
    both = model.generate(padded, attention_mask=mask, **settings)
    uncached = model.generate(padded, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(both.sequences, uncached.sequences)
    for row, prompt in enumerate((short, long)):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(both.sequences[row, -20:], alone.sequences[0, -20:])
        for a, b, c in zip(both.logits, alone.logits, uncached.logits, strict=True):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a[row], b[0], atol=SAME_LOGITS, rtol=SAME_LOGITS)
            torch.testing.assert_close(a[row], c[row], atol=SAME_LOGITS, rtol=SAME_LOGITS)
    short_run = {"attention_mask": mask, "max_new_tokens": 3, "pad_token_id": 0}
    for extra in ({"do_sample": True}, {"do_sample": False, "num_beams": 2}):
        assert model.generate(padded, **short_run, **extra).shape == (2, 12)


def configuration(family, placement, folder):
    """Every field at another value survives saving; so does a larger vocabulary, tied and untied."""
    adapter = adapter_of(family)
    config = adapter.rewired.config(
        **{**changed_fields(family), "placement": placement, "placement_options": OPTIONS.get(placement)}
    )
    config.save_pretrained(folder / "config")
    saved = AutoConfig.from_pretrained(folder / "config")
    assert type(saved) is adapter.rewired.config
    assert {**saved.to_dict(), "_name_or_path": ""} == config.to_dict()
    ids = prompts(2, 9)
    for tied in (False, True):
        model, added = make(family, placement, tie_word_embeddings=tied), 3
        old = model.get_input_embeddings().weight.detach().clone()
        if create(placement).inside("head", VOCABULARY, 32, 0) is not None:
            with pytest.raises(UserError, match="has a scale for each token; choose the vocabulary before rewiring"):
                model.resize_token_embeddings(VOCABULARY + added)
            added = 0
        else:
            model.resize_token_embeddings(VOCABULARY + added)
        model.save_pretrained(folder / str(tied))
        loaded = AutoModelForCausalLM.from_pretrained(folder / str(tied))
        assert loaded.config.vocab_size == VOCABULARY + added
        head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
        assert (head is embedding) == tied
        assert torch.equal(embedding[:VOCABULARY], old)
        loss = loaded(ids, labels=ids).loss
        loss.backward()
        torch.optim.SGD(loaded.parameters(), lr=0.02).step()
        assert loaded(ids, labels=ids).loss < loss


def changed_fields(family):
    """The configuration with every switch flipped and every other field off its default that leaves it consistent."""
    config = stock_settings(stock_config(family))
    changed = {}
    for key, value in config.items():
        if isinstance(value, bool):
            changed[key] = not value and key != "add_cross_attention"
        elif isinstance(value, float):
            changed[key] = value * 2 if "eps" in key or key == "initializer_range" else value + 0.25
        elif key in ("hidden_act", "hidden_activation", "activation_function"):
            changed[key] = "relu"
        elif value is None and key.endswith("softcapping"):
            changed[key] = 7.0
        elif value is None and key.endswith("token_id"):
            changed[key] = 7
    return {**config, **changed}


def rewire_twice(family, placement, folder):
    """Another model stays as it is, a second rewiring is a no-op or an error in one line."""
    config = stock_config(family)
    one, two = (adapter_of(family).stock.causal_lm(config).eval() for _ in range(2))
    ids = prompts(2, 9)
    before, names = two(ids).logits, list(two.state_dict())
    expected = create(placement)
    assert rewire(one, placement) is one
    assert current_placement(one) == expected
    assert stock_placement(one) == stock_placement(two) == current_placement(two)
    assert type(two) is adapter_of(family).stock.causal_lm
    assert two.config.model_type == config.model_type == family.split()[0]
    assert list(two.state_dict()) == names
    assert torch.equal(two(ids).logits, before)
    weights = [parameter.data_ptr() for parameter in one.parameters()]
    assert rewire(one, placement) is one
    assert [parameter.data_ptr() for parameter in one.parameters()] == weights
    with pytest.raises(UserError, match="already rewired to") as caught:
        rewire(one, "pre" if placement != "pre" else "post")
    assert "\n" not in str(caught.value)
    one.save_pretrained(folder)
    assert current_placement(AutoModelForCausalLM.from_pretrained(folder)) == expected
    assert json.loads((folder / "config.json").read_text())["model_type"] == f"geonorm_{config.model_type}"


def attention_kernels(family, placement, folder):
    """Eager, sdpa and flex attention, where the family supports them, give the same logits; returns which were run."""
    model, ids = make(family, placement), prompts(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.set_attn_implementation("eager")
    # On a CPU flex attention has no backward pass.
    model.requires_grad_(False)
    expected = model(ids, attention_mask=mask).logits
    kinds = ["eager"]
    for kind, supported in (("sdpa", model._supports_sdpa), ("flex_attention", model._supports_flex_attn)):
        if supported:
            model.set_attn_implementation(kind)
            assert model.config._attn_implementation == kind
            got = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=SAME_LOGITS, rtol=SAME_LOGITS)
            kinds.append(kind.removesuffix("_attention"))
    return ", ".join(kinds)


def recorded(family, placement, folder):
    """Hidden states and attentions are recorded; activation checkpointing changes no gradient."""
    model, ids = make(family, placement), prompts(2, 9)
    model.set_attn_implementation("eager")
    out = model(ids, output_hidden_states=True, output_attentions=True)
    wiring = Wiring(placement, 32, 2)
    stream = wiring.enter(torch.zeros(2, 9, 32))
    for connection in wiring.connections[:2]:
        stream = connection(stream, torch.zeros_like)
    # Between layers the stream, which may have several rows a token.
    assert [tuple(state.shape) for state in out.hidden_states] == [(2, 9, 32), tuple(stream.shape), (2, 9, 32)]
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, 4, 9, 9)] * 2
    model.train()

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    model.activation_checkpointing_enable()
    checkpointed = gradients()
    for name, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name]), name


def bfloat16(family, placement, folder):
    """A bfloat16 model keeps one dtype, is near the float32 one, and comes back bit for bit."""
    wide, ids = make(family, placement), prompts(2, 9)
    wide.save_pretrained(folder / "wide")
    model = AutoModelForCausalLM.from_pretrained(folder / "wide", dtype=torch.bfloat16).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(ids).logits
    difference = (logits.float() - wide(ids).logits).norm() / wide(ids).logits.norm()
    # Each of some dozen operations rounds once; independent roundings of rows add up like a random walk.
    assert difference < 12 * EPS[torch.bfloat16], difference
    model.save_pretrained(folder / "narrow")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "narrow", dtype=torch.bfloat16).eval()
    same_state(model, loaded)
    assert torch.equal(loaded(ids).logits, logits)
    direct = rewire(stock_model(family).to(torch.bfloat16), placement, **OPTIONS.get(placement, {}))
    assert {parameter.dtype for parameter in direct.parameters()} == {torch.bfloat16}


def drawn_by_rule(family, placement, folder):
    """Every weight, and every part of a fused one, has the standard deviation of its rule; constants are exact."""
    config = adapter_of(family).rewired.config(
        **stock_settings(stock_config(family, hidden_size=64)), placement=placement
    )
    torch.manual_seed(0)
    drawn_at_once = AutoModelForCausalLM.from_config(config)
    for model in (drawn_at_once, init_weights(moved(drawn_at_once, 3))):
        rows = init_report(model)
        names = [row.name.partition("[")[0] for row in rows]
        assert list(dict.fromkeys(names)) == [name for name, _ in model.named_parameters()]
        for row in rows:
            size = math.prod(row.shape)
            if row.role in WEIGHT_ROLES:
                layer = re.search(r"\.(\d+)\.", row.name)
                ruling = create(placement).at(int(layer[1]) + 1, 2) if layer else create(placement)
                rule = ruling.init_rule(row.role, config.num_hidden_layers)
                base = 0.02 * math.sqrt(768 / 64)
                expected = rule.gain * (base if rule.kind == "normal" else math.sqrt(2 / sum(row.shape)))
                if (axis := create(placement).weight_axes.get(row.role)) is not None:
                    expected = 1 / math.sqrt(row.shape[axis])
                assert row.expected_std == pytest.approx(expected)
                assert row.std == pytest.approx(expected, rel=4.5 / math.sqrt(2 * size)), row
                assert abs(row.mean) < 5 * expected / math.sqrt(size), row
            elif row.role == "norm":
                assert (row.std, row.mean) == (0.0, 1.0 - (family.startswith("gemma"))), row
            elif row.role == "bias":
                assert (row.std, row.mean) == (0.0, 0.0), row


def stock_settings(config):
    skipped = ("model_type", "architectures", "transformers_version", "dtype")
    return {key: value for key, value in config.to_dict().items() if key not in skipped}


def trains(family, placement, folder):
    """Every parameter gets a finite gradient, and a few steps lower the loss."""
    model, ids = make(family, placement).train(), prompts(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def trainer(family, placement, folder):
    """transformers' trainer takes two steps and saves a checkpoint that loads."""
    pytest.importorskip("accelerate")
    model = make(family, placement)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in prompts(4, 8)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    # Attention residuals begin with one source, whose weight is 1 whatever is learnt.
    stay = [name for name, _ in model.named_parameters() if placement == "attnres" and re.search(FIRST_QUERY, name)]
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == stay
    loaded = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2").eval()
    assert current_placement(loaded) == current_placement(model)
    assert torch.equal(loaded(prompts(1, 5)).logits, model.eval()(prompts(1, 5)).logits)


def knows_targets(peft, model, config):
    try:
        peft.get_peft_model(model, config)
    except ValueError as error:
        if "specify `target_modules`" in str(error):
            return False
        raise
    return True


def adapter(family, placement, folder):
    """LoRA and IA3 of peft, on the modules it chooses where it knows the family, train alone, are saved, come back."""
    peft = pytest.importorskip("peft")
    make(family, placement).save_pretrained(folder / "base")
    ids, notes = prompts(2, 7), []
    for name, kind, targets in (
        ("LoRA", peft.LoraConfig, "all-linear"),
        ("LoRA", peft.LoraConfig, None),
        ("IA3", peft.IA3Config, None),
    ):
        # peft fills in a configuration that it is given.
        fresh = functools.partial(kind, target_modules=targets, task_type="CAUSAL_LM")
        model = make(family, placement)
        if not knows_targets(peft, stock_model(family), fresh()):
            # A family that peft does not know is no better known to it when it is rewired.
            assert not knows_targets(peft, model, fresh())
            continue
        plain = model(ids).logits
        tuned = peft.get_peft_model(model, fresh())
        assert torch.equal(tuned(ids).logits, plain)
        tuned.train()(ids, labels=ids).loss.backward()
        trained = {key: value for key, value in tuned.named_parameters() if value.requires_grad}
        assert trained
        assert all(f"{name.lower()}_" in key for key in trained)
        torch.optim.SGD(trained.values(), lr=1.0).step()
        expected = tuned.eval()(ids).logits
        assert not torch.equal(expected, plain)
        saved = folder / f"{name}-{targets}"
        tuned.save_pretrained(saved)
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        loaded = peft.PeftModel.from_pretrained(base, saved).eval()
        assert torch.equal(loaded(ids).logits, expected)
        notes += [name] if targets is None else []
    return ", ".join(notes) + " by default" if notes else ""


def copies(family, placement, folder):
    """Pickled, copied or saved whole with torch, a model gives the same logits; the copy shares nothing with it."""
    model, ids = make(family, placement), prompts(2, 9)
    expected = model(ids).logits
    torch.save(model, folder / "model.pt")
    for copied in (
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        torch.load(folder / "model.pt", weights_only=False),
    ):
        assert type(copied) is type(model)
        assert current_placement(copied) == current_placement(model)
        same_state(model, copied)
        out = copied(ids, output_hidden_states=True)
        assert torch.equal(out.logits, expected)
        assert len(out.hidden_states) == 3
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert torch.equal(model(ids).logits, expected)


CHECKS = {
    "save, reload": save_and_reload,
    "generate": generate,
    "configuration": configuration,
    "rewire twice": rewire_twice,
    "attention kernels": attention_kernels,
    "recording": recorded,
    "bfloat16": bfloat16,
    "init": drawn_by_rule,
    "training": trains,
    "trainer": trainer,
    "adapter": adapter,
    "copies": copies,
}
# Quick in every combination; the others are quick in some and slow in the rest.
EVERYWHERE = ("save, reload", "generate", "configuration", "rewire twice", "copies")
