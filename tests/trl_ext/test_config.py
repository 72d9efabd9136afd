"""What RopeSFTConfig refuses before a model is loaded, and what it makes of its options."""

import pytest

from rope_patch.methods import resolve_view
from rope_patch.views import Uniform
from trl_ext import RopeSFTConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"view": "skp"}, "Unknown view 'skp'. Did you mean 'skip'"),
        (
            {"view": "yarn", "view_args": {"factor": 2.0}},
            "'yarn' is a rescaling; a view is one of chunk-permute, compose",
        ),
        ({"rescale": "skip"}, "'skip' is a view; a rescaling is one of abf, cope, drop-rope, dynamic-ntk"),
        (
            {"view": "skip", "view_args": {"spilt": 3}},
            "Unknown option 'spilt' of view 'skip'. Did you mean 'split'",
        ),
        ({"view": "yarn"}, "'yarn' is a rescaling; a view is one of chunk-permute"),
        ({"rescale": "yarm"}, "Unknown rescaling 'yarm'. Did you mean 'yarn'"),
        ({"rescale_args": {"factor": 2.0}}, "rescale_args needs rescale"),
        ({"view_args": {"split": 9}}, "view_args needs view, the name of the view; got {'split': 9}"),
        ({"view": "skip", "view_args": "{'split': 9}"}, "view_args must be a dict, or a JSON object such as"),
        (
            {"view": "pose", "view_args": {"target": 64, "window": 16}, "packing": True, "max_length": 32},
            "view 'pose' with window=.* cuts one document a row: switch packing",
        ),
        (
            {"objective": "dpo"},
            "Unknown objective 'dpo'. Known: clm, hidden-distill, native-distill, relation-distill, self-distill.",
        ),
        ({"objective": []}, r"Unknown objective \[\]. Known: clm, hidden-distill"),
        ({"objective": {}}, r"Unknown objective \{\}. Known: clm, hidden-distill"),
        ({"view": "skip", "view_args": "[1]"}, "view_args must be a dict, or a JSON object"),
        ({"max_length": "512"}, "max_length must be an integer of at least 2 tokens, or None, got '512'"),
        ({"max_length": float("nan")}, "max_length must be an integer of at least 2 tokens, or None, got nan"),
        ({"chat_template_path": "mine.jinja"}, "chat_template_path must be a file .* got mine.jinja, and there is no"),
        (
            {"view": "endprompt", "view_args": {"target": 64}, "max_length": 32, "cue": True},
            "cue must be a name or a text, or a list of them, got True",
        ),
        (
            {"view": "endprompt", "view_args": {"target": 64}, "max_length": 32, "cue": []},
            r"cue must be a name or a text, or a list of them, got \[\]",
        ),
        ({"max_steps": 0}, "max_steps must be at least 1, or below 0 to .*, got 0"),
        ({"max_length": 1}, "max_length must be an integer of at least 2 tokens, or None, got 1"),
        ({"long_documents": "cut"}, "long_documents must be 'truncate', 'split' or 'full-rows', got 'cut'"),
        ({"long_documents": "full-rows", "max_length": None}, "'full-rows' makes rows of max_length tokens each"),
        ({"long_documents": "full-rows", "max_length": 9, "packing": True}, "'full-rows' makes rows of max_length tok"),
        (
            {"view": "pose", "view_args": {"target": 64, "window": 8}, "objective": "self-distill"},
            "'self-distill' evaluates the view too: use objective='clm'",
        ),
    ],
)
def test_a_wrong_config_stops_before_a_model_is_loaded(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(
    ("given", "kept"),
    [('{"skip": 9}', {"skip": 9}), ({"skip": Uniform(1, 9)}, {"skip": {"law": "uniform", "low": 1, "high": 9}})],
)
def test_options_come_as_json_or_objects_and_are_kept_as_json(given, kept, tmp_path):
    args = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, view="skip", view_args=given)
    assert args.view_args == kept and args.make_view() == resolve_view("skip", kept)


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        *((name, False) for name in ("ce", "eval_ce", "eval_books_kl", "view_ce", "relation/q", "eval_hidden/far")),
        *((name, True) for name in ("mean_token_accuracy", "eval_mean_token_accuracy", "marks")),
        ("loss", False),
    ],
)
def test_less_of_a_part_of_the_loss_is_better(metric, best, tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1}
    config = RopeSFTConfig(str(tmp_path), use_cpu=True, bf16=False, metric_for_best_model=metric, **options)
    assert config.greater_is_better is best
    given = RopeSFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, metric_for_best_model=metric, greater_is_better=True, **options
    )
    assert given.greater_is_better is True
