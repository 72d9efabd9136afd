"""With view "standard" and nothing else asked, RopeSFTTrainer is SFTTrainer: what that takes, and its numbers."""

import inspect
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import images
from support.marks import BEFORE_5_17
from support.tiny import VOCAB, tiny
from support.training import documents, logged, tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    NemotronHConfig,
    NemotronHForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from rope_patch import patch_model, rope_view
from rope_patch.views import Uniform
from trl_ext import RopeSFTConfig, RopeSFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL's own, of what it takes until its version 2
    pytest.mark.skipif(BEFORE_5_17, reason="the trainer needs Transformers 5.17"),
]

SETTINGS = {
    "max_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no",
    "disable_tqdm": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
}  # fmt: skip
METRICS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
STOCK, OURS = (SFTTrainer, SFTConfig), (RopeSFTTrainer, RopeSFTConfig)
BOTH = (STOCK, OURS)


def settings(folder, **options):
    return {"output_dir": str(folder), **SETTINGS, **options}


def after(run):
    """What a run logs, and the weights that it ends with."""
    run.train()
    return logged(run, *METRICS), {name: weight.detach().clone() for name, weight in run.model.named_parameters()}


def same(first, second):
    assert first[0] == second[0] and len(first[0]) > 1
    assert first[1].keys() == second[1].keys() and all(
        torch.equal(first[1][name], second[1][name]) for name in first[1]
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=2))


def nemotron():
    torch.manual_seed(0)
    return NemotronHForCausalLM(
        NemotronHConfig(
            vocab_size=VOCAB, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
            layers_block_type=["mamba", "attention"], mamba_num_heads=4, mamba_head_dim=8, mamba_n_groups=1,
            ssm_state_size=8, use_mamba_kernels=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


NO_ROPE = {"gpt2": gpt2, "nemotron": nemotron}


@pytest.mark.parametrize("kind", images.MODELS)
def test_models_with_several_axes_train_on_images_as_with_trl(kind, tmp_path):
    runs = [
        after(
            trainer_class(
                images.model(kind),
                config_class(**settings(tmp_path)),
                train_dataset=images.conversations(),
                processing_class=images.processor(kind),
            )
        )
        for trainer_class, config_class in BOTH
    ]
    same(*runs)


YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"view": "skip", "view_args": {"skip": Uniform(1, 8)}},
            r"views are not defined for positions with several axes \(mRoPE\)",
        ),
        ({**YARN, "objective": "self-distill", "objective_args": {"teacher": "native"}}, "have none: use"),
        ({"shifted_attention": 0.5, "max_length": 64}, "they do not say where documents begin"),
        ({"objective_args": {"longce": {"short_context": 8, "stride": 4}}}, "without its images"),
    ],
    ids=["view", "native", "shifted", "longce"],
)
def test_what_reads_no_several_axes_or_images_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RopeSFTTrainer(
            images.model("Qwen2VL"),
            RopeSFTConfig(**settings(tmp_path, **options)),
            train_dataset=images.conversations(),
            processing_class=images.processor("Qwen2VL"),
        ).train()


@pytest.mark.parametrize("objective", ["hidden-distill", "relation-distill", "native-distill"])
def test_distillation_at_true_positions_takes_images(objective, tmp_path):
    """Teacher and student read the same pictures at the same positions: by the same frequencies they are the same."""
    losses = []
    for factor in (1.0, 4.0):
        run = RopeSFTTrainer(
            images.model("Qwen3VL"),
            RopeSFTConfig(
                **settings(
                    tmp_path, objective=objective, rescale="pi", rescale_args={"factor": factor}, max_steps=1,
                    objective_args={"clm_weight": 0.0} if objective == "native-distill" else None,
                )
            ),
            train_dataset=images.conversations(),
            processing_class=images.processor("Qwen3VL"),
        )  # fmt: skip
        run.train()
        losses.append(logged(run, "loss")[0]["loss"])
    assert losses[0] == pytest.approx(0.0, abs=1e-6) and losses[1] > (1e-5 if objective == "native-distill" else 1e-3)


@pytest.mark.parametrize("kind", images.MODELS)
def test_the_standard_view_is_no_view_on_several_axes(kind):
    model, ids = images.model(kind).eval(), torch.randint(8, 60, (2, 9))
    plain = model(ids).logits
    with rope_view(model, "standard"):
        assert torch.equal(model(ids).logits, plain)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False)[:, :9], ids)
    patch_model(model, "standard", when="always")
    assert torch.equal(model(ids).logits, plain)
    index = torch.arange(9).repeat(2, 1)
    with pytest.raises(ValueError, match="several axes"), rope_view(model, index=index):
        model(ids, position_ids=index.expand(3, 2, 9))


@pytest.mark.parametrize("kind", NO_ROPE)
def test_models_without_rope_train_as_with_trl(kind, tmp_path):
    runs = []
    for trainer_class, config_class in BOTH:
        run = trainer_class(
            NO_ROPE[kind](),
            config_class(**settings(tmp_path)),
            train_dataset=documents(),
            eval_dataset=documents(3, seed=9),
            processing_class=tokenizer(),
        )
        before = {id(module) for module in run.model.modules() if module._forward_pre_hooks or module._forward_hooks}
        assert not before, "nothing is put on the model"
        runs.append((*after(run), run.evaluate()["eval_loss"]))
        assert run.predict(documents(2, seed=3)).metrics["test_loss"] > 0
    same(*runs)
    assert runs[0][2] == runs[1][2]


def test_models_without_rope_resume(tmp_path):
    def run(**resume):
        made = RopeSFTTrainer(
            gpt2(),
            RopeSFTConfig(**settings(tmp_path, save_strategy="steps", save_steps=1)),
            train_dataset=documents(),
            processing_class=tokenizer(),
        )
        made.train(**resume)
        return logged(made, "loss")

    whole = run()
    assert run(resume_from_checkpoint=str(tmp_path / "checkpoint-1")) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"view": "skip"},
        {"rescale": "yarn", "rescale_args": {"factor": 2.0}},
        {"objective": "self-distill", "view": "skip"},
        {"objective": "hidden-distill"},
        {"shifted_attention": 0.25, "max_length": 32},
        {"trainable": "qkv"},
        {"objective_args": {"longce": {}}, "max_length": None},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_needs_rope_is_refused_without_it(options, tmp_path):
    with pytest.raises(ValueError, match="model type 'gpt2' has no RoPE that can be patched"):
        RopeSFTTrainer(
            gpt2(),
            RopeSFTConfig(**settings(tmp_path, **options)),
            train_dataset=documents(),
            processing_class=tokenizer(),
        )


@pytest.mark.parametrize(
    ("kind", "batch"),
    [(TrainingArguments, {}), (SFTConfig, {"gradient_accumulation_steps": 2, "gradient_checkpointing": False})],
)
def test_plain_arguments_train_as_with_trl(kind, batch, tmp_path):
    def run(trainer_class):
        arguments = kind(**settings(tmp_path, hub_token="secret", **batch))
        made = trainer_class(tiny(), arguments, None, documents(), documents(3), tokenizer())
        for field in fields(SFTConfig):
            values = getattr(made.args, field.name), getattr(arguments, field.name, None)
            if hasattr(arguments, field.name):
                assert values[0] == values[1], field.name
        return after(made)

    same(run(SFTTrainer), run(RopeSFTTrainer))


def chats():
    def turn(n):
        return [{"role": "user", "content": sentence(3)}, {"role": "assistant", "content": sentence(n)}]

    return Dataset.from_dict({"messages": [turn(n) + turn(2) for n in LENGTHS]})


def sentence(n):
    return " ".join(f"w{3 + (7 * n + i) % 90}" for i in range(n))


def chat_tokenizer():
    made = tokenizer()
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}w4 {{ m.content }} {% endgeneration %}"
        "{% else %}w3 {{ m.content }} {% endif %}{% endfor %}"
    )
    return made


LENGTHS = (1, 30, 0, 5, 26, 12, 1, 40)  # of which some are one token with the end of text, some longer than a row
TEXTS = Dataset.from_dict({"text": [sentence(n) for n in LENGTHS]})
PAIRS = Dataset.from_dict({"prompt": [sentence(n) for n in LENGTHS], "completion": [f" {sentence(4)}"] * len(LENGTHS)})
TOKENS = documents(8)
MASKED = documents(8, n_labels=5)
LAYOUTS = {  # rows, and what is asked of them
    "text": (TEXTS, {"max_length": 10}),
    "default-length": (TEXTS, {}),
    "no-length": (TEXTS, {"max_length": None}),
    "end": (TEXTS, {"max_length": 10, "truncation_mode": "keep_end"}),
    "shuffled": (TEXTS, {"max_length": 10, "shuffle_dataset": True}),
    "processes": (TEXTS, {"max_length": 10, "dataset_num_proc": 2}),
    "tokens": (TOKENS, {"max_length": 10}),
    "masked": (MASKED, {"max_length": 10}),
    "completion": (PAIRS, {"max_length": 10}),
    "all-of-pairs": (PAIRS, {"max_length": 10, "completion_only_loss": False}),
    "chat": (chats(), {"max_length": 10}),
    "assistant": (chats(), {"max_length": 20, "assistant_only_loss": True}),
    "stream": (TEXTS.to_iterable_dataset(), {"max_length": 10}),
    "packed-stream": (TEXTS.to_iterable_dataset(), {"max_length": 20, "packing": True}),
    "padding-free": (TEXTS, {"max_length": None, "padding_free": True}),
    "bfd": (TEXTS, {"max_length": 20, "packing": True}),
    "bfd-split": (TEXTS, {"max_length": 20, "packing": True, "packing_strategy": "bfd_split"}),
    "wrapped": (TEXTS, {"max_length": 20, "packing": True, "packing_strategy": "wrapped"}),
    "packed-pairs": (PAIRS, {"max_length": 20, "packing": True}),
    "shuffled-packed": (TEXTS, {"max_length": 20, "packing": True, "shuffle_dataset": True}),
    "packed-training": (TEXTS, {"max_length": 20, "packing": True, "eval_packing": False}),
    "dft": (TEXTS, {"max_length": 10, "loss_type": "dft"}),
}


def both(tmp_path, layout, **more):
    """TRL's trainer and ours."""
    data, options = LAYOUTS[layout]
    return [
        trainer_class(
            tiny(num_hidden_layers=2),
            config_class(**settings(tmp_path, **options)),
            train_dataset=data,
            eval_dataset={"one": data, "two": data.take(3)},
            processing_class=chat_tokenizer(),
            **more,
        )
        for trainer_class, config_class in BOTH
    ]


def sets_of(run):
    return [list(part) for part in (run.train_dataset, *run.eval_dataset.values())]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name == "processes" else name for name in LAYOUTS]
)
def test_the_same_arguments_give_the_same_rows(layout, tmp_path):
    stock, ours = both(tmp_path, layout)
    assert sets_of(stock) == sets_of(ours)


# those whose rows are batched, masked or weighed in another way
LEARNT = ["text", "assistant", "packed-stream", "padding-free", "bfd", "packed-training", "dft"]


@pytest.mark.parametrize("layout", LEARNT)
def test_the_same_rows_give_the_same_losses_and_predictions(layout, tmp_path):
    adapters = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if layout == "bfd" else None
    results = []
    for run in both(tmp_path, layout, peft_config=adapters):
        torch.manual_seed(0)
        trained, evaluated = after(run), quiet(run.evaluate())
        given = quiet(run.evaluate(LAYOUTS[layout][0]))
        predicted = run.predict(run.eval_dataset["two"])
        results.append((*trained, evaluated, given, quiet(predicted.metrics), predicted))
    same(*results)
    stock, ours = results
    assert stock[2:5] == ours[2:5]
    assert np.array_equal(stock[5].predictions, ours[5].predictions)
    assert np.array_equal(stock[5].label_ids, ours[5].label_ids)


def quiet(metrics):
    """Metrics without those of time."""
    return {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second"))}


def test_rows_are_truncated_and_a_line_says_how_much_and_how_to_keep_it(tmp_path, caplog):
    run = RopeSFTTrainer(
        tiny(),
        RopeSFTConfig(**settings(tmp_path, max_length=10)),
        train_dataset=TEXTS,
        processing_class=tokenizer(),
    )
    tokens = sum(n + 1 for n in LENGTHS)  # with the end of text
    lost = sum(max(n + 1 - 10, 0) for n in LENGTHS)
    assert sum(map(len, run.train_dataset["input_ids"])) == tokens - lost
    told = f"{lost} tokens ({lost / tokens:.1%} of all) behind max_length in 4 documents (long_documents='split' keeps"
    assert told in caplog.text


def test_arguments_of_another_class_are_refused_where_fields_would_be_lost(tmp_path):
    @dataclass
    class Own(SFTConfig):
        mine: int = 3

    @dataclass
    class Renamed(SFTConfig):
        pass

    assert RopeSFTConfig.of(Renamed(**settings(tmp_path))).learning_rate == SETTINGS["learning_rate"]
    with pytest.raises(TypeError, match="is of class Own, whose fields mine RopeSFTConfig lacks: derive the class"):
        RopeSFTTrainer(tiny(), Own(**settings(tmp_path)), train_dataset=documents(), processing_class=tokenizer())
    with pytest.raises(TypeError, match="must be a RopeSFTConfig, an SFTConfig or plain TrainingArguments, got dict"):
        RopeSFTTrainer(tiny(), settings(tmp_path), train_dataset=documents(), processing_class=tokenizer())


def test_the_signature_is_that_of_trl():
    stock, ours = (inspect.signature(kind.__init__).parameters for kind in (SFTTrainer, RopeSFTTrainer))
    assert list(ours)[: len(stock)] == list(stock)
    assert [ours[name].default for name in stock] == [stock[name].default for name in stock]


@pytest.mark.parametrize("data", ["rows", "stream"])
def test_the_users_arguments_change_as_with_trl_and_no_more(data, tmp_path):
    changed = []
    for trainer_class, config_class in BOTH:
        arguments = config_class(**settings(tmp_path, accelerator_config={"dispatch_batches": True}))
        before = dict(vars(arguments))
        rows = documents() if data == "rows" else documents().to_iterable_dataset()
        run = trainer_class(tiny(), arguments, train_dataset=rows, processing_class=tokenizer())
        assert run.args is arguments
        names = {name for name, value in vars(arguments).items() if name not in before or before[name] != value}
        changed.append((names, arguments.accelerator_config.dispatch_batches))
    assert changed[0] == changed[1] and changed[0][1] is (data == "rows")


def test_what_a_tokenizer_adds_to_a_view_stays_out_of_the_users_arguments(tmp_path):
    arguments = RopeSFTConfig(
        **settings(
            tmp_path, view="endprompt", view_args={"target": 64}, cue="w3 w4", max_length=32, long_documents="split"
        )
    )
    run = RopeSFTTrainer(tiny(), arguments, train_dataset=documents(), processing_class=tokenizer())
    assert arguments.view_args == {"target": 64} and run.args.view_args == {"target": 64, "cue_tokens": 2}


def test_packing_without_a_length_is_refused_as_by_trl(tmp_path):
    given = settings(tmp_path, packing=True, max_length=None)
    for kind in (RopeSFTConfig, lambda **options: RopeSFTConfig.of(SFTConfig(**options))):
        with pytest.raises(ValueError, match="needs rows of one length, got max_length=None"):
            kind(**given)


class Overflow(TrainerCallback):
    """Makes the loss of some optimizer steps infinite, as fp16 does where an activation overflows."""

    def __init__(self, model, *steps):
        self.steps, self.now = steps, False
        model.model.norm.register_forward_hook(self.hook)

    def on_step_begin(self, args, state, control, **kwargs):
        self.now = state.global_step in self.steps

    def hook(self, module, args, output=None):
        return output * float("inf") if self.now else None


def scaled(trainer_class, config_class, folder, **options):
    """A run whose gradients are scaled by torch's own scaler, which works on a CPU too."""
    model = tiny()
    run = trainer_class(
        model,
        config_class(**settings(folder, max_steps=4, **options)),
        train_dataset=documents(),
        processing_class=tokenizer(),
        callbacks=[Overflow(model, 0, 2)],
    )
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return run


def test_a_step_that_loss_scaling_leaves_out_goes_on_as_with_trl(tmp_path, caplog):
    stock, ours = (after(scaled(*kind, tmp_path)) for kind in BOTH)
    assert [entry["loss"] for entry in stock[0]] == [entry["loss"] for entry in ours[0]]
    assert all(torch.equal(stock[1][name], ours[1][name]) for name in stock[1])
    assert all(weight.isfinite().all() for weight in ours[1].values())
    told = [record.message for record in caplog.records if "fp16 has overflowed" in record.message]
    assert [f"at optimizer step {step}:" in message for step, message in zip((0, 2), told, strict=True)] == [True, True]


class OwnLoss(RopeSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return own_loss(model(**inputs), labels)


@pytest.mark.parametrize("trainer_class", [RopeSFTTrainer, OwnLoss])
def test_a_loss_that_is_not_finite_stops_a_run_without_loss_scaling(trainer_class, tmp_path):
    model = tiny()
    run = trainer_class(
        model,
        RopeSFTConfig(**settings(tmp_path)),
        train_dataset=documents(),
        processing_class=tokenizer(),
        callbacks=[Overflow(model, 1)],
    )
    before = None

    class Weights(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            nonlocal before
            before = [weight.detach().clone() for weight in model.parameters()]

    run.add_callback(Weights())
    with pytest.raises(FloatingPointError, match="the loss became nan at optimizer step 1"):
        run.train()
    assert all(torch.equal(was, is_) for was, is_ in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
def test_fp16_that_overflows_goes_on_as_with_trl(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of several TRL's trainer wants one process each
    runs = []
    for trainer_class, config_class in BOTH:
        model = tiny()
        run = trainer_class(
            model,
            config_class(**settings(tmp_path, max_steps=5, use_cpu=False, fp16=True)),
            train_dataset=documents(),
            processing_class=tokenizer(),
            callbacks=[Overflow(model, 1, 3)],
        )
        assert run.accelerator.scaler is not None
        runs.append(after(run))
    assert [entry["loss"] for entry in runs[0][0]] == [entry["loss"] for entry in runs[1][0]]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def words(n=24):
    return Dataset.from_dict({"text": [f"w{i} w{i + 3} w{i + 5} w{i + 7}" for i in range(5, 5 + n)]})


def total_logits(prediction):
    return {"total": float(prediction.predictions.sum())}


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def sgd(run_options):
    optimizer = torch.optim.SGD(run_options["model"].parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


OPTIONS = {
    "compute_loss_func": lambda _: {"compute_loss_func": own_loss},
    "metrics": lambda _: {
        "compute_metrics": total_logits,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    },
    "formatting": lambda _: {"train_dataset": words(), "formatting_func": lambda row: row["text"] + " w9"},
    "optimizers": lambda options: {"optimizers": sgd(options)},
    "optimizer-class": lambda _: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_trls_trainer_takes_besides_does_the_same(name, tmp_path):
    runs = []
    for trainer_class, config_class in BOTH:
        torch.manual_seed(0)
        options = {
            "model": tiny(),
            "args": config_class(**settings(tmp_path)),
            "train_dataset": documents(),
            "eval_dataset": {"one": documents(3, seed=1), "two": documents(2, seed=2)},
            "processing_class": tokenizer(),
        }
        run = trainer_class(**{**options, **OPTIONS[name](options)})
        result = after(run)
        runs.append(
            (
                *result,
                quiet(run.evaluate()),
                run._signature_columns,
                type(run.optimizer),
                run.model_wrapped is run.model,
            )
        )
    same(*runs)
    assert runs[0][2:] == runs[1][2:]


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "self-distill", "view": "skip"},
        {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 1.0}},
        {"objective": "hidden-distill", "rescale": "pi", "rescale_args": {"factor": 1.0}},
        {"objective": "native-distill", "view": "skip"},
        {"objective_args": {"longce": {"short_context": 4}}},
    ],
    ids=lambda options: options.get("objective", "longce"),
)
def test_metrics_and_predictions_of_objectives_are_those_of_the_same_weights(options, tmp_path):
    seen = []
    for trainer_class, given in (
        (SFTTrainer, SFTConfig(**settings(tmp_path))),
        (RopeSFTTrainer, RopeSFTConfig(**settings(tmp_path, **options))),
    ):
        run = trainer_class(
            tiny(),
            given,
            train_dataset=documents(),
            eval_dataset=documents(3, seed=1),
            processing_class=tokenizer(),
            compute_metrics=total_logits,
        )
        predicted = run.predict(run.eval_dataset)
        seen.append((run.evaluate()["eval_total"], predicted.predictions, predicted.label_ids))
    stock, ours = seen
    assert ours[0] == stock[0] and all(np.array_equal(a, b) for a, b in zip(stock[1:], ours[1:], strict=True))


@pytest.mark.parametrize("view", [{}, {"view": "skip", "view_args": {"skip": 40}}], ids=["standard", "skip"])
def test_a_compute_loss_of_ones_own_runs_under_the_view(view, tmp_path):
    """It gets what TRL's collator makes and nothing else, and forwards draw by step and document all the same."""

    class Own(RopeSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert set(inputs) == {"input_ids", "labels", "attention_mask"}
            labels = inputs.pop("labels")
            loss = own_loss(model(**inputs), labels)
            return (loss, None) if return_outputs else loss

    losses, drawn = [], []
    for trainer_class in (Own, RopeSFTTrainer):
        run = trainer_class(
            tiny(),
            RopeSFTConfig(**settings(tmp_path, **view)),
            train_dataset=documents(),
            eval_dataset=documents(3, seed=1),
            processing_class=tokenizer(),
        )
        run.train()
        losses.append([*(entry["loss"] for entry in logged(run, "loss")), run.evaluate()["eval_loss"]])
        drawn.append(logged(run, "view/"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert drawn[0] == drawn[1] and bool(drawn[0][0]) is bool(view)
