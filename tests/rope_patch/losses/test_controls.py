"""Controls of self-distillation against plain passes with the same noise, written by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.batches import batch, documents_of
from support.tiny import tiny
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface

from rope_patch.layout.labelled import Labelled
from rope_patch.losses import REQUEST, Control, SelfDistiller, ViewConsistency, ViewRequest
from rope_patch.losses.controls import SMALL_TILES, HashedNoise, _cosine, _noisy_flex_attention, _tiles

STRENGTH = 0.3


def run(model, data, kind, consistency=None, strength=STRENGTH):
    distiller = SelfDistiller(model, consistency or ViewConsistency(), control=Control(kind=kind, strength=strength))
    labelled = Labelled.of(data)
    request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    torch.manual_seed(7)
    with distiller.active():
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        if request.result.loss.requires_grad:
            request.result.loss.backward()
    return request


def noisy(noise):
    """Dense attention with noise(query) on its scores, of one unpadded batch."""

    def attention(module, query, key, value, mask, scaling=None, sliding_window=None, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling + STRENGTH * noise(query)
        every = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device)
        hidden = every.triu(1) if sliding_window is None else every.triu(1) | every.tril(-sliding_window)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None

    return attention


def drawn(query):
    return torch.randn(*query.shape[:3], query.shape[2], dtype=query.dtype)


def hashed(query):
    """The noise that flex attention forms, for all scores."""
    sizes = (*query.shape[:3], query.shape[2])
    words = torch.randint(-(2**31), 2**31, sizes[:2], dtype=torch.int32, device=query.device)
    row, head, one, other = (torch.arange(size, device=query.device) for size in sizes)
    places = row[:, None, None, None], head[:, None, None], one[:, None], other
    noise = HashedNoise(words, torch.tensor(1.0, device=query.device))[places]
    assert noise.shape == sizes
    return noise


AttentionInterface.register("noisy_by_hand", noisy(drawn))
AttentionInterface.register("hashed_by_hand", noisy(hashed))


def by_hand(model, data, kind, attention="noisy_by_hand"):
    """Cross-entropy of the first pass and the mean over all rows of KL(second || first)."""
    inputs = {"input_ids": data["input_ids"], "use_cache": False}
    handles = []
    if kind == "dropout":

        def drop(module, args, output):
            return (
                (F.dropout(output[0], STRENGTH), *output[1:])
                if isinstance(output, tuple)
                else F.dropout(output, STRENGTH)
            )

        for layer in model.model.layers:
            handles += [layer.self_attn.register_forward_hook(drop), layer.mlp.register_forward_hook(drop)]
    torch.manual_seed(7)
    first = model(**inputs).logits.log_softmax(-1)
    if kind == "attention_noise":
        model.set_attn_implementation(attention)
    second = model(**inputs).logits.log_softmax(-1)
    for handle in handles:
        handle.remove()
    ids = data["input_ids"]
    ce = -first[:, :-1].gather(2, ids[:, 1:, None]).mean()
    kl = (second[:, :-1].exp() * (second[:, :-1] - first[:, :-1].detach())).sum(-1)
    return ce + (kl.sum(1) / ids.shape[1]).mean()


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("mistral-sliding", False)])
@pytest.mark.parametrize("kind", ["dropout", "attention_noise"])
def test_loss_and_every_gradient_are_those_of_two_noisy_passes(kind, family, checkpointing):
    data = batch("plain")
    model = tiny(family, dtype=torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    request = run(model, data, kind)
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_disable()
    expected = by_hand(model, data, kind)
    expected.backward()
    torch.testing.assert_close(request.result.loss, expected, rtol=1e-6, atol=0)
    for name, p in model.named_parameters():
        # float32 norms inside a float64 model
        torch.testing.assert_close(actual[name], p.grad, rtol=1e-4, atol=1e-5 * p.grad.abs().max().item())


@pytest.mark.parametrize("data", ["left", "right", "packed"])
@pytest.mark.parametrize("kind", ["dropout", "attention_noise"])
def test_documents_stay_apart_and_all_their_rows_count(kind, data):
    data = batch(data)
    request = run(tiny("mistral-sliding", dtype=torch.float64).train(), data, kind)
    lengths = [n for _, _, n in documents_of(data)]
    assert request.result.in_kl.sum() == sum(lengths) - len(lengths) and request.result.loss.isfinite()
    factor = request.result.kl_factor
    assert {round(1 / x) for x in factor[factor > 0].tolist()} == set(lengths)


@pytest.mark.usefixtures("flex_runs_eagerly")
@torch.no_grad()
def test_flex_attention_forms_its_noise_tile_by_tile():
    # without gradients, which flex attention has on a GPU alone
    data, model = batch("plain"), tiny("qwen3", "flex_attention").train()
    request = run(model, data, "attention_noise")
    torch.testing.assert_close(request.result.loss, by_hand(model, data, "attention_noise", "hashed_by_hand"))
    assert request.result.rows.kl.sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_attention_has_the_gradients_of_its_noise(checkpointing):
    data = {name: x.cuda() for name, x in batch("plain").items()}
    model = tiny("qwen3", "flex_attention", head_dim=16, hidden_size=64).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    request = run(model, data, "attention_noise")
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_disable()
    expected = by_hand(model, data, "attention_noise", "hashed_by_hand")
    expected.backward()
    torch.testing.assert_close(request.result.loss, expected, rtol=1e-3, atol=0)
    for name, p in model.named_parameters():
        error = (actual[name] - p.grad).norm() / p.grad.norm()
        assert error < 5e-3, f"gradient of {name} is off by {error:.1e}"


def test_strengths_of_noise_share_one_compiled_flex_attention():
    """A float would be made a symbol at the second strength, which the backward of flex attention refuses."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled, query = torch.compile(flex_attention, backend=counter), torch.randn(1, 2, 128, 16)
    for strength in (0.5, 1.0, 2.0):
        call = SimpleNamespace(
            query=query, key=query, value=query, mask=None, with_inputs=lambda *_, position_bias: position_bias
        )
        noise = _noisy_flex_attention(call, strength)

        def moved(score, *place, noise=noise):
            return score + noise[place]

        result = compiled(query, query, query, score_mod=moved)
        torch.testing.assert_close(result, flex_attention(query, query, query, score_mod=moved))
    assert counter.frame_count == 1


def test_small_tiles_are_for_hopper_and_numbers_of_16_bits(monkeypatch):
    for version, dtype, tiles in (
        ((9, 0), torch.bfloat16, SMALL_TILES),
        ((9, 0), torch.float32, {}),
        ((8, 6), torch.bfloat16, {}),
        ((12, 0), torch.bfloat16, {}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, version=version: version)
        query = SimpleNamespace(is_cuda=True, device="cuda:0", element_size=dtype.itemsize.__int__)
        assert _tiles(query) == tiles
    assert _tiles(torch.zeros(1, dtype=torch.bfloat16)) == {}


@pytest.mark.gpu
def test_gradients_of_two_strengths_in_one_process():
    data = {name: x.cuda() for name, x in batch("plain").items()}
    model = tiny("qwen3", "flex_attention", head_dim=16, hidden_size=64).cuda().train()
    norms = []
    for strength in (0.5, 1.0, 2.0):
        model.zero_grad()
        run(model, data, "attention_noise", strength=strength)
        norms.append(sum(float(p.grad.norm()) for p in model.parameters()))
    assert all(map(math.isfinite, norms)) and len(set(norms)) == 3


@pytest.mark.gpu
def test_noise_of_long_rows_takes_no_mask():
    length = 16384
    ids = torch.randint(3, 90, (1, length), device="cuda")
    model = tiny("qwen3", "flex_attention", head_dim=16, hidden_size=64, max_position_embeddings=length)
    model.cuda().train().gradient_checkpointing_enable({"use_reentrant": False})
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    request = run(model, {"input_ids": ids, "labels": ids}, "attention_noise")
    assert request.result.rows.kl.mean() > 0 and request.result.loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    # what one head of one layer would take in float32
    assert torch.cuda.max_memory_allocated() - before < 4 * length**2


@pytest.mark.usefixtures("flex_runs_eagerly")
@torch.no_grad()
def test_flex_attention_under_noise_keeps_documents_apart():
    """What stands in one document changes no other, though all noise comes from one draw."""
    model, data = tiny("mistral-sliding", "flex_attention").train(), batch("packed")
    first = run(model, data, "attention_noise")
    data["input_ids"][:, 7:19] = data["input_ids"][:, 7:19].flip(1)
    again = run(model, data, "attention_noise")
    row = torch.arange(len(first.result.rows.kl))
    others = (row < 6) | (row >= 19)
    assert first.result.rows.kl[:5].sum() > 0
    torch.testing.assert_close(first.result.rows.kl[others], again.result.rows.kl[others])
    assert not torch.allclose(first.result.rows.kl[~others], again.result.rows.kl[~others])


def test_hashed_noise_is_its_formula_in_exact_arithmetic():
    def by_hand(word, query, key):
        word = (word ^ (query * 65537 + key)) % 2**32
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            word = (word ^ (word >> shift)) * factor % 2**32
        radius = math.sqrt(-2 * math.log((word % 65536 + 0.5) / 65536))
        return 0.5 * radius * math.cos(2 * math.pi * (word // 65536) / 65536)

    words = torch.tensor([[5, -(2**31)], [2**31 - 1, -7]], dtype=torch.int32)
    noise = HashedNoise(words, torch.tensor(0.5))
    for row, head, query, key in ((0, 0, 0, 0), (0, 1, 3, 1), (1, 0, 40_000, 39_999), (1, 1, 131_071, 7)):
        result = noise[tuple(torch.tensor(i) for i in (row, head, query, key))].item()
        assert result == pytest.approx(by_hand(words[row, head].item(), query, key), abs=1e-6)


def test_its_cosine_is_exact_to_float32():
    turns = torch.arange(65536) / 65536
    assert (_cosine(turns).double() - torch.cos(2 * math.pi * turns.double())).abs().max() < 2e-7


def test_hashed_noise_is_normal_and_nothing_repeats():
    words = torch.tensor([[1, 2], [3, -(2**31)]], dtype=torch.int32)
    at = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(300)[:, None]
    noise = HashedNoise(words, torch.tensor(2.0))[(*at, torch.arange(300))].double() / 2
    assert noise.mean().abs() < 0.01 and noise.var() == pytest.approx(1, abs=0.01)
    assert (noise**4).mean() == pytest.approx(3, abs=0.05) and (noise > 1.96).double().mean() == pytest.approx(
        0.025, abs=0.001
    )
    for other in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(1, 2), noise.roll(1, 3), noise.mT, noise.flip(3)):
        assert (noise * other).mean().abs() < 0.01


@pytest.mark.parametrize("kind", ["dropout", "attention_noise"])
@torch.no_grad()
def test_evaluation_has_the_plain_loss_and_the_same_noise_each_time(kind):
    data, model = batch("plain"), tiny(dtype=torch.float64).eval()
    first, again = (run(model, data, kind) for _ in range(2))
    plain = model(**data).loss
    assert first.result.rows.ce.mean() == pytest.approx(plain.item(), rel=1e-5)
    assert first.result.rows.kl.sum() > 0 and torch.equal(first.result.rows.kl, again.result.rows.kl)
