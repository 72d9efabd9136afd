"""Cache, suite, report and probe: what is stored, what is measured again, and a page that needs no other file."""

import csv
import gzip
import json
import lzma
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import WINDOW, tiny, tokens
from tokenizers import normalizers

import rope_patch.eval.suite as suite
from rope_patch import patch_model, string_positions
from rope_patch.eval import (
    EvalPlan,
    LossByPosition,
    ShortText,
    context_gain,
    in_distribution_penalty,
    probe,
    read_texts,
    recovery_ratio,
    run_suite,
    text_rows,
    write_report,
)
from rope_patch.eval.report import summary
from rope_patch.eval.results.cache import ResultCache, files_hash, model_hash
from rope_patch.eval.results.figures import drawn_label

TEXTS = [("It was a dark night. The wind blew! Who was there? " * 41)[k : k + 2040] for k in range(5)]
MEASURES = ("cliff", "gain", "passkey", "niah-single", "position", "attention", "entropy", "view-kl")
# kinds of retrieval, and what needs lm-eval and its data, are tested by themselves
ELSEWHERE = {
    "several",
    "niah-multikey",
    "niah-multivalue",
    "niah-multiquery",
    "niah-ordinal",
    "ruler",
    "short",
    "lm-eval",
}


def test_every_measure_is_tested_and_has_a_flag_with_help():
    assert {*MEASURES, *ELSEWHERE} == set(suite.MEASURES)
    explained = {measure.flag or name for name, measure in suite.MEASURES.items() if measure.help}
    assert explained == {measure.flag or name for name, measure in suite.MEASURES.items()}


def model(**config):
    return tiny(vocab_size=CHARACTERS, **config)


def test_any_changed_bit_changes_the_hash():
    assert model_hash(model()) == model_hash(model())
    changed, swapped = model(), model()
    with torch.no_grad():
        weight = changed.model.layers[2].mlp.up_proj.weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        swapped.lm_head.weight.copy_(swapped.lm_head.weight.flip(0))  # the same numbers in other places
    scaled = [patch_model(model(), name, factor=2.0) for name in ("pi", "yarn")]
    models = [model(), changed, swapped, *scaled, model().to(torch.bfloat16)]
    assert len({model_hash(m) for m in models}) == 6


def test_what_changes_answers_and_no_weight_changes_the_hash():
    def with_adapter(alpha):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(model(), config)

    adapted = with_adapter(4)
    assert model_hash(adapted) == model_hash(with_adapter(4)) != model_hash(with_adapter(8))
    before = model_hash(adapted)
    with adapted.disable_adapter():
        assert model_hash(adapted) != before
    assert model_hash(adapted) == before
    plain, ends = model(), model()
    ends.generation_config.eos_token_id = [2, 5]
    assert model_hash(plain) != model_hash(ends)
    before = model_hash(plain)
    with string_positions(plain, offset=30, local=5):
        inside = model_hash(plain)
    with string_positions(plain, offset=31, local=5):
        assert len({before, inside, model_hash(plain)}) == 3
    assert model_hash(plain) == before


def test_files_count_by_what_is_in_them(tmp_path):
    for folder, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.jsonl").write_text(text)
    a, b, c = (files_hash(tmp_path / folder) for folder in "abc")
    assert a == b != c and files_hash(tmp_path / "a/f.jsonl") == files_hash(tmp_path / "b/f.jsonl")
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        files_hash(tmp_path / "d")


def test_the_cache_measures_once_and_keeps_nothing_of_a_failure(tmp_path):
    cache, calls = ResultCache(tmp_path / "c"), []

    def make():
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("stopped")
        return {"x": 0.1}

    with pytest.raises(RuntimeError):
        cache.get({"a": 1}, make)
    assert not (tmp_path / "c").exists()
    assert [cache.get({"a": 1}, make), cache.get({"a": 1}, make)] == [{"x": 0.1}] * 2 and len(calls) == 2
    cache.get({"a": 2}, make)
    assert len(calls) == 3 and len(list((tmp_path / "c").iterdir())) == 2


OF_ANOTHER_KEY = b'{"key": {"a": 2}, "value": {"x": 9}}'


@pytest.mark.parametrize("content", [b"", b"\0\0", OF_ANOTHER_KEY[:-9], b"[]", OF_ANOTHER_KEY])
def test_a_kept_result_that_is_damaged_or_of_another_key_is_measured_again(content, tmp_path, capsys):
    cache = ResultCache(tmp_path)
    cache.get({"a": 1}, lambda: {"x": 1})
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert not cache.has({"a": 1})
    assert cache.get({"a": 1}, lambda: {"x": 2}) == {"x": 2}
    assert capsys.readouterr().out == f"{file} is damaged. Its result is measured again.\n"
    assert cache.has({"a": 1}) and cache.get({"a": 1}, lambda: pytest.fail("measured")) == {"x": 2}


def test_two_that_keep_one_result_at_once_leave_it_whole(tmp_path, monkeypatch):
    """Both have written it before it gets its name."""
    both, found, write = threading.Barrier(2), [], Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda *a, **k: (write(*a, **k), both.wait(10)))

    def measured():
        both.wait(10)
        return {"x": [1, 2, 3]}

    threads = [
        threading.Thread(target=lambda: found.append(ResultCache(tmp_path).get({"a": 1}, measured))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and len(list(tmp_path.iterdir())) == 1
    assert ResultCache(tmp_path).get({"a": 1}, lambda: pytest.fail("measured")) == found[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    plan = EvalPlan(MEASURES, length=600, n_rows=2, lengths=(400, 450), trials=1, depths=(0.2, 0.8))
    models = {"native": model, "pi": lambda: patch_model(model(), "pi", factor=4.0)}
    return run_suite(models, character_tokenizer(), TEXTS, plan, folder / "cache"), models, plan, folder


@pytest.fixture(scope="module")
def page(results):
    """The report of `results`."""
    return write_report(results[0], results[3] / "r", title="A <title>", settings={"seed": 0})


def test_measures_of_text_read_all_rows(results):
    for name in ("cliff", "gain", "attention", "entropy", "view-kl"):
        assert results[0][name]["native"].n_rows == 2
    rows = text_rows(character_tokenizer(), TEXTS, seq_len=600, n_rows=2)
    alone = [context_gain(model(), row[None], progress=False).total for row in rows]
    assert results[0]["gain"]["native"].total == pytest.approx(sum(alone) / 2)


def test_a_second_run_measures_nothing(results, monkeypatch):
    first, models, plan, folder = results
    for name in MEASURES:
        monkeypatch.setitem(suite.MEASURES, name, replace(suite.MEASURES[name], run=None))
    again = run_suite(models, character_tokenizer(), TEXTS, plan, folder / "cache")
    for name in MEASURES:
        for label in models:
            mine, theirs = json.dumps(again[name][label].to_dict()), json.dumps(first[name][label].to_dict())
            assert mine == theirs
    with pytest.raises(TypeError):  # another text is measured anew
        run_suite(models, character_tokenizer(), TEXTS[:3], plan, folder / "cache")


def test_another_tokenizer_is_measured_anew(tmp_path):
    """It has the same special tokens, and reads the same text as other tokens."""
    lower = character_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    plan = EvalPlan(("cliff",), length=200, n_rows=2)
    found, wanted = (
        run_suite({"m": model}, tokenizer, TEXTS, plan, tmp_path / folder)["cliff"]["m"]
        for tokenizer, folder in ((character_tokenizer(), "kept"), (lower, "empty"))
    )
    again = run_suite({"m": model}, lower, TEXTS, plan, tmp_path / "kept")["cliff"]["m"]
    assert again.to_dict() == wanted.to_dict() != found.to_dict()


def test_a_run_that_was_stopped_goes_on_within_a_measure(results, tmp_path, monkeypatch):
    """Retrieval at the second length fails once; the first length is not measured again."""
    module = sys.modules["rope_patch.eval.measures.retrieval"]
    calls, real = [], module.ask_greedily

    def watched(m, questions, **options):
        calls.append((len(questions[0].prompt) > 450, len(questions)))
        if calls == [(False, 4), (True, 4)]:
            raise KeyboardInterrupt
        return real(m, questions, **options)

    monkeypatch.setattr(module, "ask_greedily", watched)
    options = {"lengths": (450, 500), "trials": 1, "depths": (0.2, 0.8), "batch_size": 2}
    plan = EvalPlan(("passkey", "niah-single"), length=500, **options)
    with pytest.raises(KeyboardInterrupt):
        run_suite({"m": model}, character_tokenizer(), TEXTS, plan, tmp_path)
    result = run_suite({"m": model}, character_tokenizer(), TEXTS, plan, tmp_path)
    # both kinds in one call, two prompts each, and only of the length that was missing
    assert calls[2:] == [(True, 4)]
    # a kind that is there already is not asked again with the others
    more = run_suite(
        {"m": model}, character_tokenizer(), TEXTS, replace(plan, measures=("niah-single", "niah-multikey")), tmp_path
    )
    assert calls[3:] == [(False, 2), (True, 2)]
    assert more["niah-single"]["m"] == result["niah-single"]["m"]


def test_the_page_needs_no_other_file_and_says_everything(results, page):
    html = page.read_text()
    assert "A &lt;title&gt;" in html and "<script" not in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html), "an outside asset"
    assert html.count("data:image/svg+xml;base64,") == len(MEASURES)
    for name in MEASURES:
        assert (page.parent / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (page.parent / "figures" / f"{name}.svg").is_file()
        with (page.parent / "tables" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert {row["model"] for row in rows} == {"native", "pi"}
    stored = json.loads((page.parent / "results.json").read_text())
    native = stored["results"]["cliff"]["native"]
    assert LossByPosition.from_dict(native).cliff() == results[0]["cliff"]["native"].cliff()
    penalty = next(row for row in stored["summary"] if "penalty" in row["figure"])
    cliff = results[0]["cliff"]
    assert penalty["values"] == {"pi": in_distribution_penalty(cliff["pi"], cliff["native"])}
    assert stored["settings"]["seed"] == 0 and "torch" in stored["settings"]


def test_a_folder_that_had_a_report_keeps_only_what_is_still_true(results, tmp_path):
    def written():
        return {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}

    of_others = {"figures/mine.png", "tables/mine.csv", "tables/cliff.txt", "cliff.csv"}
    for name in of_others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("by hand")
    two = {name: results[0][name] for name in ("cliff", "gain")}
    write_report(two, tmp_path, title="t", settings={})
    assert {"tables/regressions.csv", "tables/cliff.csv", "tables/gain.csv", "figures/cliff.png"} < written()
    alone = {"gain": {"native": two["gain"]["native"]}}
    write_report(alone, tmp_path, title="t", settings={})
    of_gain = {"figures/gain.png", "figures/gain.svg", "tables/gain.csv"}
    assert written() == {"report.html", "results.json"} | of_gain | of_others


def test_the_page_counts_from_one_and_cuts_no_digits(page, tmp_path):
    """Two curves that differ by 0.04: "+0.040" stands below "+0.048"."""
    curves = {
        label: LossByPosition(torch.full((2048,), loss, dtype=torch.float64), 1, 1024, ((loss,) * 32,), "same")
        for label, loss in (("native", 2.0), ("pi", 2.04))
    }
    html = write_report({"cliff": curves}, tmp_path, title="t", settings={}).read_text()
    row = next(line for line in html.splitlines() if "<td>loss 512..1023</td>" in line)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells[1:6] == ["lost", "2.000 nats", "2.040 nats", "+0.040", "+0.040 to +0.040"]
    assert cells[-1] == "8 blocks of 64 tokens of one row"
    html = page.read_text()
    numbers = {int(n) for n in re.findall(r"tokens, wording (\d) of 4</h3>", html)}
    assert numbers and numbers <= {1, 2, 3, 4}
    assert not re.findall(r'<td class="reply">\s', html), "the space before a first word moves it out of its column"


def test_comparisons_by_hand():
    flat = LossByPosition(torch.full((200,), 2.0, dtype=torch.float64), 1, 100)
    worse = LossByPosition(torch.full((200,), 2.5, dtype=torch.float64), 1, 100)
    assert in_distribution_penalty(worse, flat) == pytest.approx(25)
    assert recovery_ratio({"a": 0.3, "b": 0.5}, {"a": 0.4, "b": 0.6}) == pytest.approx(80)
    with pytest.raises(ValueError, match="the same benchmarks, got a and b"):
        recovery_ratio({"a": 1}, {"b": 1})
    with pytest.raises(ValueError, match="the same rows"):
        in_distribution_penalty(worse, LossByPosition(torch.ones(150, dtype=torch.float64), 1, 100))
    short = ShortText({"a": 0.25, "b": 0.75}, {}, {"a": 4, "b": 4})
    assert short.mean == 0.5 and short.table()[-1] == {"benchmark": "mean", "accuracy": 0.5, "samples": 8}


def test_short_text_that_the_first_model_answers_all_wrong_has_no_share_of_it(tmp_path):
    of = {label: ShortText({"piqa": a}, {}, {"piqa": 2}, {"piqa": [a, a]}) for label, a in (("a", 0.0), ("b", 1.0))}
    write_report({"short": of}, tmp_path, title="t", settings={})
    assert summary({"short": of}) == [{"figure": "short-text accuracy, mean", "values": {"a": 0.0, "b": 1.0}}]
    assert ShortText.readings(of)[1] == "b: 100.0 %."


def test_labels_are_drawn_as_they_are_written(tmp_path):
    curve = LossByPosition(torch.ones(200).double(), 1, 100)
    page = write_report({"gain": {}, "cliff": {r"_a$\frac$b": curve, "b": curve}}, tmp_path, title="t", settings={})
    assert r'<th class="n">_a$\frac$b</th><th class="n">b</th>' in page.read_text(), "also if a measure has no result"
    legend = LossByPosition.figure({drawn_label("_a"): curve}).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [" _a"]


def test_signs_count_in_a_hash():
    """The highest bits of two words are worth twice 2**63 in a sum modulo 2**64, which is nothing."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        changed = model().to(dtype)
        known = model_hash(changed)
        with torch.no_grad():
            weight = changed.model.layers[0].self_attn.o_proj.weight
            weight[:, 1::2] *= -1
            assert model_hash(changed) != known
            weight[:, 1::2] *= -1
            assert model_hash(changed) == known
            weight[0, 1] *= -1
            weight[5, 7] *= -1
            assert model_hash(changed) != known


def test_positions_of_answers_need_answers():
    for measures in (("position",), ("position", "passkey"), ("cliff", "position")):
        with pytest.raises(ValueError, match="position needs the answers to retrieval prompts"):
            EvalPlan(measures, length=200, lengths=(400,)).check(character_tokenizer(), TEXTS)
    EvalPlan(("passkey", "position"), length=200, lengths=(400,)).check(character_tokenizer(), TEXTS)


def test_rows_of_text(tmp_path):
    tokenizer = character_tokenizer()
    rows = text_rows(tokenizer, ["a" * 25, "b" * 4, "c" * 7], seq_len=10, n_rows=2)
    assert [tokenizer.decode(r) for r in rows] == ["a" * 10, "bbbbcccccc"]
    rows = text_rows(tokenizer, ["a" * 25], seq_len=10, n_rows=2, max_per_text=2)
    assert rows.shape == (2, 10)
    with pytest.raises(ValueError, match="give 1 rows of 10 tokens; 2 are needed. 1 of a text at most is taken"):
        text_rows(tokenizer, ["a" * 25], seq_len=10, n_rows=2)  # a longer text would not help
    with pytest.raises(ValueError, match="give 1 rows of 10 tokens; 3 are needed. Give more or longer ones"):
        text_rows(tokenizer, ["a" * 25], seq_len=10, n_rows=3)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"title": "y"}\n')
    with pytest.raises(ValueError, match="line 2 of .* has no field `text`; it has title"):
        list(read_texts([tmp_path / "a.jsonl"]))
    with pytest.raises(FileNotFoundError, match="there is no text file"):
        list(read_texts([tmp_path / "b.txt"]))


def test_texts_are_read_from_each_form_of_json_lines(tmp_path):
    lines = '{"text": "x"}\n\n{"text": "é"}\n'.encode("utf-8-sig")
    packed = {
        "jsonl": lines,
        "ndjson": lines,
        "jsonl.gz": gzip.compress(lines, mtime=0),
        "jsonl.xz": lzma.compress(lines),
    }
    for ending, content in packed.items():
        (tmp_path / f"a.{ending}").write_bytes(content)
        assert list(read_texts([tmp_path / f"a.{ending}"])) == ["x", "é"]
    (tmp_path / "half.jsonl").write_text(r'{"text": "\ud83d\ude00 \ud83d, \ude00\ud83d and C:\\ud83d"}' + "\n")
    assert list(read_texts([tmp_path / "half.jsonl"])) == ["\U0001f600 \ufffd, \ufffd\ufffd and C:\\ud83d"]
    (tmp_path / "a.txt").write_bytes(b"Latin-1: \xe9.\r\n")
    assert list(read_texts([tmp_path / "a.txt"])) == ["Latin-1: \ufffd.\n"], "a few odd bytes pass"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            b'[{"text": "x"}]',
            "a.json cannot be read as text: it ends with .json. Give text files in UTF-8, or ",
        ),
        ("a.txt.xz", lzma.compress(b"x"), "it ends with .xz. Give"),
        ("a.parquet", b"PAR1", "it ends with .parquet. Give"),
        ("a.txt", "dark night".encode("utf-16"), "a.txt is no text in UTF-8: it has bytes of zero, as UTF-16"),
        ("a.txt", b"caf\xe9 " * 1000, "a.txt is no text in UTF-8: 1,000 of 5,000 characters are unreadable"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "a.jsonl is no text in UTF-8: invalid continuation byte"),
        ("a.jsonl", b'\n{"text": null}', "field `text` of line 2 of .*a.jsonl must be a string, got NoneType"),
        ("a.jsonl", b'\n{"title": "x"}', "line 2 of .*a.jsonl has no field `text`; it has title"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}', mtime=0)[:-9],
            "a.jsonl.gz is cut, or no .gz file: Compressed file ended",
        ),
        ("a.jsonl.gz", b'{"text": "x"}', "a.jsonl.gz is cut, or no .gz file: Not a gzipped file"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "x"}')[:-9], "a.jsonl.xz is cut, or no .xz file"),
        ("a.jsonl.xz", b'{"text": "x"}', "a.jsonl.xz is cut, or no .xz file: Input format not supported"),
    ],
)
def test_what_is_no_text_is_refused_with_its_name(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_texts([tmp_path / name]))


def test_probe_says_when_there_is_nothing_to_do(monkeypatch):
    flat = LossByPosition(torch.full((3 * WINDOW,), 2.0, dtype=torch.float64), 1, WINDOW)
    monkeypatch.setattr(sys.modules["rope_patch.eval.measures.probe"], "loss_by_position", lambda *_, **__: flat)
    advice = probe(model(), tokens(1, 3 * WINDOW), progress=False)
    assert (
        advice.recipe == {}
        and "It does not rise up to there" in str(advice)
        and "Whether the model uses it" in str(advice)
    )
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"seq_len >= {WINDOW + 2}"):
        probe(model(), tokens(1, WINDOW), progress=False)


def test_probe_gives_no_advice_on_a_model_that_guesses():
    for scale in (1.0, 0.01):  # random logits, and nearly equal ones, as of fresh weights: a loss of ln(vocabulary)
        subject = model()
        with torch.no_grad():
            subject.lm_head.weight.mul_(scale)
        advice = probe(subject, tokens(1, 3 * WINDOW), progress=False)
        assert advice.recipe == {} and advice.yarn is None
        assert "predicts next to nothing" in str(advice) and "another tokenizer" in str(advice)
        assert "no adaptation" not in str(advice) and "does not rise" not in str(advice)


def test_all_models_are_compared_over_the_first_ones_window(tmp_path):
    """A checkpoint that declares a longer window, as one that was saved after PI or a new base."""
    models = {"native": model, "declares": lambda: model(max_position_embeddings=4 * WINDOW)}
    plan = EvalPlan(("cliff", "entropy"), length=200, n_rows=2)
    results = run_suite(models, character_tokenizer(), TEXTS, plan, tmp_path)
    curves = results["cliff"]
    assert [curve.window for curve in curves.values()] == [WINDOW, WINDOW]
    assert [r.window for r in results["entropy"].values()] == [WINDOW, WINDOW]
    shown = {row["figure"]: row["values"] for row in summary(results)}
    assert all(set(values) == {"native", "declares"} for name, values in shown.items() if "penalty" not in name)
    # the same weights: the same loss over the same positions
    assert shown["in-distribution penalty (%)"]["declares"] == pytest.approx(0, abs=1e-9)
    expected = curves["declares"].loss[WINDOW + 1 :].mean() - curves["declares"].loss[64 : WINDOW + 1].mean()
    assert shown["rise of the loss beyond the window"]["declares"] == pytest.approx(expected.item())
    wider = run_suite({"m": model}, character_tokenizer(), TEXTS, replace(plan, window=100), tmp_path)
    assert [by_label["m"].window for by_label in wider.values()] == [100] * 2
    # results put together by hand
    curve = curves["native"]
    by_hand = summary({"cliff": {"a": curve, "b": replace(curve, window=150)}})
    figures = {row["figure"]: row["values"] for row in by_hand}
    assert len(set(figures["rise of the loss beyond the window"].values())) == 1
    assert figures["in-distribution penalty (%)"] == {"b": 0}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"measures": ("cliff", "attention"), "length": 90_000}, "give 0 rows of 90000 tokens"),
        ({"measures": ("cliff", "passkey"), "lengths": (500, 60)}, "60 tokens are too few for the needles"),
        ({"measures": ("cliff", "niah-single"), "lengths": (50_000,)}, "the haystack has"),
        ({"measures": ("cliff", "ruler"), "ruler_tasks": ("ruler_qa_squad",)}, "needs squad"),
        ({"measures": ("cliff", "ruler"), "ruler_tasks": ("rulr",)}, "unknown RULER task 'rulr'"),
        ({"measures": ("cliff", "short"), "benchmarks": ("x",)}, "unknown benchmark 'x'"),
        ({"measures": ("cliff", "gain")}, "gain needs rows of at least 513 tokens, and length is 200"),
        ({"measures": ("cliff", "attention")}, "attention needs rows of at least 256 tokens"),
        ({"measures": ("cliff", "entropy"), "window": 199}, "entropy needs rows of at least 201 tokens"),
        ({"measures": ("cliff",), "chat_template": "on"}, "needs a tokenizer with a chat template"),
    ],
)
def test_what_cannot_be_measured_shows_before_a_model_is_loaded(plan, message, tmp_path):
    plan = {"length": 200, "n_rows": 1, "lengths": (400,), **plan}
    with pytest.raises(ValueError, match=message):
        run_suite({"m": lambda: pytest.fail("loaded")}, character_tokenizer(), TEXTS, EvalPlan(**plan), tmp_path)


def test_rows_within_the_window_of_a_model_show_before_it_is_measured(tmp_path):
    plan = EvalPlan(measures=("cliff", "entropy"), length=WINDOW + 1, n_rows=1)
    with pytest.raises(ValueError, match=f"entropy needs rows of at least {WINDOW + 2} tokens"):
        run_suite({"m": model}, character_tokenizer(), TEXTS, plan, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was measured"


def test_a_missing_lm_eval_shows_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    plan = EvalPlan(("cliff", "ruler"), length=200, lengths=(400,))
    with pytest.raises(ImportError, match="needs lm-eval"):
        run_suite({"m": lambda: pytest.fail("loaded")}, character_tokenizer(), TEXTS, plan, tmp_path)


def test_probe_finds_the_cliff_and_leaves_the_model_alone(monkeypatch):
    subject, before = model(), model_hash(model())
    adds = []

    def loss(m, rows, **_):
        curve = torch.full((rows.shape[1],), 2.0, dtype=torch.float64)
        if m.config.rope_parameters["rope_type"] == "default":
            curve[2 * WINDOW :] = 5.0
        else:
            curve += adds[-1]
        return LossByPosition(curve, 1, WINDOW)

    # the function `probe` hides its module of the same name
    monkeypatch.setattr(sys.modules["rope_patch.eval.measures.probe"], "loss_by_position", loss)
    for added, words in ((0.01, "may be enough as it is"), (0.2, "win back the 10.0 %")):
        adds.append(added)
        advice = probe(subject, tokens(1, 4 * WINDOW), progress=False)
        assert advice.factor == 4 and advice.recipe["rescale_args"] == {"factor": 4.0} and words in str(advice)
        assert "based on loss" in str(advice) and "`rope-patch extend`" in str(advice)
        assert f"It rises for good at position {advice.native.cliff_start()}" in str(advice)
        assert 2 * WINDOW - 4 < advice.native.cliff_start() <= 2 * WINDOW
        assert model_hash(subject) == before
    with pytest.raises(ValueError, match="call unpatch_model first"):
        probe(patch_model(model(), "pi", factor=2.0), tokens(1, 4 * WINDOW), progress=False)


def test_unknown_measures_are_refused():
    with pytest.raises(ValueError, match="Unknown measure 'clif'. Did you mean 'cliff'"):
        EvalPlan(("clif",), length=10)


def test_losses_that_are_no_numbers_get_no_advice():
    subject = model()
    subject.lm_head.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match="the losses of .* are not finite, so nothing can be said about"):
        probe(subject, tokens(1, 3 * WINDOW), progress=False)
