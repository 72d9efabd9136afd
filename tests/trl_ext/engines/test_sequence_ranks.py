"""One sequence over several ranks gives the draws, losses, evaluations and weights of one rank."""

import pytest
import torch
from support.marks import needs_deepspeed, needs_ranks
from support.ranks import ADAPTERS, PI, RELATION, SELF, require_alike, run_on_ranks
from support.tiny import MIXED, gemma3, tiny
from support.training import trainer

from trl_ext import RopeSFTConfig
from trl_ext.engines.sequence_ranks import SequenceRanks
from trl_ext.objectives import objective_of
from trl_ext.trainer.objective_checks import check_shared_sequences

# rows of 12 to 24 tokens, of any length: TRL's collator pads them to what ranks can share
CASES = {
    "plain": {},
    "skip": {"view": "skip"},
    "posaug": {"view": "posaug"},
    "chunks, checkpointed": {"view": "chunk-permute", "gradient_checkpointing": True},
    "rpe": {"view": "rpe", "view_args": {"max_index": 200}},
    "each rank's own mean": {"view": "skip", "average_tokens_across_devices": False, "gradient_accumulation_steps": 1},
    "cue": {"view": "endprompt", "view_args": {"cue_tokens": 3, "target": 64}, "objective_args": {"cue_weight": 2.5}},
    # a window of 16 tokens, which rows reach on one rank and not on the other
    "longrope": {
        "view": "skip",
        "model": {"max_position_embeddings": 16},
        "rescale": "longrope",
        "rescale_args": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    },
    "self-distill": SELF,
    "self-distill, checkpointed": {
        **SELF,
        "gradient_checkpointing": True,
        "objective_args": {"view_clm": 0.5, "reduction": "token"},
    },
    "self-distill, uniform, adapters": {
        **SELF,
        "adapters": ADAPTERS,
        "objective_args": {"reduction": "uniform", "rows": "query_in_suffix"},
    },
    "self-distill, sequential": {**SELF, "objective_args": {"passes": "sequential"}},
    "self-distill, native": {**SELF, **PI, "objective_args": {"teacher": "native"}},
    "self-distill, few labels": {**SELF, "documents": {"n_labels": 2}},
    "relations, checkpointed": {
        **RELATION,
        "gradient_checkpointing": True,
        "objective_args": {"logit_kl": {"weight": 0.5, "last": 5}},
    },
    "relations, attention": {**RELATION, "objective_args": {"attention": 0.5, "denominator": "own_heads"}},
    "relations, adapters, before RoPE": {**RELATION, "adapters": ADAPTERS, "objective_args": {"rope": "pre"}},
    "hidden": {"objective": "hidden-distill", **PI, "view": "skip", "objective_args": {"short_to_long": 2.0}},
    "native": {"objective": "native-distill", **PI, "view": "skip", "objective_args": {"clm_weight": 0.5}},
}
OF_FOUR = ("skip", "self-distill, checkpointed", "self-distill, few labels", "relations, checkpointed", "native")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_on_ranks(tmp_path_factory.mktemp("alone"), CASES, 1)


@pytest.mark.slow
@needs_ranks
def test_a_ring_of_two_trains_like_one_rank(tmp_path, alone):
    require_alike(alone, run_on_ranks(tmp_path, CASES, 2, "fsdp2", shared=2))


@pytest.mark.slow
@needs_ranks
@pytest.mark.parametrize("shared", [2, 4], ids=["two-rings", "one-ring"])
def test_four_ranks_train_like_one(tmp_path, alone, shared):
    cases = {name: CASES[name] for name in OF_FOUR}
    expected = {name: alone[name] for name in OF_FOUR}
    require_alike(expected, run_on_ranks(tmp_path, cases, 4, "fsdp2", shared=shared))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(("stage", "world"), [("zero3", 2), ("zero2", 2), ("zero3", 4)])
def test_ulysses_trains_like_one_rank(tmp_path, alone, stage, world):
    # a call cannot run backward twice under DeepSpeed; gloo gathers rows of one length
    names = [n for n in (OF_FOUR if world == 4 or stage == "zero2" else CASES) if "sequential" not in n]
    cases, expected = ({name: of[name] for name in names} for of in (CASES, alone))
    require_alike(expected, run_on_ranks(tmp_path, cases, world, stage, shared=2, pad_to_multiple_of=24))


SHORT = {"short_context": 6, "stride": 4}


def shared_by_four(monkeypatch, engine):
    monkeypatch.setattr(
        SequenceRanks, "of", classmethod(lambda cls, accelerator: SequenceRanks(accelerator, engine, 4))
    )


@pytest.mark.parametrize("engine", ["cp", "sp"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({**SELF, "objective_args": {"kl_top": 0.5}}, "kl_top chooses among"),
        ({**SELF, "objective_args": {"kl_longce": SHORT}}, "and kl_longce read short windows"),
        ({"objective_args": {"longce": SHORT}}, "longce and .* read short windows"),
        (
            {"objective": "self-distill", "objective_args": {"control": {"kind": "dropout"}}},
            "noise differs between ranks",
        ),
        ({"shifted_attention": 0.25}, "groups tokens of whole rows"),
        ({"objective": "relation-distill", **PI, "objective_args": {"attention": 1.0}}, "4 and 2 heads"),
    ],
)
def test_what_needs_whole_rows_is_refused(tmp_path, monkeypatch, engine, options, text):
    shared_by_four(monkeypatch, engine)
    with pytest.raises(ValueError, match=f"{engine}_size=4 gives each rank a part of every sequence, and .*{text}"):
        trainer(tmp_path, **options)


@pytest.mark.parametrize(
    ("engine", "options", "text"),
    [
        ("cp", {"padding_free": True, "max_length": None}, "which a ring does not keep apart"),
        ("cp", {"packing": True}, "packed rows hold several documents, which a ring does not keep apart"),
        ("cp", {"model": {"attention": "eager"}}, "attention is eager, where a ring is one of sdpa"),
        (
            "sp",
            {"view": "pose", "view_args": {"target": 64, "window": 16}},
            "cuts rows, which Ulysses has split before",
        ),
        ("sp", {"model": {"attention_dropout": 0.1}}, "attention with dropout"),
    ],
)
def test_what_one_engine_lacks_is_refused(tmp_path, monkeypatch, engine, options, text):
    shared_by_four(monkeypatch, engine)
    with pytest.raises(ValueError, match=f"{engine}_size=4 gives each rank .*{text}.* whole sequences on each rank"):
        trainer(tmp_path, **{**options, "model": tiny(**options.get("model", {}))})


@pytest.mark.parametrize("engine", ["cp", "sp"])
def test_images_are_refused(tmp_path, engine):
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match=f"{engine}_size=2 .* images belong to whole rows"):
        check_shared_sequences(run.model, run.args, SequenceRanks(run.accelerator, engine, 2), has_images=True)


def test_an_objective_that_does_not_say_that_it_can_is_refused(tmp_path, monkeypatch):
    shared_by_four(monkeypatch, "cp")
    monkeypatch.setattr(objective_of(RopeSFTConfig(**SELF, use_cpu=True, bf16=False)), "shares_sequences", False)
    with pytest.raises(ValueError, match=r"objective 'self-distill' does not say that it can \(`shares_sequences`\)"):
        trainer(tmp_path, **SELF)


@pytest.mark.parametrize(
    "model",
    [lambda: tiny("mistral-sliding"), lambda: tiny("qwen3", **MIXED), gemma3],
    ids=["all-sliding", "mixed", "gemma3"],
)
def test_a_ring_of_layers_with_sliding_windows_is_refused(tmp_path, monkeypatch, model):
    """Accelerate 1.15 says so too, but not before training starts."""
    shared_by_four(monkeypatch, "cp")
    with pytest.raises(ValueError, match="cp_size=4 .* layers with sliding windows would attend to all tokens before"):
        trainer(tmp_path, model=model())


def test_rows_are_padded_to_what_ranks_can_share(tmp_path, monkeypatch):
    shared_by_four(monkeypatch, "cp")
    run = trainer(tmp_path, view="skip", pad_to_multiple_of=6)
    assert run.data_collator.pad_to_multiple_of == 24  # 6, and two pieces for each of 4 ranks


def test_a_ring_refuses_rows_that_it_cannot_attend_to():
    ranks = SequenceRanks(None, "cp", 2)  # type: ignore[arg-type]  # which asks for no accelerator
    ids = torch.ones(1, 8, dtype=torch.int64)
    assert ranks.whole_rows({"input_ids": ids[:, :6]})["attention_mask"].tolist() == [[1] * 6 + [0] * 2]
    with pytest.raises(ValueError, match="hold several documents"):
        ranks.whole_rows({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])})
    with pytest.raises(ValueError, match="padded on the left"):
        ranks.whole_rows({"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])})


@pytest.mark.parametrize(("engine", "expected"), [("cp", [0, 2, 4, 6, 1, 3, 5, 7]), ("sp", [0, 1, 4, 5, 2, 3, 6, 7])])
def test_documents_are_numbered_as_one_rank_reads_them(engine, expected):
    """Two sequences at a time, four micro-steps: rings take turns, groups of Ulysses share out what they read."""

    class Accelerator:
        process_index = 0

    of_ranks = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]])
    places = []
    for rank in (0, 2):
        Accelerator.process_index = rank
        in_order, mine = SequenceRanks(Accelerator, engine, 2).sampler_order(of_ranks)  # type: ignore[arg-type]
        assert in_order[mine].tolist() == of_ranks[rank].tolist()
        places += mine.tolist()
    assert places == expected
