"""TRL's SFTTrainer on a rescaled model, with RoPE views in training."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging
from trl import SFTTrainer

from rope_patch import patch_model, unpatch_model
from rope_patch.attention.shifted import ShiftedAttention
from rope_patch.distillation import CopiedTeacher
from rope_patch.draws import DrawKey
from rope_patch.layout.documents import count_documents, locate_documents
from rope_patch.layout.labelled import Labelled
from rope_patch.methods import resolve_view
from rope_patch.model_card import has_card_of_user, write_card, write_runs
from rope_patch.patch import view_source
from rope_patch.rescalings import Rescaling
from rope_patch.rotary import find_causal_lm, find_decoder
from rope_patch.sidecar import require_same_rope
from rope_patch.sources import ViewSource
from rope_patch.state import When, state_of
from rope_patch.views import View
from rope_patch.views.base import TRUE_POSITIONS

from .checkpoint import require_no_adapter
from .config import RopeSFTConfig
from .cut_rows import cut_rows
from .engines.saves_in_parts import remove_weights, saves_in_parts, weights_gathered
from .engines.sequence_ranks import SequenceRanks, gradient_factor
from .engines.weights import forget_unfinished_forwards, hold_like_student, require_unharmed_codes
from .gpus import loading_on_one_gpu, tell_idle_gpus
from .long_rows import LongRowTraining, offload_optimizer
from .memory_plan import MemoryPlan, plan_memory
from .method_record import record_of, require_same_method, training_method
from .model_card import DatasetFacts, card_of, run_facts, runs_before
from .model_setup import (
    forget_earlier_trainer,
    has_rope,
    is_patched,
    keep_quantised_weights,
    require_new_rescaling,
    train_qkv_only,
)
from .objective_checks import check_objective, check_shared_sequences
from .objectives import Objective, objective_of
from .repeated_rows import without_repeated
from .small_steps import warn_of_lost_steps
from .step_means import Part, StepMeans
from .training_set import (
    document_lengths,
    document_tokens,
    prepare_rows,
    require_taught,
    require_text,
    with_masked_loss,
)
from .training_text import prepare_text
from .view_effect import require_effect_on
from .window_check import check_window, farthest_target

logger = logging.get_logger(__name__)

_FIRST_SAMPLE = "rope_first_sample"
_WHOLE_ROWS = "rope_whole_rows"
_TOKEN_COUNT = "rope_patch_tokens"


class RopeSFTTrainer(SFTTrainer):
    """A drop-in for [`~trl.SFTTrainer`]: same arguments, same datasets, same callbacks.

    The model is rescaled and its view is put on after TRL has loaded it and added adapters. Training forwards run under
    the view, with draws that depend on (seed, optimizer step, document) alone: resuming, accumulating gradients and
    adding ranks change none of them. Evaluation runs under true positions, so `eval_loss` is plain cross-entropy. With
    `view="standard"` and no rescaling, losses are SFTTrainer's own, bit for bit.

    What evaluation draws, for the KL of self-distillation or a view that is always on, depends on the seed and on which
    document of the evaluation set it is drawn for: every evaluation draws the same, at any batch size and on any number
    of ranks. Documents are counted in the order in which they are read, which `train_sampling_strategy` may change.

    Logged beside TRL's metrics: `view/NAME`, the mean of each drawn parameter over the step, and `tokens_per_second`.
    Parts of an objective's loss, such as `ce` and `kl`, are sums over all batches and ranks of an optimizer step, or of
    an evaluation, divided by the step's own counts, so that they add up to the loss that is logged. `eval_loss` is
    Trainer's mean over batches; `eval_ce` weighs each label alike, and differs from it where batches have not as many
    labels. With several ranks, documents that are repeated to fill the last batches count once in both; with
    `compute_metrics`, in `predict`, with images, and where rows hold several documents, they count twice. In
    evaluations of several datasets the parts are called eval_NAME_ce, as the losses are.

    The view ends with training: it is in force while `train`, `evaluate` or `predict` run, and off the model after the
    first of them. One that `patch_model` had put on before stays.

    Args:
        model: as in TRL, but the folder of an adapter is refused, as its rescaling would not be put in force:
            `rope_patch.load_adapter` gives a model that has both. A model that `patch_model` has patched keeps its
            patches unless `args` names others. The view of an earlier trainer ends with it. One without RoPE trains as
            with SFTTrainer, if `args` asks for nothing that needs RoPE.
        args: a [`RopeSFTConfig`]; an `SFTConfig` or `TrainingArguments`, which `RopeSFTConfig.of` converts; or None.
        data_collator, train_dataset, eval_dataset, processing_class, compute_loss_func, compute_metrics, callbacks,
        optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics, quantization_config, peft_config,
        formatting_func: as in TRL, in its order.
        **kwargs: what a later TRL takes besides.
    """

    _tag_names = ["trl", "sft", "rope-patch"]
    _name = "RoPE-SFT"

    args: RopeSFTConfig
    model: Any  # TRL allows None for a while; here it is a model once __init__ is through

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str):
            require_no_adapter(model, "model")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = RopeSFTConfig(output_dir=f"{Path(name).name or 'model'}-RoPE-SFT")
        config = RopeSFTConfig.of(args)
        if isinstance(model, nn.Module):
            if config.needs_rope:
                find_decoder(model)  # a model without RoPE stops here, before the dataset is prepared
            forget_earlier_trainer(model)
        elif peft_config is not None and "dtype" not in (config.model_init_kwargs or {}):
            logger.warning(
                "TRL loads a model given by name in float32. Under adapters, which stay in float32, pass "
                "model_init_kwargs={'dtype': 'bfloat16'} to halve its memory."
            )
        self._dataset_facts = DatasetFacts.of(train_dataset)
        config, train_dataset = prepare_text(model, config, train_dataset, processing_class)
        if formatting_func is None:
            config = with_masked_loss(config, train_dataset)
            require_text(train_dataset, "train_dataset", config)
            require_text(eval_dataset, "eval_dataset", config)
        checkpointing: Any = config.gradient_checkpointing_kwargs or {}  # parsed from JSON by now
        self._asked_reentrant = bool(checkpointing.get("use_reentrant"))
        with loading_on_one_gpu(config):
            super().__init__(
                model,
                config,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                quantization_config=quantization_config,
                peft_config=peft_config,
                formatting_func=formatting_func,
                **kwargs,
            )
        if self._skip_prepare_dataset and not self._is_vision_dataset:
            require_taught(self.train_dataset, "train_dataset", config, self._tokenizer)
        if not self.is_model_parallel:
            tell_idle_gpus(config)
        came_patched = is_patched(self.model)
        self._source: ViewSource | None = None  # of a model without RoPE, of which nothing is asked
        self._when: When = "train"
        if config.needs_rope or has_rope(self.model):
            self._patch(config)
            state = state_of(find_decoder(self.model))
            assert state is not None and state.source is not None  # at the least the standard view
            self._source, self._when = state.source, state.when
        self._earlier_runs = runs_before(find_causal_lm(self.model).config._name_or_path, self.args.output_dir)
        self._keeps_card: dict[Path, bool] = {}  # of folders that are being saved into
        self._perturbs = self._source is not None and self._source.view.perturbs
        self._runs = 0  # of train, evaluate and predict, one inside the other
        self._method = (
            training_method(config, resolve_view(TRUE_POSITIONS), config.seed)
            if self._source is None
            else training_method(config, self._source.view, self._source.clock.seed)
        )
        self._ranks = SequenceRanks.of(self.accelerator)
        self._whole: dict[str, Any] | None = None  # rows of the batch in flight, where ranks share them
        if self._ranks is not None:
            check_shared_sequences(self, self._ranks)
            if data_collator is None:
                self._ranks.pad_collator(self.data_collator)
        self._rate_since: tuple[float, float] | None = None
        keep_quantised_weights(self.model)
        require_unharmed_codes(self.model, self.accelerator)
        if config.trainable == "qkv":
            train_qkv_only(self.model)
        self._objective = self._make_objective(config)
        if self._objective is not None:  # also of a family whose own loss takes no count of the step
            self.model_accepts_loss_kwargs = True
        if self._teacher_copy is not None:
            hold_like_student(self._teacher_copy, self.accelerator)
        self._shifted = self._make_shifted(config)
        self.memory_plan: MemoryPlan | None = None
        self._long_rows: LongRowTraining | None = None
        self._step_counts: dict[str, int] = {}
        self._means = {mode: self._new_means() for mode in ("train", "eval")}
        self._batches_left = 0  # of the optimizer step
        self._overflowed: int | None = None  # the last optimizer step of which that was told
        self._evaluated = 0  # documents of the evaluation in progress
        self._only_repeated = False  # whether all rows of the batch in flight repeat others
        try:
            self._check_lengths()
        except ValueError:
            if not came_patched and self._source is not None:
                unpatch_model(self.model)
            raise
        if self._source is not None:
            self._plan_long_rows(config)

    def _plan_long_rows(self, args: RopeSFTConfig) -> None:
        """Decide whether rows are long for the device, and say so."""
        rows = self._row_length()
        if rows is not None and self._ranks is not None:
            rows = math.ceil(rows / self._ranks.size)
        self.memory_plan = plan = plan_memory(self.model, args, rows, args.device, args.long_rows)
        if args.process_index == 0:
            (logger.warning if plan.on else logger.info)(str(plan))
        if not plan.on and (not plan.mask_free or self._ranks is not None):
            return
        if plan.on and self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            offload_optimizer(args, plan, args.device)
        copies = [] if self._teacher_copy is None else [self._teacher_copy.copy]
        self._long_rows = LongRowTraining(self.model, plan, *copies, shared=self._ranks is not None)

    def _row_length(self) -> int | None:
        """Tokens of the longest row, None where only reading all of them would say."""
        longest = self._longest()
        bounds = [n for n in (self.args.max_length, None if self.args.packing else longest) if n is not None]
        return min(bounds) if bounds else None

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """TRL's preparation, between whose tokenizing and packing long documents are cut."""

        def prepare(documents: Any, args: RopeSFTConfig, packing: bool) -> Any:
            formatting = formatting_func if documents is dataset else None  # which makes text, once
            return super(RopeSFTTrainer, self)._prepare_dataset(
                documents, processing_class, args, packing, formatting, dataset_name
            )

        known = {"train": "train_dataset", "eval": "eval_dataset"}
        name = known.get(dataset_name, f"eval_dataset[{dataset_name!r}]")
        return prepare_rows(dataset, name, args, self._tokenizer, packing, prepare)

    def _check_lengths(self) -> None:
        """Stop here, and not at the step that meets it, if a document is too long for window, view or teacher."""
        if self._source is None:
            return
        draws = self._perturbs and (self._objective is None or self._objective.draws)
        view = self._source.view if draws else resolve_view(TRUE_POSITIONS)
        view.check_run(self.args)  # also one that the model came with
        lengths = document_lengths(self.train_dataset)
        lengths = None if lengths is None else view.kept(lengths)
        longest = None if lengths is None else int(lengths.max())
        check_window(self.model, view, longest, tell=self.args.process_index == 0)
        if lengths is None or not longest:
            return
        view.check_length(longest)
        if draws:
            self._source.checked_length = longest
        if self._objective is not None:
            self._objective.check_length(longest)
            self._objective.check_documents(lengths)
        if draws:
            objective = objective_of(self.args)
            require_effect_on(
                view,
                lengths,
                find_decoder(self.model).config.num_hidden_layers,
                reads_last=objective.counts_every_token,
                controls=objective.takes_view_controls,
                documents=partial(document_tokens, self.train_dataset),
            )

    def _longest(self) -> int | None:
        """Tokens of the longest document of a row, None where only reading all of them would say."""
        lengths = document_lengths(self.train_dataset)
        return None if lengths is None else int(lengths.max()) or None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's training; a checkpoint of another RoPE or another method is refused.

        Raises:
            ValueError: the checkpoint was trained under other frequencies, which would go on as another model, or with
                another view, objective or option of theirs.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(str(self.args.output_dir))
        if folder:
            if self._source is not None:
                require_same_rope(self.model, folder)
            require_same_method(self._method, folder)
            self._total_train_tokens = tokens_until(folder)
        if self.accelerator.is_main_process:
            warn_of_lost_steps(self.model, self.args.learning_rate)
        with self._view_in_force():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's evaluation; the view of this trainer is in force meanwhile, also after training."""
        with self._view_in_force():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's prediction; the view of this trainer is in force meanwhile, also after training."""
        with self._view_in_force():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _view_in_force(self) -> Iterator[None]:
        """The view of this trainer for as long as it runs, then none: what runs the model next sets no clock for it.

        A view that the user put on stays, and its clock goes on by itself again. What the model is saved with later
        still names the view.
        """
        source = self._source
        if source is None:
            yield
            return
        state = state_of(find_decoder(self.model))
        if state is None:
            raise ValueError(
                "the model was unpatched after this trainer was made, so that it would train without its rescaling and "
                "its view: make a new trainer."
            )
        before = state.source, state.when
        state.source, state.when = source, self._when
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            if not self._runs:
                source.clock.release()
                state.ended = source.view, self._when
                if source.of_trainer:
                    state.source, state.when = (None, "train") if before[0] is source else before

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's saving, also of checkpoints, with a record of what was trained with and a model card.

        Under FSDP the model is one plain checkpoint, whatever `fsdp_state_dict_type` says of checkpoints on the way.
        Under SHARDED_STATE_DICT those have weights in parts, and here also the config, the tokenizer and what an
        adapter needs, so that the merged weights load.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        if self.args.should_save:  # the record first, to be among what is pushed to the hub
            write_runs(self._recorded_runs(), folder)
            # PEFT writes into the README.md that it finds
            self._keeps_card[folder] = has_card_of_user(folder)
            # TRL keeps no count of tokens: what is in here is written to the checkpoint's trainer_state.json
            kept: Any = self.state.stateful_callbacks
            kept[_TOKEN_COUNT] = {"tokens": self._total_train_tokens}
        with nullcontext() if _internal_call else weights_gathered(self.accelerator):
            if saves_in_parts(self.accelerator):
                self._save(str(folder), state_dict={})
                if self.args.should_save:
                    remove_weights(folder)
            super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_card(folder, card_of(self, self._recorded_runs()), keep=self._keeps_card.pop(folder))

    def create_model_card(  # type: ignore[override]  # TRL's arguments, which are others than Trainer's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card into `output_dir`, as TRL does; a README.md that somebody wrote or edited is kept.

        Args:
            model_name: title of the card.
            dataset_name: of the training set, where it does not say it itself.
            tags: for the hub, beside those of TRL and of this package.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        keep = self._keeps_card[folder] if folder in self._keeps_card else has_card_of_user(folder)
        card = card_of(self, self._recorded_runs(dataset_name), title=model_name, tags=tags)
        write_card(folder, card, keep=keep)

    def _recorded_runs(self, dataset_name: str | None = None) -> list[dict[str, Any]]:
        """This run as it stands, after those that made the model that it began with."""
        tokens = int(self._total_train_tokens)
        run = run_facts(self, self._source, self._dataset_facts.named(dataset_name), self._earlier_runs, tokens)
        return [*self._earlier_runs, record_of(self._method, run)]

    def _patch(self, args: RopeSFTConfig) -> None:
        """Apply what `args` names; if it cannot be, leave the model as it came."""
        rescaling = args.make_rescaling()
        view = resolve_view(args.view, args.view_options)
        was_patched = is_patched(self.model)
        try:
            if rescaling is not None:
                require_new_rescaling(rescaling, self.model)
                patch_model(self.model, self._with_window(rescaling, args, view))
            # a view that changes nothing is the default: it does not take off a view that the user has put on
            before = view_source(self.model)
            if view.perturbs or before is None or before.of_trainer:
                patch_model(self.model, view, seed=args.seed if args.view_seed is None else args.view_seed)
                view_source(self.model).of_trainer = True  # type: ignore[union-attr]
        except Exception:
            if not was_patched:
                unpatch_model(self.model)
            raise

    def _with_window(self, rescaling: Rescaling, args: RopeSFTConfig, view: View) -> Rescaling:
        """Where a rescaling does not say how far it reaches, promise the rows and the target that it is trained on."""
        if not rescaling.wants_window:
            return rescaling
        rows = args.max_length or self._longest() or 0
        window = max(rows, farthest_target(view), find_decoder(self.model).config.max_position_embeddings)
        return rescaling.with_window(window)

    def _make_objective(self, args: RopeSFTConfig) -> Objective | None:
        # under Ulysses TRL's own loss is a mean of each micro-batch, whatever it holds
        if not args.has_own_loss and not (self._ranks is not None and self._ranks.engine == "sp"):
            return None
        check_objective(self)
        return objective_of(args).build(self.model, args, self.accelerator)

    @property
    def _teacher_copy(self) -> CopiedTeacher | None:
        teacher = None if self._objective is None else self._objective.teacher
        return teacher if isinstance(teacher, CopiedTeacher) else None

    def _make_shifted(self, args: RopeSFTConfig) -> ShiftedAttention | None:
        if args.shifted_attention is None:
            return None
        assert args.max_length is not None
        return ShiftedAttention(self.model, math.ceil(args.shifted_attention * args.max_length))

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """All micro-batches of an optimizer step, each with the ordinal of its first document within the step."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        comes_split = self._ranks is not None and self._ranks.engine == "sp"
        if comes_split and not batches:
            # DeepSpeed 0.19 tells the end of an epoch at the start of the next one, which would lose a step
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._objective is not None:
            self._objective.begin(self.state.global_step)
        rows = [self._ranks.whole_rows(batch) for batch in batches] if self._ranks and comes_split else batches
        if self._perturbs and batches:
            for batch in batches:
                self._require_borders(batch)
            numbers, _ = self._number_documents(rows, device, self._ranks)
            for batch, whole, first in zip(batches, rows, numbers, strict=True):
                batch[_FIRST_SAMPLE] = whole[_FIRST_SAMPLE] = first
            if self._cut_rows(batches):
                num_items = self._get_num_items_in_batch(batches, device)
        if self._ranks is not None:
            for i, batch in enumerate(batches):
                if not comes_split:
                    self._ranks.padded(batch)
                batch[_WHOLE_ROWS] = rows[i] if comes_split else self._ranks.whole_rows(batch)
        if self._objective is not None and batches:
            self._step_counts = self._total_counts([self._counts(batch) for batch in rows], device)
            # a number tells Trainer not to divide by micro-steps what is already divided by counts of the step
            num_items = self._step_counts["tokens"]
        elif isinstance(num_items, torch.Tensor):
            self._require_labels(num_items.max().item())
        self._batches_left = len(batches)
        return batches, num_items

    def _number_documents(
        self, batches: list[dict[str, Any]], device: torch.device, ranks: SequenceRanks | None
    ) -> tuple[list[int], int]:
        """How many documents of all ranks come before those of each batch, and how many there are in all.

        Args:
            batches: of whole rows.
            device: for talking to other ranks.
            ranks: those that share the rows.
        """
        counts = torch.tensor([[count_documents(batch) for batch in batches]], device=device)
        counts = self.accelerator.gather(counts).cpu()  # [ranks, micro-steps]
        ranks = ranks or SequenceRanks(self.accelerator, "cp", 1)
        in_order, mine = ranks.sampler_order(counts)
        before = in_order.cumsum(0) - in_order
        return before[mine].tolist(), int(in_order.sum())

    def _require_labels(self, n_labels: float) -> None:
        if n_labels == 0:
            raise ValueError(
                f"optimizer step {self.state.global_step} has no token to predict: each document of its batches has a "
                "single token, or labels of -100 alone, as a completion that max_length cuts off. Leave such rows out "
                "of train_dataset."
            )

    def _cut_rows(self, batches: list[dict[str, Any]]) -> bool:
        """Let a view that keeps a part of long documents take it; whether there were any."""
        assert self._source is not None
        view = self._source.view
        if view.cuts is None:
            return False
        if any("position_ids" in batch for batch in batches):
            raise ValueError(
                f"view {view.name!r} with {view.cuts} cuts one document a row: switch packing and padding_free off, or "
                f"leave out {view.cuts} and give shorter documents."
            )
        were_cut = [cut_rows(view, batch, self._key(batch)) for batch in batches]
        return any(were_cut)

    def _key(self, batch: dict[str, Any]) -> DrawKey:
        """The key that the batch's forward will draw with."""
        assert self._source is not None
        self._set_clock(batch[_FIRST_SAMPLE], training=True)
        rows, seq_len = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        return self._source.clock.key(locate_documents(rows, seq_len, batch["input_ids"].device, None, mask))

    def _counts(self, batch: dict[str, Any]) -> dict[str, int]:
        assert self._objective is not None
        self._set_clock(batch.get(_FIRST_SAMPLE, 0), training=True)  # what is counted may depend on draws
        return self._objective.counts(self._objective.read(batch))

    def _set_clock(self, first_sample: int, training: bool) -> None:
        if self._source is None:
            return
        if training:
            progress = self.state.global_step / max(self.state.max_steps, 1)
            self._source.clock.set(self.state.global_step, first_sample, progress)
        else:  # draws only for a view that is always on, and then the same ones every time
            self._source.clock.set(-1, first_sample)

    def _total_counts(self, counts: list[dict[str, int]], device: torch.device) -> dict[str, int]:
        """Sums over the micro-batches of a step and, where losses are normalised so, over ranks."""
        names = list(counts[0])
        of_rank = torch.tensor([sum(count[name] for count in counts) for name in names], device=device)
        totals = self.accelerator.reduce(of_rank, reduction="sum")
        if self._ranks is not None:  # each of which has counted whole rows
            totals = totals // self._ranks.size
        if "labels" in names:
            self._require_labels(int(totals[names.index("labels")]))
        chosen = totals if self.args.average_tokens_across_devices else of_rank
        # a rank's own count may be 0 where others have labels: its sums are 0 then too
        return dict(zip(names, chosen.clamp(min=1).tolist(), strict=True))

    def _require_borders(self, batch: dict[str, Any]) -> None:
        packs_documents = self.args.packing and self.args.packing_strategy != "wrapped"
        if (packs_documents or self.args.padding_free) and "position_ids" not in batch:
            raise ValueError(
                "data_collator must keep position_ids when rows hold several documents: without them views would cross "
                f"document borders. Got a batch with {sorted(batch)}. Use TRL's own collator."
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """SFTTrainer's loss of a forward whose view is keyed by optimizer step and document."""
        with self._shard_in_force(inputs):
            if self._objective is None:
                with self._counts_of_all_ranks():
                    result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            else:
                result = self._distil(model, inputs)
        if self.model.training:  # before backward, in which DeepSpeed takes its step
            self._require_finite(result[0] if isinstance(result, tuple) else result)
        return result

    @contextmanager
    def _counts_of_all_ranks(self) -> Iterator[None]:
        """Let TRL's counts of tokens be those of all ranks.

        It gathers them by `gather_for_metrics`, which at the end of an epoch keeps as many entries as there were
        documents left: of counts, one a rank, those of the last ranks are lost.
        """
        self.accelerator.gather_for_metrics = self.accelerator.gather
        try:
            yield
        finally:
            del self.accelerator.gather_for_metrics

    @contextmanager
    def _shard_in_force(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Let forwards inside the block know which tokens of whole rows they get, where ranks share a sequence."""
        if self._ranks is None or self._whole is None or self._source is None:
            yield
            return
        state = state_of(find_decoder(self.model))
        assert state is not None
        state.shard = self._ranks.shard(self._whole, inputs)
        try:
            yield
        finally:
            state.shard = None

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Trainer's splitting of a batch inside the step, which changes the batch's tensors in place."""
        if self._ranks is not None and self._ranks.engine == "cp":
            inputs = self._ranks.ring_inputs(inputs)
        return super()._prepare_context_parallel_inputs(model, inputs)

    def _require_finite(self, loss: torch.Tensor) -> None:
        """Stop at a training loss that is not finite, unless the step is one that loss scaling leaves out."""
        if torch.isfinite(loss):
            return
        what = f"the loss became {loss.item()} at optimizer step {self.state.global_step}"
        if skips_overflows(self.accelerator):
            if self._overflowed == self.state.global_step:
                return
            self._overflowed = self.state.global_step
            logger.warning(
                f"{what}: fp16 has overflowed, and the step is left out as loss scaling does. If this goes on, nothing "
                "is trained any more: use bf16 or float32."
            )
            return
        raise FloatingPointError(f"{what}. Lower the learning rate, use float32, or look for bad rows in the dataset.")

    def _distil(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        assert self._objective is not None
        mode = "train" if self.model.training else "eval"
        shard = self._objective.shard
        n_sharing = 1 if shard is None else shard.size
        read = self._objective.read(inputs if shard is None else shard.batch)
        batch_counts = self._objective.counts(read)
        counts = self._step_counts if mode == "train" else {name: max(value, 1) for name, value in batch_counts.items()}
        loss, parts = self._objective.loss(model, inputs, read, counts, batch_counts)
        if mode == "eval" and self._only_repeated:
            parts = {name: (torch.zeros_like(total), 0.0) for name, (total, _) in parts.items()}
        # sums are of the rank's own tokens, counts of whole rows, which each rank that shares them adds
        self._means[mode].add({name: (total, count / n_sharing) for name, (total, count) in parts.items()})
        if mode == "train":
            tokens = torch.tensor(batch_counts["tokens"], device=loss.device)
            self._total_train_tokens += self.accelerator.gather(tokens).sum().item() // n_sharing
            loss = loss * gradient_factor(self.accelerator, over_all_ranks=self.args.average_tokens_across_devices)
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's step, keyed by optimizer step and document, also of a `compute_loss` of one's own.

        Forward and backward of an objective run while it watches the model's attention.
        """
        model.train()  # Trainer does so later: what an objective puts in place differs between training and evaluation
        self._set_clock(inputs.pop(_FIRST_SAMPLE, 0), training=True)
        self._whole = inputs.pop(_WHOLE_ROWS, None)
        with ExitStack() as stack:
            for part in (self._long_rows, self._objective, self._shifted):  # the last one looks at attention first
                if part is not None:
                    stack.enter_context(part.active())
            loss = super().training_step(model, inputs, *args, **kwargs)
        self._whole = None
        if self._ranks is not None and self._ranks.engine == "sp":
            # Trainer logs the mean over ranks, which may not be what the engine makes of gradients
            over_all = self.args.average_tokens_across_devices
            n_parts = self.accelerator.num_processes if over_all else self._ranks.size
            loss = loss * (n_parts / gradient_factor(self.accelerator, over_all_ranks=over_all))
        if getattr(self.compute_loss, "__func__", None) is not RopeSFTTrainer.compute_loss:
            self._require_finite(loss)  # a `compute_loss` of one's own has not looked; each look waits for the GPU
        if self._perturbs and (self._objective is None or self._objective.draws):
            self._means["train"].add(self._draws())
        self._batches_left -= 1
        if self._batches_left == 0:  # taken once a step, not a batch: ranks wait for each other there
            for name, mean in self._means["train"].take().items():
                self._metrics["train"][name].append(mean)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """TRL's step; an objective that distils gives a loss and no logits."""
        inputs = self._prepare_inputs(inputs)
        # Ulysses is off in evaluation, where each rank has rows of its own
        ring = self._ranks if self._ranks is not None and self._ranks.engine == "cp" else None
        # logits of all ranks are gathered, of as many rows each; images are not those of a row each
        self._only_repeated = False
        if prediction_loss_only and not self._is_vision_dataset:
            inputs, self._only_repeated = without_repeated(
                inputs,
                self.accelerator.gradient_state,
                self.args.eval_batch_size,
                self.args.process_index // (1 if ring is None else ring.size),
            )
        first_sample = 0
        if self._perturbs or self._objective is not None:
            (before,), n_documents = self._number_documents([inputs], self.args.device, ring)
            first_sample = self._evaluated + before
            self._evaluated += n_documents
        self._set_clock(first_sample, training=False)
        with nullcontext() if self._long_rows is None else self._long_rows.active():
            if self._objective is not None:
                self._objective.begin(None, first_sample)
            if ring is not None:
                result = self._predict_in_ring(model, inputs, prediction_loss_only)
            elif self._objective is None:
                result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            else:
                with torch.no_grad(), self.compute_loss_context_manager(), self._objective.active():
                    result = self.compute_loss(model, inputs), None, None
        loss = result[0]
        if loss is not None and not torch.isfinite(loss).all():
            logger.error(  # also on ranks that say errors alone: others may have none
                f"the loss of an evaluation batch is {loss.mean().item()}, and Trainer may leave it out of its mean: "
                "the weights are not finite, or none of the batch's tokens has a label."
            )
        return result

    def _predict_in_ring(self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool) -> Any:
        """An evaluation step whose rows are split as in training; TRL's own runs whole rows on every rank."""
        assert self._ranks is not None
        if not prediction_loss_only:
            raise ValueError(
                "predictions and compute_metrics are given logits of whole rows, of which each rank of a ring "
                "(cp_size) has a part: leave compute_metrics out and set prediction_loss_only=True."
            )
        self._ranks.padded(inputs)
        self._whole = self._ranks.whole_rows(inputs)
        n_labels = torch.tensor(Labelled.of(self._whole).n_labels, device=self.args.device)
        split, inputs = self._prepare_context_parallel_inputs(model, inputs)
        try:
            with torch.no_grad(), self.compute_loss_context_manager(), split():
                if self._objective is not None:
                    with self._objective.active():
                        loss = self.compute_loss(model, inputs)
                else:
                    loss = self.compute_loss(model, inputs, num_items_in_batch=n_labels)
                    if self.args.average_tokens_across_devices:  # TRL has undone an average over ranks
                        loss = loss / self.accelerator.num_processes
        finally:
            self._whole = None
        return self._ranks.sum_over(loss), None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Trainer's loop of an evaluation or a prediction, with the parts of an objective's loss among its metrics."""
        self._evaluated = 0
        self._means["eval"] = self._new_means()  # what a loop that was broken off has left
        if self._ranks is not None and self._ranks.engine == "cp":
            self.gather_function = self._ranks.gather_of_rings  # for this loop: Trainer takes its own again
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        forget_unfinished_forwards(self.model)
        metrics = cast(dict[str, float], output.metrics)
        for name, mean in self._means["eval"].take().items():
            metrics[f"{metric_key_prefix}_{name}"] = mean
        return output

    def _new_means(self) -> StepMeans:
        return StepMeans(self.accelerator, ranks_alike=not self.args.average_tokens_across_devices)

    def _draws(self) -> dict[str, Part]:
        """What the view has drawn in the last forward."""
        assert self._source is not None and self._source.last is not None
        drawn = self._source.last.parameters.items()
        parameters = {n: p for n, p in drawn if n.rpartition(".")[2] != "length" and not n.rpartition(".")[2][0] == "_"}
        return {f"view/{name}": (p.double().sum(), p.numel()) for name, p in parameters.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, with the rate since the last one."""
        if self.model.training and "loss" in logs:
            tokens, now = float(self._total_train_tokens), time.perf_counter()
            if self._rate_since is not None and tokens > self._rate_since[0]:
                rate = (tokens - self._rate_since[0]) / (now - self._rate_since[1])
                self._metrics["train"]["tokens_per_second"].append(rate)
            self._rate_since = tokens, now
        super().log(logs, start_time)


def skips_overflows(accelerator: Accelerator) -> bool:
    """Whether gradients that are not finite are left out by loss scaling, of torch or of DeepSpeed."""
    return accelerator.scaler is not None or accelerator.mixed_precision == "fp16"


def tokens_until(checkpoint: str | Path) -> int:
    """Tokens that the run had trained on when it wrote `checkpoint`; for one without the count, as last logged."""
    file = Path(checkpoint) / "trainer_state.json"
    if not file.is_file():
        return 0
    state = json.loads(file.read_text(encoding="utf-8"))
    kept = state.get("stateful_callbacks", {}).get(_TOKEN_COUNT)
    logged = [entry["num_tokens"] for entry in state.get("log_history", []) if "num_tokens" in entry]
    return int(kept["tokens"]) if kept else int(max(logged, default=0))
