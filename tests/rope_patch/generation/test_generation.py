"""Answers to many prompts at once: those of the model's own greedy `generate` to each prompt alone."""

import gc
import itertools
import random
import weakref

import pytest
import torch
from support.tiny import MIXED, VOCAB, gemma3, tiny
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig

import rope_patch.generation.decoding as decoding
import rope_patch.generation.generation as generation
import rope_patch.generation.kv_rows as kv_rows
import rope_patch.generation.reading as reading
from rope_patch import patch_model, rope_view
from rope_patch.generation.generation import ask_greedily, greedy_answers
from rope_patch.generation.kv_rows import KVRows
from rope_patch.generation.reading import Question
from rope_patch.rope.rotary import forget_rows, named_rotary_modules
from rope_patch.views import PosAug, Skip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
DIVISORS = [1.0, 2.0, 3.0, 4.0]
MODELS = {
    "llama": tiny,
    "llama-eager": lambda: tiny(attention="eager"),
    "qwen2": lambda: tiny("qwen2"),
    "qwen3-mixed": lambda: tiny("qwen3", **MIXED),
    "mistral-sliding": lambda: tiny("mistral-sliding"),
    "gemma3": gemma3,
    "yarn": lambda: tiny(rope_parameters=YARN),
    "patched with yarn": lambda: patch_model(tiny(), "yarn", factor=4.0),
    "longrope of one set": lambda: patch_model(
        tiny(), "longrope", factor=4.0, long_factor=DIVISORS, short_factor=DIVISORS
    ),
    "longrope": lambda: patch_model(tiny(), "longrope", factor=4.0, long_factor=DIVISORS),
    "dynamic": lambda: tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
}
BY_ITS_OWN = ("llama-eager", "longrope", "dynamic")  # their own `generate` answers
READ_IN_ROWS = [name for name in MODELS if name not in BY_ITS_OWN]


class Ids:
    """Stands for a tokenizer; its text is token ids."""

    pad_token_id, eos_token_id = 0, 2

    def batch_decode(self, rows, skip_special_tokens):
        return [list(row) for row in rows]


def family(seed, lengths=(90, 90, 61, 90, 40, 1), vocab=VOCAB):
    """Prompts that share beginnings of any length, some of one length, one twice, in any order."""
    draw = random.Random(seed)
    stem = [draw.randrange(3, vocab) for _ in range(max(lengths))]
    prompts = []
    for n in lengths:
        shared = draw.randrange(n)
        prompts.append([*stem[:shared], *(draw.randrange(3, vocab) for _ in range(n - shared))])
    prompts += [prompts[0], [*prompts[0][:-2], 5, 6]]
    draw.shuffle(prompts)
    return prompts


def cut(reply, ends):
    end = next((k for k, i in enumerate(reply) if i in ends), len(reply) - 1)
    return reply[: end + 1]


def ends_of(model):
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


@torch.no_grad()
def alone(model, prompts, n):
    """What `generate` says to each prompt, up to the token that ends it."""
    replies = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        forget_rows(model)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)
        replies.append(cut(out[0, len(prompt) :].tolist(), ends_of(model)))
    return replies


def answers(model, prompts, n, **options):
    return [cut(r, ends_of(model)) for r in greedy_answers(model, Ids(), prompts, max_new_tokens=n, **options)]


def is_read_in_rows(model):
    with torch.no_grad():
        return generation.bytes_per_token(model) is not None


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate(name, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.windowed.BLOCK", 5)  # several blocks in these short prompts
    model, prompts = MODELS[name](), family(1)
    expected = alone(model, prompts, 8)
    assert len({tuple(r) for r in expected}) > 3  # else any would do
    assert is_read_in_rows(model) == (name not in BY_ITS_OWN)
    assert answers(model, prompts, 8) == expected
    counts = []
    assert answers(model, prompts, 8, batch_size=2, prefill_chunk=11, done=counts.append) == expected
    assert counts == sorted(counts) and counts[-1] == len(prompts)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3-mixed", "gemma3", "longrope of one set"])
def test_weights_in_float32_are_read_in_rows_under_autocast(name, device, monkeypatch):
    """As callbacks measure while a model is trained: rotated queries and keys are float32 there, and values are not."""
    monkeypatch.setattr("rope_patch.attention.windowed.BLOCK", 5)
    steps, capture = [], decoding._Step._captured
    monkeypatch.setattr(decoding._Step, "_captured", lambda s, x: steps.append(capture(s, x)) or steps[-1])
    model, prompts = MODELS[name]().to(device), family(1)
    with torch.no_grad():
        whole = generation.bytes_per_token(model)
    with torch.autocast(device, torch.bfloat16):
        with torch.no_grad():
            assert generation.bytes_per_token(model) == whole / 2
        # rounding decides between tokens that are about as likely, so that a reply may go another way after a while
        mine, theirs = answers(model, prompts, 5), alone(model, prompts, 5)  # fewer would not pay for a graph
    assert sum(a[:1] == b[:1] for a, b in zip(mine, theirs, strict=True)) >= len(prompts) - 1
    assert sum(a[:4] == b[:4] for a, b in zip(mine, theirs, strict=True)) > len(prompts) / 2
    assert bool(steps) == (device == "cuda") and None not in steps
    with torch.no_grad():
        assert generation.bytes_per_token(model) == whole


def test_an_answer_ends_at_any_of_several_tokens():
    model, prompts = tiny(), family(10)
    free = alone(model, prompts, 12)
    said = sorted({i for reply in free for i in reply[2:6]})
    model.generation_config.eos_token_id = said[:: len(said) // 3][:3]
    expected = alone(model, prompts, 12)
    assert 1 < len({len(r) for r in expected}), "no answer ends early"
    assert greedy_answers(model, Ids(), prompts, max_new_tokens=12) == expected


@pytest.mark.parametrize(("name", "batch_size"), [*zip(MODELS, itertools.cycle([None, 2]), strict=False)])
def test_choices_behind_the_right_answer_are_those_of_a_plain_forward(name, batch_size):
    """Beside what is written, which they do not change; prompts with answers and limits of several lengths."""
    model, prompts = MODELS[name](), family(7)
    draw = random.Random(8)
    questions = [
        Question(p, draw.choice((1, 3, 9)), [draw.randrange(3, VOCAB) for _ in range(draw.choice((0, 1, 5, 12)))])
        for p in prompts
    ]
    replies = ask_greedily(model, questions, pad_token=0, batch_size=batch_size)
    assert {len(r.forced) for r in replies} == {len(q.answer) for q in questions}
    written = alone(model, prompts, 9)
    for question, reply, longest in zip(questions, replies, written, strict=True):
        assert cut(reply.written, ends_of(model)) == cut(longest[: question.max_new_tokens], ends_of(model))
        if question.answer:
            forget_rows(model)
            with torch.no_grad():
                logits = model(torch.tensor([[*question.prompt, *question.answer[:-1]]]), use_cache=False).logits[0]
            assert reply.forced == logits[-len(question.answer) :].argmax(-1).tolist()


def test_teacher_forcing_reads_no_prompt_again():
    model, read = tiny(), []
    prompts = [torch.randint(3, VOCAB, (200,)).tolist() for _ in range(3)]
    is_read_in_rows(model)
    model.model.layers[0].register_forward_hook(lambda *x: read.append(x[2].shape[:2].numel()))
    ask_greedily(model, [Question(p, 1, [5, 6, 7, 8]) for p in prompts], pad_token=0)
    assert sum(read) == 3 * (200 + 3)


def test_a_model_without_an_end_says_all_that_it_may():
    model, prompts = tiny(), family(2)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert [len(r) for r in greedy_answers(model, Ids(), prompts, max_new_tokens=5)] == [5] * len(prompts)


def test_what_prompts_share_is_read_once(monkeypatch):
    monkeypatch.setattr(reading, "_TOGETHER", {"cpu": 0})
    model, read = tiny(), []
    stem = torch.randint(3, VOCAB, (400,)).tolist()
    prompts = [[*stem[:k], 7, *stem[k:], 9] for k in (380, 100, 300, 380)]
    model.model.layers[0].register_forward_hook(lambda *x: read.append(x[2].shape[:2].numel()))
    expected = alone(model, prompts, 2)
    is_read_in_rows(model)
    read.clear()
    assert greedy_answers(model, Ids(), prompts, max_new_tokens=2) == expected
    # the trie: the haystack up to 100, then each branch; the same prompt twice has its last token read again
    assert sum(read) <= 402 + (402 - 100) + (402 - 300) + 1 + len(prompts)
    read.clear()
    assert greedy_answers(model, Ids(), prompts, max_new_tokens=2, batch_size=1) == expected
    assert sum(read) <= 402 + (402 - 100) + (402 - 300) + 1 + len(prompts)


def test_long_prompts_are_read_between_multiples(monkeypatch):
    """Of which cuDNN needs a plan each; padding behind a prompt changes no reply."""
    monkeypatch.setattr(reading, "_TOGETHER", {"cpu": 0})
    monkeypatch.setattr(reading, "_ROUND", {"cpu": 32})
    model, read = tiny(), []
    stem = torch.randint(3, VOCAB, (400,)).tolist()
    prompts = [[*stem[:k], 7, *stem[k : k + 90], 9] for k in (200, 101, 300)]
    expected = alone(model, prompts, 6)
    is_read_in_rows(model)
    model.model.layers[0].register_forward_hook(lambda *x: read.append(x[2].shape[1]))
    assert answers(model, prompts, 6, batch_size=2) == expected
    assert all(n % 32 == 0 for n in read if n > 1)
    assert sum(n for n in read if n > 1) < 192 + 320 + 416, "what they share is read once"


def test_a_view_in_force_gives_what_generate_gives():
    prompts, view = [p for p in family(3) if len(p) == 90][:3], Skip(split=5, skip=40)
    inside, always = tiny(), patch_model(tiny(), view, when="always")
    plain = alone(inside, prompts, 8)
    assert answers(inside, prompts, 8) == plain
    with rope_view(inside, view):
        expected = alone(inside, prompts, 8)
        assert answers(inside, prompts, 8) == expected != plain
    assert answers(always, prompts, 8) == expected
    assert answers(inside, prompts, 8) == plain
    assert answers(patch_model(tiny(), PosAug()), prompts, 8) == plain  # a view of training


def test_a_prompt_longer_than_a_chunk_is_answered_under_a_view(monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 16)
    model, prompts = patch_model(tiny(), Skip(split=5, skip=40), when="always"), family(3, lengths=(50,))
    assert answers(model, prompts, 8) == alone(model, prompts, 8)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_config_that_comes_with_a_model_changes_no_answer(attention):
    model, prompts = tiny(attention=attention), family(4)
    expected = answers(model, prompts, 8)
    config = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, no_repeat_ngram_size=1, eos_token_id=2
    )
    model.generation_config = config
    assert answers(model, prompts, 8) == expected
    assert model.generation_config is config


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_too_many_rows_for_memory_become_fewer(attention, monkeypatch):
    model, prompts, sizes = tiny(attention=attention), family(5), []
    expected = alone(model, prompts, 6)
    is_read_in_rows(model)

    def full(n):
        sizes.append(n)
        if n > 2:
            raise torch.OutOfMemoryError("out of memory")

    make, generate = KVRows.__init__, type(model).generate
    if attention == "sdpa":
        monkeypatch.setattr(KVRows, "__init__", lambda rows, c, n, k: (make(rows, c, n, k), setattr(rows, "n", n))[0])
        read = KVRows.read
        monkeypatch.setattr(KVRows, "read", lambda rows, *a: (full(rows.n), read(rows, *a))[1])
    else:
        instead = staticmethod(lambda **kw: (full(len(kw["input_ids"])), generate(model, **kw))[1])
        monkeypatch.setattr(generation, "_ROWS", 4)
        prompts = sorted(prompts, key=len)
        expected = alone(model, prompts, 6)
        model.generate = instead
    assert answers(model, prompts, 6) == expected
    assert max(sizes) > 2


def test_memory_that_others_hold_makes_no_tiny_chunks(monkeypatch):
    model, prompts, seen = tiny(), [p for seed in range(4) for p in family(seed)], []
    expected = alone(model, prompts, 2)
    is_read_in_rows(model)
    read = KVRows.read

    def reading(rows, ids, first, begin, chunk, **options):
        seen.append((rows.n_rows, chunk * len(ids)))
        if rows.n_rows > 1:
            raise torch.OutOfMemoryError("out of memory")
        return read(rows, ids, first, begin, chunk, **options)

    monkeypatch.setattr(KVRows, "read", reading)
    assert answers(model, prompts, 2) == expected
    assert seen[0][0] == len(prompts) and min(chunk for _, chunk in seen) > 900


def test_a_forward_that_rows_do_not_match_is_left_to_generate():
    """An attention that looks at more than its inputs: here, at how many tokens there are in the forward."""
    model, prompts = tiny(), family(6)
    layer = model.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda hidden_states, **kw: (plain(hidden_states, **kw)[0] * len(hidden_states[0]) ** 0.5, None)
    assert not is_read_in_rows(model)
    assert answers(model, prompts, 4) == alone(model, prompts, 4)


def test_buffers_are_let_go_of_at_once():
    rows = KVRows(tiny(), 1, 8)
    gone = weakref.ref(rows)
    with torch.no_grad(), rows.attention():
        rows.read(torch.tensor([[3, 4, 5]]), 0, 0, chunk=2)
    gc.disable()  # not when the garbage collector comes by
    try:
        del rows
        assert gone() is None
    finally:
        gc.enable()


class ValuesRead(TorchFunctionMode):
    """Counts tensors whose value goes to Python, which no CUDA graph can hold."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        names = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
        self.count += getattr(function, "__name__", None) in names
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", READ_IN_ROWS)
def test_a_graph_can_hold_a_step(name, monkeypatch):
    model, prompts = MODELS[name](), family(1)
    types = [module.rope_type for _, module in named_rotary_modules(model)]
    read, kernel = [], kv_rows.decode_attention

    def step(self, run=decoding._Step._run):
        with ValuesRead() as values:
            run(self)
        read.append(values.count)

    def attend(*args):
        with torch._C.DisableTorchFunction():  # a GPU has a kernel in place of what runs here
            return kernel(*args)

    monkeypatch.setattr(decoding._Step, "_run", step)
    monkeypatch.setattr(kv_rows, "decode_attention", attend)
    answers(model, prompts, 4)
    assert read and not any(read)
    assert [module.rope_type for _, module in named_rotary_modules(model)] == types


@pytest.mark.gpu
@pytest.mark.parametrize("name", READ_IN_ROWS)
@pytest.mark.parametrize("captured", [True, False], ids=["graph", "no graph"])
def test_a_gpu_in_float32_says_what_the_cpu_says(name, captured, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.windowed.BLOCK", 5)
    steps, capture = [], decoding._Step._captured
    if captured:
        monkeypatch.setattr(decoding._Step, "_captured", lambda s, x: steps.append(capture(s, x)) or steps[-1])
    else:
        monkeypatch.setattr(decoding._Step, "_captured", lambda *_: None)
    model, prompts = MODELS[name](), family(1)
    expected = alone(model, prompts, 12)
    model.to("cuda")
    assert is_read_in_rows(model)
    assert answers(model, prompts, 12) == expected == answers(model, prompts, 12, batch_size=2, prefill_chunk=11)
    assert all(step is not None for step in steps) and bool(steps) == captured


@pytest.mark.gpu
def test_a_gpu_reads_prompts_by_a_fast_kernel():
    """The parts behind a shared beginning too, whose queries are fewer than their keys: by that of whole rows in two
    parts, which is cuDNN's on Hopper, or else by flash attention, but not by those that take masks."""
    model = tiny(hidden_size=64, head_dim=16).to("cuda", torch.bfloat16)
    stem = torch.randint(3, VOCAB, (9000,)).tolist()
    prompts = [[*stem[:k], 7, *stem[k:], 9] for k in (8000, 100)]
    assert is_read_in_rows(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        greedy_answers(model, Ids(), prompts, max_new_tokens=2, prefill_chunk=4000)
    called = {event.key for event in seen.key_averages()}
    assert called & {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"}
    assert not {name for name in called if "efficient" in name or "attention_math" in name}
