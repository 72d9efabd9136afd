"""The arms of research/experiments/restoration.py: LinearARD, what its paper compares it with, variants and controls."""

from dataclasses import dataclass
from typing import Any, Literal

from peft import LoraConfig

# LinearARD's stages, as examples/papers/linearard has them; the optimiser is that of the authors' code
_OPTIMISER: dict[str, Any] = {
    "trainable": "qkv",
    "learning_rate": 2e-5,
    "weight_decay": 0.01,
    "warmup_steps": 4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.9},
    "max_grad_norm": 5.0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "save_strategy": "steps",
    "save_steps": 50,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}
DISTIL = {**_OPTIMISER, "objective": "relation-distill", "max_length": 4096, "max_steps": 144}
EXTEND = {**_OPTIMISER, "objective": "clm", "max_length": 32768, "max_steps": 16}

Stage = Literal["distil", "extend"] | None  # None: as it is, rescaled or native


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    Args:
        rescale: (name, options), None for the model as it is.
        distil: fields that differ from the authors' stage 1, None to leave it out.
        extend: fields that differ from the authors' stage 2, None to leave it out.
        lora: rank of adapters on q, k and v in both stages, with twice it as alpha; None to train weights themselves.
        dropout: of the adapters.
        trainable: which weights stage 1 trains without adapters.
        extended: which weights stage 2 trains without adapters; the paper those of q, k and v, what research/results has
            from before all.
    """

    rescale: tuple[str, dict[str, Any]] | None
    distil: dict[str, Any] | None = None
    extend: dict[str, Any] | None = None
    lora: int | None = None
    dropout: float = 0.0
    trainable: str = "qkv"
    extended: str = "all"

    @property
    def stages(self) -> list[Stage]:
        """Those that train, in their order; None alone where none does."""
        trained: list[Stage] = [
            s for s, fields in (("distil", self.distil), ("extend", self.extend)) if fields is not None
        ]
        return trained or [None]

    def fields(self, stage: Stage) -> dict[str, Any]:
        """Fields of RopeSFTConfig of a stage that trains."""
        own, authors = (self.distil, {**DISTIL, **AT_ONCE}) if stage == "distil" else (self.extend, EXTEND)
        assert own is not None
        # adapters are all that is trained where there are some
        weights = "all" if self.lora is not None else self.trainable if stage == "distil" else self.extended
        return {**authors, "logging_steps": 8, "trainable": weights, **own}

    def adapters(self) -> LoraConfig | None:
        """Those that its first stage begins with."""
        if self.lora is None:
            return None
        return LoraConfig(
            r=self.lora,
            lora_alpha=2 * self.lora,
            lora_dropout=self.dropout,
            target_modules=["q_proj", "k_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )


WINDOW = 8192  # of the model that the authors' rows of stage 2 are four windows of
PI4, PI8, YARN4 = ("pi", {"factor": 4.0}), ("pi", {"factor": 8.0}), ("yarn", {"factor": 4.0})
# ours, of the weights of q, k and v: 1e-3 did best of three in a draft of stage 1, 2e-4 was not compared with others.
# The authors take 2e-5 in both stages, for adapters of rank 1024.
DISTIL_LR, EXTEND_LR = {"learning_rate": 1e-3}, {"learning_rate": 2e-4}
# as many tokens of next-token training as both stages have together
EQUAL = {"max_steps": 34}
# the rows of a step of stage 1 together and without checkpointing: the same batch in fewer launches
AT_ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}
ATTENTION: dict[str, Any] = {"objective_args": {"q": 0.0, "k": 0.0, "attention": 1.0}}
LOGITS: dict[str, Any] = {"objective_args": {"logit_kl": {"weight": 1.0}}}
# what did better than the paper's form, together
BETTER = {"objective_args": {**ATTENTION["objective_args"], **LOGITS["objective_args"]}}
# the logit KL beside relations in the log, without a part in the loss: the paper's Fig. 4
MONITORED: dict[str, Any] = {"objective_args": {"logit_kl": {"weight": 0.0}}}
# the paper's regimes: what both stages train
REGIMES: dict[str, dict[str, Any]] = {
    "pi4 qkv": {"extended": "qkv"},
    "pi4 lora 1024/2048": {"lora": 1024, "dropout": 0.05},
}


def paper_arms(n_layers: int, window: int = WINDOW) -> dict[str, Arm]:
    """The paper's fields in both stages, on either weights, and in stage 1 its targets in turn; rates are to be tuned.

    Rows of stage 2 have four windows, and as many tokens together in each step whatever the window is.

    A regime's own name is LinearARD; "clm" has next-token training of the same weights in place of a teacher, and "cpt"
    as many tokens of it in long rows alone.
    """
    every_layer = {"layers": tuple(range(1, n_layers + 1)), "weight": 5.0 * 6 / n_layers}  # as much as of six layers
    firsts: dict[str, dict[str, Any]] = {
        "": MONITORED,
        " attn+v +logit": BETTER,
        " hidden": {"objective": "hidden-distill"},
        " hidden all": {"objective": "hidden-distill", "objective_args": every_layer},
        " clm": {"objective": "clm"},
    }
    rows = max(EXTEND["gradient_accumulation_steps"] * WINDOW // window, 1)
    far = {} if window == WINDOW else {"max_length": 4 * window, "gradient_accumulation_steps": rows}
    arms = {}
    for regime, weights in REGIMES.items():
        arms |= {regime + name: Arm(PI4, first, far, **weights) for name, first in firsts.items()}
        arms[f"{regime} cpt"] = Arm(PI4, extend={**far, **EQUAL}, **weights)
    return arms


def control_of(name: str) -> str | None:
    """Next-token training of the same weights, with which an arm of the paper's regimes is compared."""
    regime = next((regime for regime in REGIMES if name.startswith(regime)), None)
    return None if regime is None or name not in paper_arms(1) else f"{regime} clm"


def arms(n_layers: int = 30, window: int = WINDOW) -> dict[str, Arm]:
    """Every arm by name, for a model of so many layers; SmolLM2-135M has 30, and a window of 8192."""
    arms = {"native": Arm(None)}
    for name, rescale in (("pi4", PI4), ("pi8", PI8), ("yarn4", YARN4)):
        arms[name] = Arm(rescale)
        arms[f"{name} cpt"] = Arm(rescale, extend={**EXTEND_LR, **EQUAL})
        arms[f"{name} ard+cpt"] = Arm(rescale, DISTIL_LR, EXTEND_LR)
    # every field the paper's, but for all weights
    arms["pi4 all (ours)"] = Arm(PI4, {}, {}, trainable="all")
    arms |= paper_arms(n_layers, window)
    arms["pi4 qkv at our rates"] = Arm(PI4, DISTIL_LR, EXTEND_LR, extended="qkv")
    # the name in research/results of the authors' rate on other weights than theirs: q, k and v, then all
    arms["pi4 ard+cpt as the authors"] = Arm(PI4, {}, {})
    for lr in (2e-5, 1e-3):
        arms[f"pi4 cpt lr {lr:g}"] = Arm(PI4, extend={"learning_rate": lr, **EQUAL})
    # the control with the tokens, rows and stages of LinearARD: next-token training in place of distillation
    control = {"objective": "clm", "learning_rate": 5e-4}
    for lr in (2e-4, 5e-4, 1e-3):
        arms[f"pi4 clm {lr:g}+cpt"] = Arm(PI4, {**control, "learning_rate": lr}, EXTEND_LR, trainable="all")
    # the same on the weights that LinearARD trains
    arms["pi4 clm qkv 0.001+cpt"] = Arm(PI4, {**control, "learning_rate": 1e-3}, EXTEND_LR)
    arms["pi8 clm 0.0005+cpt"] = Arm(PI8, control, EXTEND_LR, trainable="all")
    arms["yarn4 clm 0.0005+cpt"] = Arm(YARN4, control, EXTEND_LR, trainable="all")
    # predictions of the native model, in all rows, beside the next-token loss: the same stage with another target
    for weight in (1.0, 10.0):
        native = {
            "objective": "self-distill",
            "objective_args": {"kl_weight": weight, "teacher": "native", "direction": "forward"},
            "learning_rate": 5e-4,
        }
        arms[f"pi4 native kl {weight:g}+cpt"] = Arm(PI4, native, EXTEND_LR, trainable="all")
        arms[f"pi4 native kl {weight:g} qkv+cpt"] = Arm(PI4, {**native, **DISTIL_LR}, EXTEND_LR)
    for lr in (5e-5, 2e-4, 3e-3):
        arms[f"pi4 ard lr {lr:g}"] = Arm(PI4, {"learning_rate": lr})
    variants: dict[str, dict[str, Any]] = {
        "w/o v": {"objective_args": {"v": 0.0}},
        "attn+v": ATTENTION,
        "+logit": LOGITS,
        "query heads": {"objective_args": {"denominator": "query_heads"}},
        "pre-rope": {"objective_args": {"rope": "pre"}},
        "mse": {"objective_args": {"divergence": "mse"}},
    }
    for name, options in variants.items():
        arms[f"pi4 ard {name}"] = Arm(PI4, {**DISTIL_LR, **options})
    arms["pi4 ard attn+v +logit+cpt"] = Arm(PI4, {**DISTIL_LR, **BETTER}, EXTEND_LR)
    arms["pi4 hidden+cpt"] = Arm(PI4, {**DISTIL_LR, "objective": "hidden-distill"}, EXTEND_LR)
    arms["pi4 ard all weights"] = Arm(PI4, DISTIL_LR, trainable="all")
    arms["pi4 ard lora 64"] = Arm(PI4, DISTIL_LR, lora=64)
    arms["yarn4 ard no factor"] = Arm(YARN4, {**DISTIL_LR, "objective_args": {"strip_attention_factor": True}})
    return arms
