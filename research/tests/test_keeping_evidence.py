"""Self-distillation from short evidence: the loss, what either side reads, and indices that are drawn once."""

import argparse
import copy
import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file
from support.characters import CHARACTERS, chat_tokenizer
from support.tiny import tiny

import keeping
import keeping_evidence
from evidence_rows import evidence_rows
from keeping_arms import arms
from rope_patch import patch_model
from rope_patch.eval.measures.subject import Subject
from rope_patch.views import Mix, PoSE, Standard

LENGTH, WINDOW, TARGET = 600, 700, 5600
GAPS = Mix([Standard(), PoSE(target=TARGET, chunks=4)])
ENDS = [ord("."), ord("\n")]


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def native():
    return tiny("llama", vocab_size=CHARACTERS, max_position_embeddings=WINDOW)


@pytest.fixture
def student(native):
    return patch_model(copy.deepcopy(native), "ntk", factor=16.0)


def book():
    draw = random.Random(0)
    return "".join(" ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(5)) + ". " for _ in range(200))


def rows_of(tokenizer, n=4, **options):
    return evidence_rows(tokenizer, [book()], n, **{"length": LENGTH, "chat": 0.5, "facts": 3, "seed": 0, **options})


def indices_read(model, monkeypatch):
    """The RoPE indices of each forward from now on."""
    rotary, seen = model.model.rotary_emb, []
    forward = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: seen.append(position_ids) or forward(x, position_ids)
    )
    return seen


def test_the_loss_is_the_reverse_kl_and_has_its_gradient():
    z, w = torch.randn(5, 30, dtype=torch.float64) * 3, torch.randn(5, 30, dtype=torch.float64) * 3
    expected, gradient = torch.zeros(5, dtype=torch.float64), torch.zeros_like(z)
    for t in range(5):
        p = [math.exp(x) / sum(map(math.exp, z[t].tolist())) for x in z[t].tolist()]
        q = [math.exp(x) / sum(map(math.exp, w[t].tolist())) for x in w[t].tolist()]
        expected[t] = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        # d KL / d z(v) = p(v) (ln p(v) / q(v) - KL)
        gradient[t] = torch.tensor([a * (math.log(a / b) - expected[t]) for a, b in zip(p, q, strict=True)])
    logits = z.float().requires_grad_()
    kl = keeping_evidence.reverse_kl(logits.log_softmax(-1), w.float().log_softmax(-1))
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    kl.sum().backward()
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chat", [0.0, 1.0], ids=["raw", "chat"])
def test_the_teacher_is_given_the_sentence_and_the_question_alone(chat, tokenizer):
    for row in rows_of(tokenizer, chat=chat):
        long, short = tokenizer.decode(row.prompt), tokenizer.decode(row.evidence)
        begin, turn = ("<user>", "</s><assistant>") if chat else ("", " ")
        assert short == f"{begin}{row.fact.sentence}\n{row.fact.question}{turn}{row.fact.lead}"
        assert len(row.prompt) == LENGTH and row.fact.sentence in long
        assert long.endswith(short.partition("\n")[2]) and short.count(row.value) == long.count(row.value) == 1


def test_the_teacher_reads_what_it_is_given_and_the_answer(tokenizer, student, native):
    read, rows = [], rows_of(tokenizer, 2)
    native.model.register_forward_pre_hook(
        lambda _, args, kw: read.append(kw["input_ids"][0].tolist()), with_kwargs=True
    )
    keeping_evidence.distil_from_evidence(student, native, tokenizer, rows, GAPS, rate=1e-3, seed=0)
    assert len(read) == 2
    for ids, row in zip(read, rows, strict=True):
        assert ids[: len(row.evidence)] == row.evidence
        assert len(ids) - len(row.evidence) < keeping_evidence.NEW_TOKENS


def test_a_row_that_cannot_hold_the_fact_says_so(tokenizer):
    with pytest.raises(ValueError, match=r"length must leave room .* got 150: a row without the asked fact"):
        rows_of(tokenizer, length=150)


def test_rows_are_answered_and_trained_with_the_same_indices(tokenizer, student, native, monkeypatch):
    rows = rows_of(tokenizer)
    seen = indices_read(student, monkeypatch)
    keeping_evidence.distil_from_evidence(student, native, tokenizer, rows, GAPS, rate=1e-3, seed=0)
    answering, training = torch.cat(seen[: -len(rows)], 1), seen[-len(rows) :]
    assert len(seen[0][0]) == LENGTH and all(index.shape == (4, 1) for index in seen[1 : -len(rows)])
    for answered, trained in zip(answering, training, strict=True):
        assert LENGTH <= trained.shape[1] <= len(answered) + 1
        n = min(trained.shape[1], len(answered))  # the last token of an answer is read by neither
        assert torch.equal(trained[0, :n], answered[:n])
    gaps = [int((index.diff() > 1).sum()) for index in training]
    assert 0 in gaps and max(gaps) > 1  # rows at true positions, and rows with gaps
    assert all((index.diff() >= 1).all() and index.max() < TARGET for index in training)


def test_an_answer_goes_on_behind_the_prompts_last_index():
    index = keeping_evidence.row_index(PoSE(target=TARGET, chunks=4), 50, LENGTH, 3, 0)
    assert index.shape == (50, LENGTH + keeping_evidence.NEW_TOKENS)
    assert (index[:, LENGTH - 1 :].diff() == 1).all() and index.max() < TARGET
    assert len({tuple(row) for row in index.tolist()}) == 50
    assert torch.equal(index, keeping_evidence.row_index(PoSE(target=TARGET, chunks=4), 50, LENGTH, 3, 0))


def test_answers_are_drawn_from_what_the_training_forward_predicts(tokenizer, student):
    rows = rows_of(tokenizer)
    index = keeping_evidence.row_index(PoSE(target=TARGET, chunks=4), 4, LENGTH, 0, 0)
    assert (index[:, LENGTH - 1] > LENGTH + 100).any()
    sampling = []
    handle = student.lm_head.register_forward_hook(lambda _, args, logits: sampling.append(logits[:, -1]))
    answers = keeping_evidence.sampled_answers(student, rows, index, ENDS, 0)
    handle.remove()
    subject = Subject(student)
    for k, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        drawn_from = torch.stack([logits[k] for logits in sampling[: len(answer)]]).log_softmax(-1)
        with torch.no_grad():
            full = keeping_evidence.log_probabilities(subject, row.prompt, answer, index[k])
            true_positions = keeping_evidence.log_probabilities(subject, row.prompt, answer)
        torch.testing.assert_close(drawn_from, full, rtol=1e-4, atol=1e-4)
        if index[k, LENGTH - 1] > LENGTH + 100:
            assert (full - true_positions).abs().max() > 1e-2


def test_an_answer_ends_with_its_sentence(tokenizer, student):
    rows = rows_of(tokenizer)
    index = keeping_evidence.row_index(Standard(), 4, LENGTH, 0, 0)
    answers = keeping_evidence.sampled_answers(student, rows, index, list(range(60, 130)), 0)
    assert all(1 <= len(answer) <= keeping_evidence.NEW_TOKENS for answer in answers)
    assert all(i < 60 for answer in answers for i in answer[:-1])
    with pytest.raises(ValueError, match="one length"):
        keeping_evidence.sampled_answers(student, [rows[0], *rows_of(tokenizer, 1, length=500)], index, ENDS, 0)


@pytest.mark.slow
def test_a_seed_determines_what_is_learnt(tokenizer, native):
    def learnt(seed):
        model = patch_model(copy.deepcopy(native), "ntk", factor=16.0)
        torch.rand(1)  # whatever else draws
        figures = keeping_evidence.distil_from_evidence(
            model, native, tokenizer, rows_of(tokenizer, 16, seed=seed), GAPS, rate=1e-3, seed=seed
        )
        return figures["log"], model.lm_head.weight

    (log, weight), (again, weight_again), (other, _) = learnt(0), learnt(0), learnt(1)
    assert log == again != other and torch.equal(weight, weight_again)


@pytest.mark.slow
def test_the_student_comes_nearer_to_the_teacher(tokenizer, student, native):
    before = {name: weight.detach().clone() for name, weight in native.named_parameters()}
    rows = rows_of(tokenizer, 2, length=360, facts=2) * 4 * 12  # 12 steps of the same two
    figures = keeping_evidence.distil_from_evidence(student, native, tokenizer, rows, Standard(), rate=3e-3, seed=0)
    kl = [entry["reverse_kl"] for entry in figures["log"]]
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3])
    rates = [entry["learning_rate"] for entry in figures["log"]]
    assert rates[:2] == [0.0, 3e-3] and 3e-4 < rates[-1] < 5e-4
    assert (figures["steps"], figures["student_tokens"]) == (12, 96 * 360)
    assert all(not torch.equal(weight, before[name]) for name, weight in student.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in native.named_parameters())


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [("123", " 123 grams.", 1), ("123", " 1234 grams.", 0), ("7:05", " 17:05.", 0), ("Baba", " Baba.", 1)],
)
def test_an_answer_is_right_with_the_whole_value_in_it(value, text, expected):
    assert keeping_evidence.holds(value, text) == expected


@pytest.mark.parametrize("name", ["evidence", "keep-2-evidence"])
def test_an_arm_starts_from_the_weights_that_it_names_and_keeps_a_plain_checkpoint(
    name, tokenizer, native, tmp_path, monkeypatch
):
    native.save_pretrained(tmp_path / "model")
    started, steps = [], keeping_evidence.distil_from_evidence

    def first_steps(model, teacher, tokenizer, rows, view, *, rate, seed):
        started.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        assert len(rows) == 3 and all(len(row.prompt) == 1184 for row in rows)
        return steps(model, teacher, tokenizer, rows, view, rate=rate, seed=seed)

    monkeypatch.setattr(keeping_evidence, "distil_from_evidence", first_steps)
    trained = []

    def keep_2(model, tokenizer, rows, fields, seed, compiled, **more):
        trained.append(fields["objective"])
        return Trainer(patch_model(model, fields["rescale"], **fields["rescale_args"]))

    class Trainer:
        def __init__(self, model):
            self.model = model
            self.model.lm_head.weight.data += 1
            self.state = argparse.Namespace(log_history=[{"loss": 0.0, "train_runtime": 0.0}], global_step=0)

    monkeypatch.setattr(keeping, "training_rows", lambda *_: None)
    monkeypatch.setattr(keeping, "train", keep_2)
    data = keeping.Data(tokenizer, [book() * 3], [], torch.zeros(0), [[5] * 40], [], {})
    args = argparse.Namespace(
        model=tmp_path / "model",
        window=1200,
        target=9600,
        row_length=None,
        rescaling=None,
        rows=8,
        rate=None,
        compile=False,
        checkpoints=None,
    )
    arm = arms(1200, 9600, "chats")[name]
    for _ in range(2):
        line = keeping.train_arm(arm, data, args, 0, tmp_path / f"{name}-0")
    after = "keep-2" if name == "keep-2-evidence" else "native"
    assert (line["started_from"], line["steps"], line["student_tokens"]) == (after, 1, 3 * 1184)
    assert line["log"][0]["tokens"] == line["answer_tokens"] and {"rows_seconds", "train_seconds"} <= line.keys()
    expected = native.lm_head.weight + (1 if after == "keep-2" else 0)
    assert all(torch.equal(weights["lm_head.weight"], expected) for weights in started)
    assert trained == (["native-distill"] if after == "keep-2" else []), "what is there is not trained again"
    config = json.loads((tmp_path / f"{name}-0" / "config.json").read_text())["rope_parameters"]
    assert config["rope_type"] == "default" and config["rope_theta"] > 16 * 1e4
    assert load_file(tmp_path / f"{name}-0" / "model.safetensors").keys() == native.state_dict().keys()
