"""What an extension does where its user did not say: docs/choosing.md and research/results/keeping.md as code."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rope_patch import patch_model
from rope_patch.eval.measures.prompt_grid import DEPTHS
from rope_patch.eval.results.paired import MIN_DIFFERENT
from rope_patch.methods import resolve_rescaling
from rope_patch.rescalings import RESCALINGS

from ..memory.step import Memory, Step, peak_memory
from ..rows.mix import rows_by_kind
from .facts import ModelFacts
from .machine import GIB, Machine
from .options import FACTS, ROWS_PER_STEP, ExtendOptions

Basis = Literal["measured", "not measured", "asked for"]

_MEASURED_MODEL = "llama", 135e6  # type and parameters of the model that the rate of 3e-4 was measured on
_SAME_SIZE = 0.1  # share of these by which a model may differ and have its rate
_RATE, _CAREFUL_RATE = 3e-4, 2e-5
_UNTAUGHT_RATE = 1e-4  # of SmolLM2-135M without a teacher: replies at 3e-4 moved further from its own
_LORA_RATES = 10, 1e-3  # times the rate of all weights, and at most: at 3e-3 SmolLM2-135M lost short text
_ROWS = 256
_LONGEST_ROW = 32768  # 256 longer ones are more than 8M tokens
_OWN_TOKENS = 100_000  # 420 chats were measured, of 95 thousand tokens
_FREE = 0.9  # of free memory that a step may take
_EVAL = {"cuda": (40, 4), "cpu": (10, 1)}  # prompts a length, rows of the target's length


@dataclass(frozen=True)
class Choice:
    """One decision.

    Args:
        name: what is decided.
        value: what it is, as JSON values.
        said: the value in words.
        reason: why.
        basis: whether the reason was measured, on `SmolLM2-135M-Instruct` unless it says more.
        flag: of the command line, that changes it.
    """

    name: str
    value: Any
    said: str
    reason: str
    basis: Basis
    flag: str

    def __str__(self) -> str:
        return f"{self.name}: {self.explained}"

    @property
    def explained(self) -> str:
        """The value with its reason, for where the name stands beside it."""
        return f"{self.said}. {self.reason} [{self.basis}; {self.flag}]"


@dataclass(frozen=True)
class Choices:
    """All decisions of one extension.

    Args:
        rescaling: {"rescale", "rescale_args"} of RopeSFTConfig.
        view: {"view", "view_args"}.
        objective: {"objective", "objective_args"}.
        rows: what `trl_ext.rows.make_rows` is given, and own_tokens.
        weights: {"train", "lora_rank", "gradient_checkpointing"}.
        rate: peak learning rate.
        precision: "bf16" or "float32".
        evaluation: {"measures", "prompts", "lengths", "n_rows"}.
    """

    rescaling: Choice
    view: Choice
    objective: Choice
    rows: Choice
    weights: Choice
    rate: Choice
    precision: Choice
    evaluation: Choice

    @property
    def all(self) -> list[Choice]:
        """In the order in which they are made."""
        return list(vars(self).values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Choices":
        """What `to_dict` wrote."""
        return cls(**{name: Choice(**choice) for name, choice in values.items()})

    def step(self, device: str) -> Step:
        """A step of this training, as far as memory goes."""
        weights = self.weights.value
        return _step(
            weights["train"],
            weights["gradient_checkpointing"],
            weights["lora_rank"],
            self.objective.value,
            self.precision.value,
            self.rows.value["length"],
            device,
        )


def _step(
    train: str,
    checkpointing: bool,
    lora_rank: int,
    objective: dict[str, Any],
    precision: str,
    row_length: int,
    device: str,
) -> Step:
    return Step(
        train=train,
        lora_rank=lora_rank,
        row_length=row_length,
        autocast=precision == "bf16",
        checkpointing=checkpointing,
        teacher=_teaches(objective),
        own_loss=objective["objective"] == "native-distill" or bool(objective["objective_args"]),
        weight_bytes=2 if train == "lora" and precision == "bf16" else 4,
        device=device,
    )


def _teaches(objective: dict[str, Any]) -> bool:
    """Whether the model as it came is read in training."""
    return objective["objective"] == "native-distill" and objective["objective_args"]["weight"] != 0


def choose(facts: ModelFacts, options: ExtendOptions, machine: Machine) -> Choices:
    """Every decision, those of the user first.

    Raises:
        ValueError: what is asked for does not fit the model or the machine, or nothing does.
    """
    rescaling, view = _rescaling(facts, options), _view(facts, options)
    objective, precision = _objective(facts, options), _precision(options, machine)
    rows = _rows(facts, options, objective.value)
    weights = _weights(facts, options, machine, objective, precision, rows)
    return Choices(
        rescaling=rescaling,
        view=view,
        objective=objective,
        rows=rows,
        weights=weights,
        rate=_rate(facts, options, weights.value["train"], objective.value),
        precision=precision,
        evaluation=_evaluation(facts, options, machine),
    )


def _rescaling(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--rescale, --rescale-args"
    if options.rescale is not None:
        args = options.rescale_args or {}
        reason = _why_not(facts, options, options.rescale, args)
        if reason is not None:
            raise ValueError(f"--rescale {options.rescale}: {reason}")
        value = {"rescale": options.rescale, "rescale_args": args}
        return Choice(
            "rescaling", value, f"{options.rescale} {args or ''}".strip(), "You asked for it.", "asked for", flag
        )
    times = options.to / facts.window
    refused: list[str] = []
    for method, reason in (
        (
            "ntk",
            "It loses least of what the model could do within its window, and no rescaling is read right by more "
            "programs. With a factor of twice the windows in the target it reads to the end, with once it did not",
        ),
        (
            "yarn",
            "It reaches as far without training as with much of it, but loses more within the window than NTK, which "
            "this model does not take",
        ),
    ):
        factor = RESCALINGS[method].factor_per_window * times
        args = {"factor": factor}
        why = _why_not(facts, options, method, args)
        if why is None:
            measured = method == "ntk" and times == 8
            beside = "" if measured else f"; measured for 8 times the window, and this is {times:.3g} times"
            note = f" (NTK is refused: {refused[0].rstrip('.')})" if refused else ""
            value = {"rescale": method, "rescale_args": args}
            basis: Basis = "measured" if measured else "not measured"
            return Choice("rescaling", value, f"{method} by {factor:g}", f"{reason}{note}{beside}.", basis, flag)
        refused.append(why)
    raise ValueError(f"no rescaling fits this model: {' '.join(refused)} --rescale names another.")


def _why_not(facts: ModelFacts, options: ExtendOptions, method: str, args: dict[str, Any]) -> str | None:
    """Why a rescaling cannot take the model to the target, or a target program would serve it wrong; None if it can."""
    from rope_patch.export import require_served

    twin = facts.twin()
    try:
        rescaling = resolve_rescaling(method, args)
        patch_model(twin, rescaling)
        for target in options.targets:
            require_served(target, twin)
    except ValueError as error:
        return str(error)
    reached = rescaling.target_window(facts.window)
    if reached is not None and reached < options.to:
        return f"its window is {reached} positions, and --to asks for {options.to}: give it a larger factor."
    return None


def _view(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--view, --view-args"
    if options.view is not None:
        value = {"view": options.view, "view_args": options.view_args or {}}
        said = f"{options.view} {options.view_args or ''}".strip()
        return Choice("positions", value, said, "You asked for it.", "asked for", flag)
    if "views" in facts.missing:
        raise ValueError(
            f"rows of this model cannot be shown as parts of longer ones: {facts.missing['views'].rstrip('.')}. Train "
            f"on rows of the target's length: --view standard --objective clm --row-length {options.to}."
        )
    views = ["standard", {"view": "pose", "target": options.to, "chunks": 4}]
    return Choice(
        "positions",
        {"view": "mix", "view_args": {"views": views}},
        f"half of the rows as they are, half in four pieces with gaps between their positions, up to {options.to:,}",
        "Rows as short as the window teach positions up to the target, and those without gaps keep what is near.",
        "measured",
        flag,
    )


def _objective(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--objective, --objective-args"
    keep = {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3}
    if options.objective is not None:
        args = {**(keep if options.objective == "native-distill" else {}), **(options.objective_args or {})}
        said = f"{options.objective} {options.objective_args or ''}".strip()
        value = {"objective": options.objective, "objective_args": args}
        return Choice("objective", value, said, "You asked for it.", "asked for", flag)
    reason = facts.missing.get("self-distillation")
    if reason is not None:
        return Choice(
            "objective",
            {"objective": "clm", "objective_args": {}},
            "next-token loss of all tokens",
            "Answers weigh little in it: in one seed SmolLM2-135M wrote .54 of the passkeys at 60000 tokens, and .88 "
            f"with a teacher and answers weighed. Neither is possible here: {reason}",
            "measured",
            flag,
        )
    return Choice(
        "objective",
        {"objective": "native-distill", "objective_args": keep},
        "the model as it came teaches every token; answers, and more lightly all text, have a next-token loss beside",
        "It keeps the way in which the model speaks: .13 nats from what it said, without a teacher .77. At least as "
        "many far answers are found without one: --objective native-distill --objective-args '{\"weight\": 0}'.",
        "measured",
        flag,
    )


def _precision(options: ExtendOptions, machine: Machine) -> Choice:
    if options.precision is not None:
        return Choice(
            "precision", options.precision, options.precision, "You asked for it.", "asked for", "--precision"
        )
    if machine.bf16:
        return Choice(
            "precision",
            "bf16",
            "products in bfloat16, trained weights in float32",
            "Weights of 16 bits would round small steps away.",
            "measured",
            "--precision",
        )
    why = "A CPU is not faster in 16 bits." if machine.device == "cpu" else "This GPU has no fast bfloat16."
    return Choice("precision", "float32", "float32", why, "not measured", "--precision")


def _rows(facts: ModelFacts, options: ExtendOptions, objective: dict[str, Any]) -> Choice:
    own = "chats" if facts.is_chat else "own_texts"
    length = options.row_length or min(facts.window, _LONGEST_ROW)
    if _teaches(objective) and length > facts.window:
        raise ValueError(
            f"--row-length must be at most the window of {facts.window}, within which the teacher predicts, got "
            f"{length}. Without a teacher, --objective native-distill --objective-args '{{\"weight\": 0}}', rows may "
            "be longer."
        )
    if length > options.to:
        raise ValueError(f"--row-length must be at most --to, {options.to}, got {length}.")
    count = options.rows or _ROWS
    weights = dict(options.shares or {"text": 1.0, own: 1.0, "questions": 1.0})
    rows_of = rows_by_kind(count, weights)
    shares = {kind: weight for kind, weight in weights.items() if kind in rows_of}  # a weight of 0 asks for no rows
    if "chats" in shares and not facts.is_chat:
        raise ValueError("--shares: a model without a chat template writes no chats. Take own_texts in their place.")
    short = 0.25 if options.short is None else options.short
    value = {
        "n": count,
        "length": length,
        "shares": shares,
        "short": short,
        "facts": options.facts,
        "label_all": objective["objective"] == "clm",
        "own_tokens": options.own_tokens or _OWN_TOKENS,
    }
    given = (options.rows, options.row_length, options.shares, options.short, options.own_tokens)
    asked = options.facts != FACTS or any(value is not None for value in given)
    parts = ", ".join(_ROWS_OF[kind] for kind in shares)
    reason = (
        "You asked for other rows than those that were measured: 256 of the window, a third of each kind."
        if asked
        else "What is trained on decides what is kept: texts keep reading, its own words keep its way of speaking, "
        "questions teach to find what is far."
    )
    if options.facts != FACTS and "questions" not in shares:
        reason += " --facts is not needed: no questions."
    if options.own_tokens is not None and not {"chats", "own_texts"} & shares.keys():
        reason += " --own-tokens is not needed: the model writes none of the rows."
    measured = not asked and length == facts.window and facts.is_chat
    return Choice(
        "rows",
        value,
        f"{count} of {length:,} tokens: {parts}{_short_said(short)}",
        reason,
        "asked for" if asked else "measured" if measured else "not measured",
        "--rows, --row-length, --shares, --short, --facts, --own-tokens",
    )


def _short_said(share: float) -> str:
    return f"; {'a quarter' if share == 0.25 else f'{100 * share:.0f} %'} of them as eight short ones" if share else ""


def _weights(
    facts: ModelFacts, options: ExtendOptions, machine: Machine, objective: Choice, precision: Choice, rows: Choice
) -> Choice:
    """The first way to train that fits: all weights, then q, k and v, then adapters, without checkpointing first."""
    flag = "--train, --lora-rank, --gradient-checkpointing"
    trains = ["all", "qkv", "lora"] if options.train is None else [options.train]
    if not facts.size.qkv and options.train is None:
        trains.remove("qkv")
    shared_teacher = not _teaches(objective.value) or "native_rope" not in facts.missing
    if not shared_teacher and options.train is None:
        trains.remove("lora")
    on_off = [False, True] if options.gradient_checkpointing is None else [options.gradient_checkpointing]
    if "gradient checkpointing" in facts.missing:
        if options.gradient_checkpointing:
            raise ValueError(f"--gradient-checkpointing: {facts.missing['gradient checkpointing']}")
        on_off = [False]
    needs = []
    for train in trains:
        for checkpointing in on_off:
            step = _step(
                train,
                checkpointing,
                options.adapter_rank,
                objective.value,
                precision.value,
                rows.value["length"],
                machine.device,
            )
            needed = peak_memory(facts.size, step)
            needs.append((train, checkpointing, needed))
            if needed.total <= _FREE * machine.memory:
                return _explained(options, machine, needs, flag)
    train, _, least = min(needs, key=lambda way: way[2].total)
    raise ValueError(
        f"training does not fit: rows of {rows.value['length']:,} tokens need {least.total / GIB:.1f} GiB at least "
        f"({train}), and {_FREE * machine.memory / GIB:.1f} of {machine.memory / GIB:.1f} GiB may be taken on "
        f"{machine.name}. Give a smaller --row-length, or use a larger machine."
    )


_ROWS_OF = {
    "text": "your texts",
    "chats": "chats that it writes itself",
    "own_texts": "texts that it writes itself",
    "questions": "questions about facts hidden in your texts",
}
_SAID = {
    "all": "all weights",
    "qkv": "the projections to queries, keys and values",
    "lora": "adapters on the attention projections (LoRA)",
}


def _explained(options: ExtendOptions, machine: Machine, needs: list[tuple[str, bool, Memory]], flag: str) -> Choice:
    train, checkpointing, needed = needs[-1]
    rank = f" of rank {options.adapter_rank}" if train == "lora" else ""
    again = ", activations computed again in backward (gradient checkpointing)" if checkpointing else ""
    value = {"train": train, "lora_rank": options.adapter_rank, "gradient_checkpointing": checkpointing}
    room = f"{needed.total / GIB:.1f} of {machine.memory / GIB:.1f} GiB"
    unused = "" if options.lora_rank is None or train == "lora" else " --lora-rank is not needed: no adapters."
    if options.train is not None:
        return Choice(
            "weights",
            value,
            f"{_SAID[train]}{rank}{again}",
            f"You asked for it. A step takes {room}.",
            "asked for",
            flag,
        )
    if train == "all":
        reason = f"They fit: a step takes {room}.{unused}"
        return Choice("weights", value, f"{_SAID[train]}{again}", reason, "measured", flag)
    before = ", ".join(
        f"{_SAID[name]} would take {memory.total / GIB:.1f} GiB"
        for name, is_on, memory in needs[:-1]
        if name != train and is_on == needs[-2][1]
    )
    return Choice(
        "weights",
        value,
        f"{_SAID[train]}{rank}{again}",
        f"{before[:1].upper()}{before[1:]}, and a step so takes {room}. In one seed on SmolLM2-135M q, k and v "
        f"alone found fewer numbers far away than all weights, adapters on all matrices as many.{unused}",
        "not measured",
        flag,
    )


def _rate(facts: ModelFacts, options: ExtendOptions, train: str, objective: dict[str, Any]) -> Choice:
    if options.learning_rate is not None:
        said = f"{options.learning_rate:.2g}"
        return Choice("rate", options.learning_rate, said, "You asked for it.", "asked for", "--learning-rate")
    kind, parameters = facts.config.get_text_config(decoder=True).model_type, facts.size.parameters
    known = kind == _MEASURED_MODEL[0] and abs(parameters / _MEASURED_MODEL[1] - 1) < _SAME_SIZE
    measured = known and train != "lora" and options.rows_per_step == ROWS_PER_STEP
    if known and objective["objective"] == "native-distill" and not _teaches(objective):
        rate = _UNTAUGHT_RATE
        reason = "The rate that was measured without a teacher, for SmolLM2-135M, on twice as many rows"
    elif known:
        rate = _RATE
        reason = "The rate that was measured, for SmolLM2-135M" + (", in one seed" if train == "qkv" else "")
    else:
        rate = _CAREFUL_RATE
        reason = (
            f"The rate at which Gemma-3-270M stayed close to what it was, in three seeds: {_RATE:g}, which "
            "SmolLM2-135M took, broke that model. A higher one may teach more"
        )
    if known and options.rows_per_step != ROWS_PER_STEP:
        reason += f". That was with {ROWS_PER_STEP} rows a step, not {options.rows_per_step}"
    if train == "lora":
        times, most = _LORA_RATES
        rate = min(times * rate, most)
        reason += (
            f". For adapters it is {times} times that, at most {most:g} (arXiv:2405.09673 has such a ratio), at which "
            "SmolLM2-135M with adapters on all matrices, not on attention alone, found as many numbers in three seeds"
        )
    rate = float(f"{rate:.1g}")
    return Choice(
        "rate", rate, f"{rate:.0e}", f"{reason}.", "measured" if measured else "not measured", "--learning-rate"
    )


def _evaluation(facts: ModelFacts, options: ExtendOptions, machine: Machine) -> Choice:
    prompts, n_rows = _EVAL[machine.device]
    window, to = facts.window, options.to
    if machine.device == "cuda":
        lengths = sorted(
            {window >> k for k in range(1, 4)} | {window << k for k in range(20) if window << k < to} | {to}
        )
    else:
        lengths = [window // 4, window, to]
    lengths = list(dict.fromkeys(options.lengths)) or lengths  # one that is named twice would be asked and count twice
    wanted = options.prompts or prompts
    prompts = _of_depths(wanted)
    asked = bool(options.lengths or options.prompts)
    keys = " and as many for one among look-alikes" if machine.device == "cuda" else ""
    at = ", ".join(f"{n:,}" for n in lengths)
    said = (
        f"loss on {n_rows} held-out row{'s' * (n_rows > 1)} of {to:,} tokens; in texts of {at} tokens, {prompts} "
        f"question{'s' * (prompts > 1)} each for a hidden number (passkey){keys}, as the model writes the answers"
    )
    reason = (
        "You asked for it."
        if asked
        else "What was lost shows within the window, what was won beyond it; on a GPU there is time for more."
    )
    if prompts > wanted:
        reason += f" {wanted} prompts are made {prompts}, as many at each of {len(DEPTHS)} depths."
    if prompts < MIN_DIFFERENT:
        reason += " So few prompts are examples only, and count neither as won nor as lost."
    elif prompts < 40:
        reason += " So few prompts show large changes only."
    measures = ["cliff", "passkey", *(["niah-multikey"] if machine.device == "cuda" else [])]
    value = {"measures": measures, "prompts": prompts, "lengths": lengths, "n_rows": n_rows}
    return Choice("measuring", value, said, reason, "asked for" if asked else "not measured", "--prompts, --lengths")


def _of_depths(prompts: int) -> int:
    """As many prompts, or the next number that spreads alike over all depths; fewer than these have some of them."""
    return prompts if prompts < len(DEPTHS) else -(-prompts // len(DEPTHS)) * len(DEPTHS)
