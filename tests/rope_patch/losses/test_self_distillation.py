"""Self-distillation between views against two plain passes and sums over tokens written one at a time."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from support.batches import batch, documents_of
from support.flash import as_flash, emulate
from support.tiny import MIXED, SLIDING_WINDOW, deaf, tiny, tokens
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from rope_patch import patch_model, rope_view
from rope_patch.attention import two_view
from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import locate_documents
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import REQUEST, SelfDistiller, ViewConsistency, ViewRequest
from rope_patch.views import LogUniform, Uniform

FAMILIES = ["llama", "qwen3", "mistral", "mistral-sliding"]
KINDS = ["plain", "right", "left", "packed"]


def divergence(p, q, direction):
    if direction == "reverse":
        return (p * (p / q).log()).sum()
    if direction == "forward":
        return (q * (q / p).log()).sum()
    m = (p + q) / 2
    return ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2


def by_hand(model, data, view, parameters, consistency):
    """Two plain passes of each document alone, and Eq. 6 token by token."""
    ce = view_ce = kl = 0.0
    n_labels = n_documents = suffixes = 0
    for number, (row, start, length) in enumerate(documents_of(data)):
        ids = data["input_ids"][row : row + 1, start : start + length]
        labels = data["labels"][row, start : start + length].tolist()
        draws = {name: value.flatten() for name, value in parameters.items()}
        drawn = {  # one value a document, or one a token in packed rows
            name: value[number if len(value) < data["input_ids"].numel() else row * data["input_ids"].shape[1] + start]
            for name, value in draws.items()
        }
        index = view.rope_index(torch.arange(length), drawn)
        with rope_view(model, "standard"):
            standard = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        with rope_view(model, index=index[None]):
            seen = model(ids, use_cache=False).logits[0].double().softmax(-1)
        s = next((t for t in range(length) if index[t] - index[0] != t), length)
        # token i is predicted from query i - 1; the first token has a label if the second one has
        labelled = [i for i in range(length) if labels[i] != -100]
        if 0 not in labelled and 1 in labelled:
            labelled = [0, *labelled]
        for i in labelled:
            if i > 0:
                ce = ce - standard[i - 1, labels[i]]
                view_ce = view_ce - seen[i - 1, labels[i]].log()
                n_labels += 1
        divisor = sum(i >= s for i in labelled)
        queries = [i - 1 for i in labelled if i - 1 >= s and i > 0]
        if consistency.rows == "query_in_suffix" and length - 1 in labelled and length - 1 >= s:
            queries.append(length - 1)
        q = standard.detach().exp()
        # how often token t lies behind a split drawn from 0..length-1, of which 0 moves none, or behind length minus
        # such a shift
        share = {t: t / length for t in queries}
        terms = {t: divergence(seen[t], q[t], consistency.direction) for t in queries}
        if consistency.reduction == "uniform":
            terms = {t: term / share[t] for t, term in terms.items()}
        total = sum(terms.values(), torch.zeros(()))
        n_documents += any(i > 0 for i in labelled)
        suffixes += len(labelled) if consistency.reduction == "uniform" else divisor
        kl = kl + (total / max(divisor, 1) if consistency.reduction == "sequence" else total)
    kl = kl / (n_documents if consistency.reduction == "sequence" else suffixes)
    return (ce + consistency.view_clm * view_ce) / n_labels + consistency.kl_weight * kl, kl


def run(model, data, consistency, step=3, one_pass=True):
    """The distiller's loss in one call of the model."""
    distiller = SelfDistiller(model, consistency, one_pass=one_pass)
    assert distiller.one_pass == one_pass
    distiller.view.clock.set(step, 0)
    labelled = Labelled.of(data)
    divisor = labelled.n_documents
    if consistency.reduction == "token":
        divisor = labelled.suffix_total(distiller.changes.next_first(labelled))
    elif consistency.reduction == "uniform":
        divisor = int(labelled.counted.sum())
    request = ViewRequest(labelled, labelled.n_labels, divisor)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with distiller.active():
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        if request.result.loss.requires_grad:
            request.result.loss.backward()
    return request, distiller.view.last


def compare(family, kind, options, consistency, checkpointing=False, one_pass=True):
    torch.manual_seed(3)
    data = batch(kind)
    model = patch_model(tiny(family, dtype=torch.float64), **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    request, bound = run(model, data, consistency, one_pass=one_pass)
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected, _ = by_hand(model, data, bound.view, bound.parameters, consistency)
    expected.backward()
    torch.testing.assert_close(request.result.loss.detach(), expected.detach(), rtol=1e-6, atol=1e-7)
    for name, p in model.named_parameters():
        # float32 norms inside a float64 model
        torch.testing.assert_close(actual[name], p.grad, rtol=1e-4, atol=1e-5 * p.grad.abs().max().item() + 1e-9)


def loss_and_gradients(model, data, one_pass):
    request, _ = run(model, data, ViewConsistency(), one_pass=one_pass)
    return request.result.loss.detach(), *(p.grad for p in model.parameters())


def require_alike(first, second, tolerance):
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max() + 1e-12


SKIP = {"method": "skip", "skip": Uniform(1, 40)}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*zip(FAMILIES, KINDS, strict=False), ("llama", "completion"), *zip(FAMILIES[1:], KINDS, strict=False)],
)
@pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "two passes"])
def test_loss_and_every_gradient_are_those_of_two_plain_passes(family, kind, one_pass):
    compare(family, kind, SKIP, ViewConsistency(kl_weight=0.7), one_pass=one_pass)


REORDERED = {
    "cyclic, skip": [{"view": "cyclic"}, {"view": "skip", "split": 4, "skip": 20}],
    "chunks, skip": [{"view": "chunk-permute", "blocks": 3}, {"view": "skip", "split": 3, "skip": 9}],
    "cyclic, cyclic": [{"view": "cyclic"}, {"view": "cyclic"}],
    "skip, chunks, dilation": [{"view": "skip"}, {"view": "chunk-permute"}, {"view": "dilation"}],
}


@pytest.mark.parametrize(("kind", "reduction"), [("left", "sequence"), ("packed", "token")])
@pytest.mark.parametrize("views", REORDERED)
def test_views_after_one_that_reorders_have_the_loss_of_a_loop(views, kind, reduction):
    """What the first view leaves in place the next may move, and the other way round."""
    compare("qwen3", kind, {"method": "compose", "views": REORDERED[views]}, ViewConsistency(reduction=reduction))


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("reduction", ["sequence", "token", "uniform"])
@pytest.mark.parametrize(
    ("rows", "kind", "options"),
    [("paper", "right", SKIP), ("query_in_suffix", "packed", {"method": "cyclic"})],
    ids=["paper", "query_in_suffix"],
)
def test_every_direction_reduction_and_choice_of_rows(direction, reduction, rows, kind, options):
    consistency = ViewConsistency(kl_weight=2.0, direction=direction, reduction=reduction, rows=rows)
    compare("llama", kind, options, consistency)


@pytest.mark.parametrize(("kind", "weight"), [("left", 0.0), ("packed", 0.5), ("completion", 0.5)])
def test_next_token_loss_under_the_view_too(kind, weight):
    compare("llama", kind, SKIP, ViewConsistency(kl_weight=weight, view_clm=0.7))


@pytest.mark.parametrize(("attention", "kind"), [("sdpa", "packed"), ("eager", "plain")])
def test_one_pass_runs_under_autocast_as_two_passes_do(attention, kind):
    """Float32 weights and bf16 multiplications are the trainers' default."""
    data, results = batch(kind), []
    for one_pass in (True, False):
        model = patch_model(tiny("qwen3", attention), **SKIP).train()
        with torch.autocast("cpu", torch.bfloat16):
            results.append(loss_and_gradients(model, data, one_pass))
    for first, second in zip(*results, strict=True):
        assert (first - second).norm() <= 0.1 * second.norm()


VIEWS = {
    "skip": {"skip": Uniform(1, 40)},
    "cyclic": {},
    "dilation": {},
    "chunk-permute": {"blocks": 3},
    "nope": {},
    "compose": {"views": [{"view": "skip"}, {"view": "posaug", "alpha": Uniform(0.5, 2)}]},
    "posaug": {"alpha": LogUniform(0.125, 8), "granularity": "sample"},
    "pose": {"target": 300, "chunks": 4},
    "cream": {"target": 300},
    "mix": {"views": ["standard", {"view": "skip", "skip": Uniform(1, 40)}, "cyclic"]},
}


EXACT = {"stock": 1e-6, "float64": 1e-10, "float32 softmax": 2e-6}  # of the largest number of each gradient


def in_float64(model, monkeypatch):
    """The model with norms and RoPE in float64, which are float32 in Transformers whatever a model's dtype."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # how rotary modules turn to float32
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(root_mean_square_norm, module)


def root_mean_square_norm(module, x):
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


@pytest.mark.parametrize("kind", ["left", "packed"])
@pytest.mark.parametrize("view", VIEWS)
def test_one_pass_is_two_passes_under_every_view(view, kind, monkeypatch):
    torch.manual_seed(5)
    data = batch(kind)
    results = []
    for one_pass in (True, False):
        model = patch_model(tiny("qwen3", dtype=torch.float64), view, **VIEWS[view]).train()
        in_float64(model, monkeypatch)
        results.append(loss_and_gradients(model, data, one_pass))
    require_alike(*results, EXACT["float64"])


WINDOWED = ["llama", "mistral-sliding", "qwen3-mixed"]
IMPLEMENTATIONS = [
    *(("sdpa", "float64", family, kind) for family in WINDOWED for kind in KINDS),
    *(("flash", "float64", family, kind) for family in WINDOWED for kind in ("left", "packed")),
    *(("eager", "float32 softmax", family, kind) for family, kind in zip(WINDOWED, KINDS[1:], strict=True)),
    ("sdpa", "stock", "qwen3-mixed", "packed"),
    ("flash", "stock", "qwen3-mixed", "right"),
]


@pytest.mark.parametrize(("attention", "rest", "family", "kind"), IMPLEMENTATIONS)
def test_one_pass_is_two_passes_by_every_attention(attention, rest, family, kind, monkeypatch):
    calls = emulate(monkeypatch)
    data, results = batch(kind), []
    for one_pass in (True, False):
        # two passes by SDPA, whose masks are Transformers' own
        model = patch_model(windowed(family, "eager" if one_pass and attention == "eager" else "sdpa"), **SKIP).train()
        if rest == "float64":
            in_float64(model, monkeypatch)
        if one_pass and attention == "flash":
            as_flash(model)
        results.append(loss_and_gradients(model, data, one_pass))
    assert bool(calls) == (attention == "flash")
    require_alike(*results, EXACT[rest])


def windowed(family, attention, dtype=torch.float64):
    """A model of full layers, of sliding ones, or of both, whose windows are shorter than the rows."""
    if family != "qwen3-mixed":
        return tiny(family, attention, dtype=dtype)
    return tiny("qwen3", attention, dtype, **MIXED)


@pytest.mark.usefixtures("flex_runs_eagerly")
@pytest.mark.parametrize(("family", "kind"), [*zip(WINDOWED, ["plain", "left", "packed"], strict=True)])
def test_flex_attention_gives_the_losses_of_sdpa(family, kind):
    """Its gradient needs a GPU: tests/gpu."""
    data, losses = batch(kind), []
    for attention in ("flex_attention", "sdpa"):
        shape = {"head_dim": 16, "hidden_size": 64}
        mixed = MIXED if family == "qwen3-mixed" else {}
        model = tiny(family.removesuffix("-mixed"), attention, torch.float32, **shape, **mixed)
        with torch.no_grad():
            request, _ = run(patch_model(model, **SKIP), data, ViewConsistency())
        losses.append((request.result.rows.ce.sum(), request.result.rows.kl.sum()))
    assert losses[1][1] > 1e-3
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_capped_scores_need_an_attention_that_caps_them():
    shape = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    results = []
    for one_pass in (True, False):
        torch.manual_seed(0)
        config = Gemma2Config(**shape, sliding_window=SLIDING_WINDOW, attn_logit_softcapping=0.5)
        model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").double().train()
        results.append(loss_and_gradients(patch_model(model, **SKIP), batch("plain"), one_pass))
    require_alike(*results, EXACT["float32 softmax"])
    model = patch_model(tiny(), **SKIP)
    model.config.attn_logit_softcapping = 0.5
    assert not SelfDistiller(model, ViewConsistency()).one_pass


def test_strides_tell_lengths_alone(monkeypatch):
    """cuDNN plans its attention for each length and stride; the longest copies of a batch must not change either."""
    calls = defaultdict(list)

    def watched(kernel):
        def call(*tensors, **options):
            tensors_alone = [x for x in tensors if isinstance(x, torch.Tensor)]
            calls[kernel.__name__, *(x.shape for x in tensors_alone)].append(tuple(x.stride() for x in tensors_alone))
            return kernel(*tensors, **options)

        return call

    for place, name in ((two_view, "prefix_attention"), (F, "scaled_dot_product_attention")):
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    model, data = patch_model(tiny("qwen3"), **SKIP).train(), batch("plain")
    for step in range(8):
        run(model, data, ViewConsistency(), step=step)
    again = {lengths: set(strides) for lengths, strides in calls.items() if len(strides) > len(model.model.layers)}
    assert len(again) > 2, "lengths that come in several batches"
    assert all(len(strides) == 1 for strides in again.values()), again


@pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "two passes"])
def test_checkpointing_changes_nothing(one_pass):
    compare("llama", "packed", SKIP, ViewConsistency(), checkpointing=True, one_pass=one_pass)


@pytest.mark.parametrize(
    ("method", "options", "first"),
    [
        ("skip", {"split": 5, "skip": 9}, 5),
        ("cyclic", {"shift": 6}, 13),
        ("dilation", {"factor": 2.0}, 1),
        ("nope", {}, 1),
        ("chunk-permute", {"blocks": 4}, 5),
        ("compose", {"views": [{"view": "cyclic", "shift": 6}, {"view": "skip", "split": 5, "skip": 9}]}, 13),
        ("standard", {}, 19),
    ],
)
def test_rows_before_the_first_affected_one_predict_the_same(method, options, first):
    model, ids = tiny(dtype=torch.float64), tokens(1, 19)
    patch_model(model, method, when="always", **options)
    view = model.model._rope_patch.source.view
    documents = locate_documents(1, 19, ids.device, None, None)
    parameters = view.draw(documents.length, DrawKey(0, torch.tensor(0), documents.ordinal))
    assert view.affected_from(torch.arange(19)[None], documents, parameters).item() == first
    with torch.no_grad():
        seen = model(ids).logits
        with rope_view(model, "standard"):
            standard = model(ids).logits
    # RoPE itself is float32: equal distances at other indices round differently
    torch.testing.assert_close(seen[:, :first], standard[:, :first], atol=1e-5, rtol=0)
    if first < 19:
        assert (seen[:, -1] - standard[:, -1]).abs().max() > 1e-3


def test_evaluation_samples_the_view_too_and_takes_it_off_again():
    model = patch_model(tiny(), **SKIP).eval()
    with torch.no_grad():
        request, _ = run(model, batch("plain"), ViewConsistency(), step=-1)
        again, _ = run(model, batch("plain"), ViewConsistency(), step=-1)
    assert request.result.rows.kl.sum() > 0 and not model.model._rope_patch.overrides
    assert request.result.rows.kl.shape == again.result.rows.kl.shape


def test_a_view_that_cannot_say_how_often_has_no_uniform_reduction():
    model = patch_model(tiny(), "pose", target=300)
    with pytest.raises(ValueError, match="view 'pose' does not know how often a token lies behind"):
        SelfDistiller(model, ViewConsistency(reduction="uniform"))
    SelfDistiller(patch_model(tiny(), "dilation"), ViewConsistency(reduction="uniform"))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
OTHER_FAMILIES = {
    "gpt_neox": {"rotary_pct": 1.0, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "phi3": {
        "max_position_embeddings": 256, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_one_pass_is_two_passes_in_families_that_differ(family):
    """One calls its decoder with positional arguments; the other picks frequencies by the longest true position."""
    shape = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model(family, **shape, num_attention_heads=4, **OTHER_FAMILIES[family])
    results = []
    for one_pass in (True, False):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double()
        results.append(
            loss_and_gradients(patch_model(model, "skip", split=9, skip=100).train(), batch("plain"), one_pass)
        )
    assert results[0][0] > 0
    require_alike(*results, EXACT["float32 softmax"])


def test_models_that_lose_keyword_arguments_are_refused():
    model = patch_model(deaf("falcon"), **SKIP).train()
    with pytest.raises(ValueError, match="FalconForCausalLM does not pass keyword arguments on to its decoder"):
        run(model, batch("plain"), ViewConsistency(), one_pass=False)
    model = patch_model(tiny(), **SKIP).train()
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: attend(
            *args, **{name: x for name, x in kwargs.items() if name != REQUEST}
        )
    with pytest.raises(ValueError, match="does not call its attention through Transformers' table"):
        run(model, batch("plain"), ViewConsistency())
    run(model, batch("plain"), ViewConsistency(), one_pass=False)
