"""The choices of an extension that the user leaves open: docs/choosing.md and research/results/keeping.md as code."""

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any, Literal

from rope_patch import patch_model
from rope_patch.eval.measures.prompt_grid import DEPTHS
from rope_patch.eval.measures.ruler_prompts import SHORTEST_LENGTH
from rope_patch.eval.results.paired import MIN_DIFFERENT
from rope_patch.methods import resolve_rescaling
from rope_patch.rescalings import RESCALINGS

from ..memory.step import Memory, Step, peak_memory
from ..rows.mix import rows_by_kind
from ..rows.row import SKILLS, shares_with
from .facts import ModelFacts
from .machine import GIB, Machine
from .options import ADAPTERS, FACTS, ROWS_PER_STEP, ExtendOptions

Basis = Literal["measured", "not measured", "your choice"]

_MEASURED_MODEL = "llama", 135e6  # type and parameters of the model that the rate of 3e-4 was measured on
_SAME_SIZE = 0.1  # share of these by which a model may differ and have its rate
_RATE, _CAREFUL_RATE = 3e-4, 2e-5
_UNTAUGHT_RATE = 1e-4  # of SmolLM2-135M without a teacher: replies at 3e-4 moved further from its own
_LORA_RATES = 10, 1e-3  # times the rate of all weights, and at most: at 3e-3 SmolLM2-135M lost short text
_ROWS = 288
_LONGEST_ROW = 32768  # as many longer ones are more than 9M tokens
_OWN_TOKENS = 100_000  # 420 chats were measured, of 95 thousand tokens
RULER_TASKS = ("niah_multikey_2", "niah_multivalue", "ruler_vt", "ruler_fwe")
"""Of RULER: retrieval of one value among look-alikes and of several, tracking, aggregation; QA needs data."""
_PROMPTS = {"cuda": 40, "cpu": 10}  # a length
_EVAL_ROWS = 4
_CPU_ROW = 512  # tokens of such a row; two cores read 512 in a second, 12288 in a minute

# the first one that the model supports is taken
_RESCALINGS = {
    "ntk": "It loses least within the original window, and no RoPE scaling is supported by more programs. It reads to "
    "the end with a factor of twice target / window, and did not with that ratio alone",
    "yarn": "It reaches as far, but loses more within the window than NTK, which this model does not support",
}
_KINDS: dict[str, str] = {
    "text": "your texts",
    "chats": "chats that it writes itself",
    "own_texts": "texts that it writes itself",
    "questions": "questions about facts hidden in your texts",
    **dict.fromkeys(SKILLS, "questions that take skills, such as following a chain or counting"),
}
_TRAINED = {
    "all": "all weights",
    "qkv": "the projections to queries, keys and values",
    "lora": "adapters on the attention projections (LoRA)",
    "qlora": "adapters on the attention projections (QLoRA, over weights in 4 bits)",
}


@dataclass(frozen=True)
class Choice:
    """One decision.

    Args:
        name: what is decided.
        value: the decision, as JSON values.
        text: the value in words.
        reason: why.
        basis: whether the reason was measured, on `SmolLM2-135M-Instruct` unless it names another model.
        flag: the flags that change it; "" if none does.
    """

    name: str
    value: Any
    text: str
    reason: str
    basis: Basis
    flag: str

    def __str__(self) -> str:
        return f"{self.name}: {self.explained}"

    @property
    def explained(self) -> str:
        """The value with its reason, without the name."""
        basis = "measured by us on SmolLM2" if self.basis == "measured" else self.basis
        how = f"{basis}; {self.flag}" if self.flag else basis
        return f"{self.text}.{f' {self.reason}' if self.reason else ''} [{how}]"


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
        precision: "bf16" or "float32", of matrix products in training.
        evaluation: {"measures", "prompts", "lengths", "ruler_tasks", "ruler_lengths", "ruler_samples", "n_rows",
            "row_length"}.
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
        """The choices that `to_dict` wrote."""
        return cls(**{name: Choice(**choice) for name, choice in values.items()})

    def step(self, device: str) -> Step:
        """A step of this training, for estimates of its memory."""
        length = self.rows.value["length"]
        return _step(self.weights.value, self.objective.value, self.precision.value, length, device)


def _step(weights: dict[str, Any], objective: dict[str, Any], precision: str, row_length: int, device: str) -> Step:
    autocast = precision == "bf16"
    has_adapters = weights["train"] in ADAPTERS
    return Step(
        train="lora" if has_adapters else weights["train"],
        lora_rank=weights["lora_rank"],
        row_length=row_length,
        autocast=autocast,
        checkpointing=weights["gradient_checkpointing"],
        teacher=_teaches(objective),
        own_loss=objective["objective"] == "native-distill" or bool(objective["objective_args"]),
        weight_bytes=2 if has_adapters and autocast else 4,
        device=device,
        in_4_bits=weights["train"] == "qlora",
    )


def _teaches(objective: dict[str, Any]) -> bool:
    """Whether the original model teaches."""
    return objective["objective"] == "native-distill" and objective["objective_args"]["weight"] != 0


def choose(facts: ModelFacts, options: ExtendOptions, machine: Machine) -> Choices:
    """Make every decision; options of the user win.

    Raises:
        ValueError: an option, or every possible choice, does not fit the model. That no way to train fits the memory
            is no error here.
    """
    rescaling, view = _rescaling(facts, options), _view(facts, options)
    objective, precision = _objective(facts, options), _precision(machine)
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


def _yours(name: str, value: Any, text: str, flag: str, reason: str = "") -> Choice:
    """A choice that the user has made."""
    return Choice(name, value, text.strip(), reason, "your choice", flag)


def _rescaling(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--rescale, --rescale-args"
    if options.rescale is not None:
        args = options.rescale_args or {}
        reason = _why_not(facts, options, options.rescale, args)
        if reason is not None:
            raise ValueError(f"--rescale {options.rescale}: {reason}")
        value = {"rescale": options.rescale, "rescale_args": args}
        return _yours("rescaling", value, f"{options.rescale} {args or ''}", flag)
    times, refused = options.to / facts.window, ""  # "": why the methods tried so far do not work
    for method, reason in _RESCALINGS.items():
        args = {"factor": RESCALINGS[method].factor_per_window * times}
        why = _why_not(facts, options, method, args)
        if why is not None:
            refused += f"{why} "
            continue
        measured = method == "ntk" and times == 8
        beside = "" if measured else f"; measured for 8 times the window, and this is {times:.3g} times"
        note = f" (NTK is refused: {refused.rstrip('. ')})" if refused else ""
        value = {"rescale": method, "rescale_args": args}
        text = f"{method} by {args['factor']:g}"
        return Choice("rescaling", value, text, f"{reason}{note}{beside}.", _basis(measured), flag)
    raise ValueError(f"no RoPE scaling fits this model: {refused}--rescale sets another.")


def _basis(measured: bool) -> Basis:
    return "measured" if measured else "not measured"


def _why_not(facts: ModelFacts, options: ExtendOptions, method: str, args: dict[str, Any]) -> str | None:
    """Why a rescaling does not reach the target, or a target program would serve it wrong; None if it works."""
    from rope_patch.export import require_served

    twin = facts.twin()  # a new one for each method, as it is patched
    try:
        rescaling = resolve_rescaling(method, args)
        patch_model(twin, rescaling)
        for target in options.targets:
            require_served(target, twin)
    except ValueError as error:
        return str(error)
    reached = rescaling.target_window(facts.window)
    if reached is not None and reached < options.to:
        return f"its window is {reached} positions, and --to is {options.to}: give it a larger factor."
    return None


def _view(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--view, --view-args"
    if options.view is not None:
        value = {"view": options.view, "view_args": options.view_args or {}}
        return _yours("positions", value, f"{options.view} {options.view_args or ''}", flag)
    if "views" in facts.missing:
        raise ValueError(
            f"views cannot shift the position IDs of this model: {facts.missing['views'].rstrip('.')}. Train on rows "
            f"of the target's length: --view standard --objective clm --row-length {options.to}."
        )
    views = ["standard", {"view": "pose", "target": options.to, "chunks": 4}]
    return Choice(
        "positions",
        {"view": "mix", "view_args": {"views": views}},
        f"half of the rows with their own position IDs, half in four pieces with gaps between, up to {options.to:,}",
        "Gaps teach positions up to the target, and rows without gaps keep short contexts.",
        "measured",
        flag,
    )


def _objective(facts: ModelFacts, options: ExtendOptions) -> Choice:
    flag = "--objective, --objective-args"
    keep = {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3}
    if options.objective is not None:
        args = {**(keep if options.objective == "native-distill" else {}), **(options.objective_args or {})}
        value = {"objective": options.objective, "objective_args": args}
        return _yours("objective", value, f"{options.objective} {options.objective_args or ''}", flag)
    reason = facts.missing.get("self-distillation")
    if reason is not None:
        return Choice(
            "objective",
            {"objective": "clm", "objective_args": {}},
            "next-token loss of all tokens",
            "Answers have little weight in it: SmolLM2-135M found .54 of the passkeys at 60000 tokens, and .88 with a "
            f"teacher and with weighted answers (one seed). This model supports neither: {reason}",
            "measured",
            flag,
        )
    return Choice(
        "objective",
        {"objective": "native-distill", "objective_args": keep},
        "distillation from the original model on all tokens, and a next-token loss of answers and, less, of all text",
        "It keeps the model's wording: the KL from the original is .16 nats, without a teacher .31.",
        "measured",
        flag,
    )


def _precision(machine: Machine) -> Choice:
    if machine.bf16:
        text, reason = "bfloat16 autocast, float32 weights", "Weights of 16 bits would round small steps away."
        return Choice("precision", "bf16", text, reason, "measured", "")
    reason = "A CPU is not faster in 16 bits." if machine.device == "cpu" else "This GPU has no fast bfloat16."
    return Choice("precision", "float32", "float32", reason, "not measured", "")


def _rows(facts: ModelFacts, options: ExtendOptions, objective: dict[str, Any]) -> Choice:
    length = options.row_length or min(facts.window, _LONGEST_ROW)
    if _teaches(objective) and length > facts.window:
        raise ValueError(
            f"--row-length must be at most the context window of {facts.window}, within which the teacher predicts, "
            f"got {length}. Without a teacher, --objective native-distill --objective-args '{{\"weight\": 0}}', rows "
            "may be longer."
        )
    if length > options.to:
        raise ValueError(f"--row-length must be at most --to, {options.to}, got {length}.")
    count = options.rows or _ROWS
    weights = dict(options.shares or shares_with("chats" if facts.is_chat else "own_texts"))
    counts = rows_by_kind(count, weights)
    shares = {kind: weight for kind, weight in weights.items() if kind in counts}  # a weight of 0 gives no rows
    if "chats" in shares and not facts.is_chat:
        raise ValueError("--shares: a model without a chat template writes no chats. Use own_texts instead.")
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
    share = "a quarter" if short == 0.25 else f"{100 * short:.0f} %"
    cut = f"; {share} of them as eight short ones" if short else ""
    kinds = ", ".join(dict.fromkeys(_KINDS[kind] for kind in shares))
    text = f"{count} of {length:,} tokens: {kinds}{cut}"
    flag = "--rows, --row-length, --shares, --short, --facts, --own-tokens"
    set_by_user = (options.rows, options.row_length, options.shares, options.short, options.own_tokens)
    if options.facts == FACTS and all(option is None for option in set_by_user):
        reason = "Texts keep reading, its own words keep its wording, and questions teach to find what is far away."
        return Choice("rows", value, text, reason, _basis(length == facts.window and facts.is_chat), flag)
    return _yours("rows", value, text, flag, f"Measured were {_ROWS} rows of the context window, a third of each kind.")


def _weights(
    facts: ModelFacts, options: ExtendOptions, machine: Machine, objective: Choice, precision: Choice, rows: Choice
) -> Choice:
    """The first way to train that fits: all weights, q, k and v, adapters; each without checkpointing first.

    If none fits one GPU, the one that takes least.
    """
    trains = ["all", "qkv", "lora"] if options.train is None else [options.train]
    if not facts.size.qkv and options.train is None:
        trains.remove("qkv")
    on_off = [False, True] if options.gradient_checkpointing is None else [options.gradient_checkpointing]  # fast first
    if "gradient checkpointing" in facts.missing:
        if options.gradient_checkpointing:
            raise ValueError(f"--gradient-checkpointing: {facts.missing['gradient checkpointing']}")
        on_off = [False]
    length, needs = rows.value["length"], []
    for train, checkpointing in product(trains, on_off):
        value = {"train": train, "lora_rank": options.lora_rank, "gradient_checkpointing": checkpointing}
        needed = peak_memory(facts.size, _step(value, objective.value, precision.value, length, machine.device))
        needs.append((train, checkpointing, needed))
        if needed.total <= machine.room:
            return _weights_choice(options, machine, needs)
    return _weights_choice(options, machine, [min(needs, key=lambda way: way[2].total)])


def _weights_choice(options: ExtendOptions, machine: Machine, needs: list[tuple[str, bool, Memory]]) -> Choice:
    flag = "--train, --lora-rank, --gradient-checkpointing"
    train, checkpointing, needed = needs[-1]
    value = {"train": train, "lora_rank": options.lora_rank, "gradient_checkpointing": checkpointing}
    rank = f" of rank {options.lora_rank}" if train in ADAPTERS else ""
    again = ", with gradient checkpointing" if checkpointing else ""
    text = f"{_TRAINED[train]}{rank}{again}"
    memory = f"A step takes {needed.total / GIB:.1f} of {machine.memory / GIB:.1f} GiB."
    if needed.total > machine.room:
        memory = f"{memory[:-1]}, of which {machine.room / GIB:.1f} may be taken: one GPU is too small."
        memory = memory.replace("one GPU", "this machine") if machine.device == "cpu" else memory
    if train == "qlora":
        memory += " The teacher is in 4 bits too. At the end the adapters are merged into the weights as they came."
    if options.train is not None:
        return _yours("weights", value, text, flag, memory)
    if train == "all":
        return Choice("weights", value, text, f"They fit. {memory}", "measured", flag)
    larger = ", ".join(
        f"{_TRAINED[name]} would take {way.total / GIB:.1f} GiB"
        for name, is_on, way in needs[:-1]
        if name != train and is_on == needs[-2][1]
    )
    larger = f"{larger[:1].upper()}{larger[1:]}. " if larger else ""
    reason = (
        f"{larger}{memory} In one seed on SmolLM2-135M q, k and v alone found fewer numbers far away than all weights, "
        "adapters on all matrices as many."
    )
    return Choice("weights", value, text, reason, "not measured", flag)


def _rate(facts: ModelFacts, options: ExtendOptions, train: str, objective: dict[str, Any]) -> Choice:
    flag = "--learning-rate"
    if options.learning_rate is not None:
        return _yours("rate", options.learning_rate, f"{options.learning_rate:.2g}", flag)
    kind, parameters = facts.config.get_text_config(decoder=True).model_type, facts.size.parameters
    known = kind == _MEASURED_MODEL[0] and abs(parameters / _MEASURED_MODEL[1] - 1) < _SAME_SIZE
    measured = known and train not in ADAPTERS and options.rows_per_step == ROWS_PER_STEP
    if known and objective["objective"] == "native-distill" and not _teaches(objective):
        rate = _UNTAUGHT_RATE
        reason = "The rate that was measured without a teacher, for SmolLM2-135M"
    elif known:
        rate = _RATE
        reason = "The rate that was measured, for SmolLM2-135M" + (", in one seed" if train == "qkv" else "")
    else:
        rate = _CAREFUL_RATE
        reason = (
            f"A careful rate: Gemma-3-270M stayed close to the original at {rate:g}, and {_RATE:g} broke it. A higher "
            "one may teach more"
        )
    if known and options.rows_per_step != ROWS_PER_STEP:
        reason += f". That was with {ROWS_PER_STEP} rows a step, not {options.rows_per_step}"
    if train in ADAPTERS:
        times, most = _LORA_RATES
        rate = min(times * rate, most)
        reason += (
            f". For adapters it is {times} times that, at most {most:g}, measured with adapters on all matrices, not "
            "on attention alone"
        )
    rate = float(f"{rate:.1g}")  # one digit, as the plan shows
    return Choice("rate", rate, f"{rate:.0e}", f"{reason}.", _basis(measured), flag)


def _evaluation(facts: ModelFacts, options: ExtendOptions, machine: Machine) -> Choice:
    window, to, on_gpu = facts.window, options.to, machine.device == "cuda"
    row_length = to if on_gpu else min(to, _CPU_ROW)
    lengths = [window // 4, window, to]
    if on_gpu:
        doubled = {window << k for k in range(20) if window << k < to}
        lengths = sorted({window >> k for k in range(1, 4)} | doubled | {to})  # from an eighth of the window on
    lengths = list(dict.fromkeys(options.lengths)) or lengths  # one that is named twice would be asked and count twice
    wanted = options.prompts or _PROMPTS[machine.device]
    # as many at each depth; fewer prompts than depths have some of them
    prompts = wanted if wanted < len(DEPTHS) else -(-wanted // len(DEPTHS)) * len(DEPTHS)
    ruler_lengths = [n for n in lengths if n >= SHORTEST_LENGTH] if on_gpu else []
    tasks = list(RULER_TASKS) if ruler_lengths and find_spec("lm_eval") else []
    ruler_samples = max(prompts // 2, 1)  # of each task, which take longer
    if on_gpu:
        asked = "a hidden number (passkey)"
        if tasks:
            asked += f", and from {SHORTEST_LENGTH:,} tokens on {ruler_samples} for each of {len(tasks)} tasks of RULER"
    else:  # a CPU reads one text for all questions
        texts = -(-prompts // len(DEPTHS))
        asked = f"passkeys of several people in {f'{texts} texts' if texts > 1 else 'one text'}"
    text = (
        f"loss on {_EVAL_ROWS} held-out rows of {row_length:,} tokens; in texts of "
        f"{', '.join(f'{n:,}' for n in lengths)} tokens, {prompts} question{'s' * (prompts > 1)} each for {asked}, "
        "answered by generation"
    )
    notes = ""
    if row_length < to:
        notes += " A CPU takes minutes for the loss of a longer row: questions show what is won there."
    if prompts > wanted:
        notes += f" {wanted} prompts are made {prompts}, as many at each of {len(DEPTHS)} depths."
    if prompts < MIN_DIFFERENT:
        notes += " So few prompts are examples only, and count neither as better nor as worse."
    elif prompts < 40:
        notes += " So few prompts show large changes only."
    if ruler_lengths and not tasks:
        notes += " RULER is left out: it needs lm-eval, pip install 'rope-patch[eval]'."
    value = {
        "measures": ["cliff", "passkey" if on_gpu else "several", *(["ruler"] if tasks else [])],
        "prompts": prompts,
        "lengths": lengths,
        "ruler_tasks": tasks,
        "ruler_lengths": ruler_lengths,
        "ruler_samples": ruler_samples,
        "n_rows": _EVAL_ROWS,
        "row_length": row_length,
    }
    if options.lengths or options.prompts:
        return _yours("measuring", value, text, "--prompts, --lengths", notes.strip())
    reason = "What is lost shows within the original window, and what is won beyond it."
    return Choice("measuring", value, text, f"{reason}{notes}", "not measured", "--prompts, --lengths")
