"""Random continuations: by the probabilities of the model, the same for a seed, in rows and by `generate` alike."""

import random

import pytest
import torch
from support.tiny import MIXED, VOCAB, gemma3, tiny

import rope_patch.generation.decoding as decoding
import rope_patch.generation.sampling as sampling
from rope_patch import patch_model
from rope_patch.generation.decoding import Sampling
from rope_patch.generation.generation import bytes_per_token, greedy_tokens
from rope_patch.generation.sampling import sampled_tokens

SMALL = 11  # tokens of a vocabulary of which all pairs are counted
MODELS = {
    "llama": tiny,
    "llama-eager": lambda: tiny(attention="eager"),
    "qwen3-mixed": lambda: tiny("qwen3", **MIXED),
    "mistral-sliding": lambda: tiny("mistral-sliding"),
    "gemma3": gemma3,
    "patched with yarn": lambda: patch_model(tiny(), "yarn", factor=4.0),
}
WITHOUT_ENDS = {"ends": (), "pad_token": 0}


def written(model, prompts, n=12, **options):
    return sampled_tokens(
        model, prompts, **{"max_new_tokens": n, "temperature": 1.0, "seed": 0, **WITHOUT_ENDS, **options}
    )


def prompts_of(seed, lengths=(9, 30, 1, 17, 30, 2)):
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


@torch.no_grad()
def pair_probabilities(model, prompt, temperature):
    """Of each first and second token behind `prompt`, [SMALL, SMALL]."""
    ids = torch.tensor([[*prompt, token] for token in range(SMALL)])
    logits = model(ids, use_cache=False).logits[:, -2:].double() / temperature
    first, second = logits.softmax(-1).unbind(1)
    return first[0][:, None] * second


def chi_square(counts, probabilities):
    """Distance of counts from what they should be, in standard deviations of it from its mean; rare cells are one."""
    expected = counts.sum() * probabilities
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected, counts = expected[expected > 0], counts[expected > 0]
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(("attention", "temperature"), [("sdpa", 0.7), ("eager", 3.0)])
def test_pairs_of_tokens_come_as_often_as_the_model_says(attention, temperature):
    model, prompt, n = tiny(vocab_size=SMALL, attention=attention), [4, 7, 5], 20_000
    assert (bytes_per_token(model) is None) == (attention == "eager")
    pairs = torch.tensor(written(model, [prompt] * n, 2, temperature=temperature))
    counts = torch.zeros(SMALL, SMALL).index_put_(tuple(pairs.T), torch.ones(n), accumulate=True).double()
    assert chi_square(counts, pair_probabilities(model, prompt, temperature)) < 4
    # so many draws tell another temperature
    assert chi_square(counts, pair_probabilities(model, prompt, 1.3 * temperature)) > 10


def test_half_precision_and_impossible_tokens_are_drawn_right():
    logits = torch.tensor([2.0, -float("inf"), 0.5, -3.0, 1.0], dtype=torch.bfloat16).expand(50_000, 5)
    choice = Sampling(0.8, 1, logits)
    choice.draw()
    counts = choice(logits).bincount(minlength=5).double()
    assert chi_square(counts, (logits[0].double() / 0.8).softmax(-1)) < 4 and counts[1] == 0


@pytest.mark.parametrize("name", MODELS)
def test_each_text_is_behind_its_own_prompt(name, monkeypatch):
    """So cold that the most likely token is drawn: prompts of several lengths, read in several parts."""
    monkeypatch.setattr(sampling, "_TOGETHER", 60)
    model, prompts = MODELS[name](), prompts_of(1)
    ends = model.generation_config.eos_token_id
    expected = [greedy_tokens(model, [p], pad_token=0, max_new_tokens=12)[0] for p in prompts]
    assert len({tuple(text) for text in expected}) > 3
    assert written(model, prompts, temperature=1e-5, ends=(ends if isinstance(ends, list) else [ends])) == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_seed_gives_its_texts_again(attention):
    model, prompts = tiny(attention=attention).train(), prompts_of(2)
    config, state = model.generation_config, torch.get_rng_state()
    config.update(top_k=1, repetition_penalty=9.0)
    texts = written(model, prompts, seed=3)
    assert torch.equal(torch.get_rng_state(), state) and model.training and model.generation_config is config
    torch.rand(5)
    assert written(model, prompts, seed=3) == texts != written(model, prompts, seed=4)
    assert len({tuple(text) for text in written(model, prompts[:1] * 20)}) == 20


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_end_with_any_of_the_ends(attention):
    model, prompts, ends, steps = tiny(attention=attention), prompts_of(3) * 5, (5, 60, 61, 62, 63), []
    free = written(model, prompts, 40)
    texts = written(model, prompts, 40, ends=ends, step_done=lambda: steps.append(1))
    assert len(steps) == max(map(len, texts)) and len({len(text) for text in texts}) > 4
    for text in texts:
        assert len(text) == 40 or text[-1] in ends
        assert not set(text[:-1]) & set(ends)
    # while no row has ended, what has been drawn is the same
    n = min(map(len, texts))
    assert [text[:n] for text in texts] == [text[:n] for text in free]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-eager"])
def test_a_graph_draws_what_steps_draw(name, monkeypatch):
    steps, capture = [], decoding._Step._captured
    monkeypatch.setattr(decoding._Step, "_captured", lambda s, x: steps.append(capture(s, x)) or steps[-1])
    model, prompts = MODELS[name]().to("cuda"), prompts_of(4)
    state = torch.cuda.get_rng_state()
    texts = written(model, prompts, 20, seed=5)
    assert steps and all(step is not None for step in steps) and torch.equal(torch.cuda.get_rng_state(), state)
    assert texts == written(model, prompts, 20, seed=5) != written(model, prompts, 20, seed=6)
    monkeypatch.setattr(decoding._Step, "_captured", lambda *_: None)
    assert written(model, prompts, 20, seed=5) == texts
    cold = written(model, prompts, 12, temperature=1e-5)
    assert cold == written(model.cpu(), prompts, 12, temperature=1e-5)


@pytest.mark.gpu
def test_pairs_of_tokens_come_as_often_on_a_gpu():
    model, prompt, n = tiny(vocab_size=SMALL), [4, 7, 5], 20_000
    expected = pair_probabilities(model, prompt, 1.5)
    pairs = torch.tensor(written(model.to("cuda"), [prompt] * n, 2, temperature=1.5))
    counts = torch.zeros(SMALL, SMALL).index_put_(tuple(pairs.T), torch.ones(n), accumulate=True).double()
    assert chi_square(counts, expected) < 4


def test_a_model_whose_logits_are_nan_writes_nothing():
    model = tiny()
    assert bytes_per_token(model) is not None, "what is checked once was right"
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="logits of the model are nan"):
        written(model, prompts_of(0))
