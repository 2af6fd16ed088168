"""Placements against implementations of others, in float64: one layer and four, forward and gradients.

The sub-layers are the same small maps on both sides, so that what is compared is where norms, sums and scales stand.
What nobody publishes as a package is in test_outside_formulas.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn

from geonorm.models import rewire
from geonorm.placements import Wiring
from outside_walks import DIM, LAYERS, SAME, Map, assert_same, every_parameter, made, shaken, walked
from tolerances import worst


@pytest.fixture
def in_float64(monkeypatch):
    """transformers computes gates and norms in float32 by name; here the name means what it is given."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)


@pytest.fixture
def in_default_float64():
    """For modules that cannot be brought to float64 once they are made."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def of_transformers(model, name):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def test_lns_is_that_of_olmo_core():
    # Not among what the tests install: it brings the clients of two clouds along.
    block = pytest.importorskip("olmo_core.nn.transformer.block").LayerNormScaledTransformerBlock
    wiring, maps, h = made("lns")
    parameters, x, first = every_parameter(wiring, maps, h), h, None
    for layer in range(LAYERS):
        # Without its construction, which wants the whole of OLMo-core's configuration.
        theirs = block.__new__(block)
        nn.Module.__init__(theirs)
        attention, mlp = wiring.connections[2 * layer], wiring.connections[2 * layer + 1]
        theirs.attention_norm, theirs.feed_forward_norm = attention.norms["input"], mlp.norms["input"]
        theirs.attention, theirs.feed_forward = maps[2 * layer], maps[2 * layer + 1]
        theirs.attention_residual_stream = theirs.feed_forward_residual_stream = lambda x, update: x + update
        # As a number: their buffer is a float32 one, which is 3e-8 off.
        theirs.ln_scale = torch.tensor(1 / math.sqrt(layer + 1), dtype=torch.float64)
        x = theirs(x)
        first = x if first is None else first
    assert worst(walked(wiring, maps, h, 1), first) <= SAME
    assert_same(walked(wiring, maps, h), wiring.final_norm(x), parameters)


def test_scaled_sandwich_is_that_of_beam():
    kind = of_transformers("beam", "BeamDecoderLayer")
    wiring, maps, h = made("scaled_sandwich", normalize_entry=False)
    parameters, x, first = every_parameter(wiring, maps, h), h, None
    for layer in range(LAYERS):
        theirs = kind.__new__(kind)
        nn.Module.__init__(theirs)
        theirs.attn_residual_add_idx, theirs.mlp_residual_add_idx = 2 * (layer + 1), 2 * (layer + 1) + 1
        attention, mlp = wiring.connections[2 * layer], wiring.connections[2 * layer + 1]
        theirs.input_layernorm, theirs.post_attention_layernorm = attention.norms["input"], attention.norms["output"]
        theirs.pre_feedforward_layernorm, theirs.post_feedforward_layernorm = mlp.norms["input"], mlp.norms["output"]
        sublayer = maps[2 * layer]
        theirs.self_attn = lambda hidden_states, sublayer=sublayer, **kwargs: (sublayer(hidden_states), None)
        theirs.mlp = maps[2 * layer + 1]
        x = kind.forward(theirs, x, None)
        first = x if first is None else first
    assert worst(walked(wiring, maps, h, 1), first) <= SAME
    assert_same(walked(wiring, maps, h), wiring.final_norm(x), parameters)


def test_keel_after_its_first_layer_is_that_of_x_transformers():
    x_transformers = pytest.importorskip("x_transformers")
    wiring, maps, h = made("keel")
    parameters = every_parameter(wiring, maps, h)
    theirs = x_transformers.Decoder(
        dim=DIM,
        depth=1,
        heads=1,
        custom_layers=("f",) * (2 * LAYERS - 2),
        pre_and_post_norm=True,
        scale_residual_constant=2.0 * LAYERS,
        pre_norm_has_final_norm=False,
        rotary_pos_emb=False,
    )
    for (norms, _, _), connection in zip(theirs.layers, wiring.connections[2:], strict=True):
        norms[0], norms[2] = connection.norms["input"], connection.norms["stream"]
    for layer, sublayer in zip(theirs.layers, maps[2:], strict=True):
        layer[1] = sublayer
    x = walked(wiring, maps, h, 1)
    assert_same(walked(wiring, maps, h), theirs(x), parameters)
    # The first layer by the formula: no outer norm at the attention, and the stream as it is.
    n1, (n2, n3) = wiring.connections[0].norms["input"], wiring.connections[1].norms.values()
    z = h + maps[0](n1(h))
    assert worst(x, n3(z + maps[1](n2(z)))) <= SAME


def assert_hyper(name, connection_kind, head_kind, comb, **options):
    wiring, maps, h = made(name, **options)
    parameters, streams = every_parameter(wiring, maps, h), 4
    x, first = h.unsqueeze(-2).repeat(1, 1, streams, 1), None
    for connection, sublayer in zip(wiring.connections, maps, strict=True):
        own = connection.connection
        theirs = connection_kind.__new__(connection_kind)
        nn.Module.__init__(theirs)
        theirs.hc_mult, theirs.hc_sinkhorn_iters, theirs.hc_eps, theirs.hc_post_magnitude = streams, 20, 1e-6, 2.0
        theirs.input_norm = unweighted_norm(connection_kind)
        gates = [own.pre, own.post, *([own.comb] if comb else [])]
        # Theirs has no constant beside the learnt one.
        constants = [0.0, 0.0, 8.0 * torch.eye(streams, dtype=torch.float64).flatten()]
        put(theirs, "fn", torch.cat([gate.weight for gate in gates]))
        put(theirs, "base", torch.cat([gate.bias + c for gate, c in zip(gates, constants, strict=False)]))
        put(theirs, "scale", torch.cat([gate.scale for gate in gates]))
        if comb:
            post, mixing, read = theirs(x)
            # In @ comb + out, as its decoder layer has it.
            kept = mixing.transpose(-1, -2) @ x
        else:
            (post, read), kept = theirs(x), x
        x = post.unsqueeze(-1) * sublayer(connection.norms["input"](read)).unsqueeze(-2) + kept
        first = x if first is None else first
    assert worst(wiring.connections[0](wiring.enter(h), maps[0]), first) <= SAME
    head = head_kind.__new__(head_kind)
    nn.Module.__init__(head)
    head.input_norm, head.eps = unweighted_norm(connection_kind), 1e-6
    gate = wiring.exit_module.pre
    put(head, "hc_fn", gate.weight), put(head, "hc_base", gate.bias), put(head, "hc_scale", gate.scale)
    assert_same(walked(wiring, maps, h), wiring.final_norm(head(x)), parameters)


def put(module, name, tensor):
    """Set what the other side holds as a parameter to a function of ours, so that gradients reach ours."""
    object.__setattr__(module, name, tensor)


def unweighted_norm(kind):
    name = kind.__name__.removesuffix("HyperConnection") + "UnweightedRMSNorm"
    return getattr(importlib.import_module(kind.__module__), name)(eps=1e-6)


def test_hyper_is_that_of_hy_v4(in_float64):
    kinds = (of_transformers("hy_v4", f"HYV4Hyper{part}") for part in ("Connection", "Head"))
    assert_hyper("hyper", *kinds, comb=False)


def test_mhc_is_that_of_deepseek_v4(in_float64):
    kinds = (of_transformers("deepseek_v4", f"DeepseekV4Hyper{part}") for part in ("Connection", "Head"))
    assert_hyper("mhc", *kinds, comb=True)


@pytest.mark.parametrize("block_size", [1, 3])
def test_attention_residuals_are_those_of_the_package(in_float64, block_size):
    operator_kind = pytest.importorskip("attn_res").AttnResOperator
    wiring, maps, h = made("attnres", block_size=block_size)
    parameters, finished, partial, first = every_parameter(wiring, maps, h), [h], None, None

    def read(query):
        operator = operator_kind(DIM)
        del operator.pseudo_query
        put(operator, "pseudo_query", query.weight)
        return operator(torch.stack([*finished, *([] if partial is None else [partial])]))

    for number, (connection, sublayer) in enumerate(zip(wiring.connections, maps, strict=True)):
        output = sublayer(connection.norms["input"](read(connection.connection.query)))
        if number % block_size == 0 and partial is not None:
            finished, partial = [*finished, partial], None
        partial = output if partial is None else partial + output
        first = torch.stack([*finished, partial], -2) if number == 1 else first
    assert worst(walked(wiring, maps, h, 1), first) <= SAME
    assert_same(walked(wiring, maps, h), wiring.final_norm(read(wiring.exit_module.query)), parameters)


def test_attention_residuals_start_as_pre_norm():
    torch.manual_seed(0)
    maps, h = [Map().double() for _ in range(2 * LAYERS)], torch.randn(2, 5, DIM, dtype=torch.float64)
    one, two = (walked(Wiring(name, DIM, LAYERS).double(), maps, h) for name in ("attnres", "pre"))
    # The mean of n sources instead of their sum: the norm's epsilon weighs n squared times as much.
    assert worst(one, two) <= 1e-6 * (2 * LAYERS + 1) ** 2


def test_ngpt_is_the_whole_of_ngpt_pytorch(monkeypatch, in_default_float64):
    ngpt_file = pytest.importorskip("nGPT_pytorch.nGPT")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads, vocabulary, inner = 2, 40, int(DIM * 4 * 2 / 3)
    config = LlamaConfig(
        hidden_size=DIM,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    ours = rewire(LlamaForCausalLM(config).double(), "ngpt", init=True)
    # Both rotate in float32 and pair channels differently: without rotation they can be compared to the last digits.
    unrotated = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    monkeypatch.setattr(ours.model.rotary_emb, "forward", lambda x, position_ids: unrotated)
    theirs = ngpt_file.nGPT(
        num_tokens=vocabulary,
        dim=DIM,
        depth=LAYERS,
        dim_head=DIM // heads,
        heads=heads,
        alpha_init=0.05,
        manual_norm_weights=True,
        add_value_residual=False,
        attn_flash_kwargs={"enable_flash": False, "enable_math": True, "enable_mem_efficient": False},
    )
    pairs = []
    for block, (attention, feedforward) in zip(ours.model.layers, theirs.layers, strict=True):
        attn, mlp = block.self_attn, block.mlp
        pairs += [
            (attn.q_proj.weight, attention.fn.to_q.linear.weight),
            (attn.k_proj.weight, attention.fn.to_k.linear.weight),
            (attn.v_proj.weight, attention.fn.to_v.linear.weight),
            (attn.o_proj.weight, attention.fn.to_out.linear.weight),
            (mlp.up_proj.weight, feedforward.fn.to_hidden.linear.weight),
            (mlp.gate_proj.weight, feedforward.fn.to_gate.linear.weight),
            (mlp.down_proj.weight, feedforward.fn.to_out.linear.weight),
            (mlp.up_proj.inside.scale, feedforward.fn.hidden_scale.scale),
            (mlp.gate_proj.inside.scale, feedforward.fn.gate_scale.scale),
            (block.attention_connection.rate, attention.branch_scale.scale),
            (block.mlp_connection.rate, feedforward.branch_scale.scale),
        ]
    pairs += [
        (ours.model.embed_tokens.weight, theirs.token_embed.linear.weight),
        (ours.lm_head.weight, theirs.to_logits.linear.weight),
        (ours.lm_head.inside.scale, theirs.logit_scale.scale),
    ]
    with torch.no_grad():
        for mine, other in pairs:
            assert mine.shape == other.shape
            # Rates and scales away from their starts.
            mine.mul_(1 + 0.2 * torch.rand_like(mine)) if mine.dim() == 1 else None
            other.copy_(mine)
        # The square of our scale is the scale of theirs, which is on the query alone and stored at 1/d.
        for block, (attention, _) in zip(ours.model.layers, theirs.layers, strict=True):
            heads_scale = block.self_attn.heads.scale
            heads_scale.mul_(1 + 0.2 * torch.rand_like(heads_scale))
            scale = attention.fn.qk_scale
            scale.scale.copy_((heads_scale * math.sqrt(DIM)).square() / scale.forward_scale)
    monkeypatch.setattr(theirs.rotary_embed, "rotate_queries_or_keys", lambda rows: rows)
    ids = torch.randint(0, vocabulary, (2, 7))
    assert worst(ours(ids).logits, theirs(ids)) <= SAME
    # transformers' own loss is float32.
    loss = nn.functional.cross_entropy(ours(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    other_loss = theirs(ids, return_loss=True)
    assert worst(loss, other_loss) <= SAME
    mine = torch.autograd.grad(loss, [one for one, _ in pairs])
    for (weight, _), one, two in zip(pairs, mine, torch.autograd.grad(other_loss, [t for _, t in pairs]), strict=True):
        if weight is ours.model.embed_tokens.weight:
            # Ours brings the entry to length 1, where its rows are already: no gradient along them.
            two = two - (two * weight).sum(-1, keepdim=True) * weight
        assert worst(one, two) <= SAME


def test_hybrid_norms_heads_as_qwen3_does_with_queries_and_keys():
    """Qwen3's attention has these norms on query and key; value has ours on both sides."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    torch.manual_seed(0)
    same = {"hidden_size": DIM, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    ours = rewire(LlamaForCausalLM(LlamaConfig(**same, vocab_size=20, intermediate_size=24)), "hybrid", init=True)
    shaken(ours)
    attention = ours.model.layers[0].self_attn
    theirs = Qwen3Attention(Qwen3Config(**same, head_dim=8, attn_implementation="sdpa"), 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(theirs, name).weight = getattr(attention, name).weight
    theirs.v_proj = attention.v_proj
    theirs.q_norm.weight, theirs.k_norm.weight = (
        attention.q_proj.inside.norm.weight,
        attention.k_proj.inside.norm.weight,
    )
    h, position = torch.randn(2, 5, DIM), torch.arange(5)[None]
    rotary = ours.model.rotary_emb(h, position)
    one, two = (module(h, position_embeddings=rotary, attention_mask=None)[0] for module in (attention, theirs))
    # In float32, as Qwen3's norm computes.
    torch.testing.assert_close(one, two)
