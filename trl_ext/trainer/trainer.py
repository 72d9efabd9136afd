"""TRL's SFTTrainer on a rescaled model, with RoPE views in training."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from trl import SFTTrainer

from rope_patch import unpatch_model
from rope_patch.adapters.sidecar import require_same_rope
from rope_patch.adapters.watch import require_no_adapter_beside
from rope_patch.attention.shifted import ShiftedAttention
from rope_patch.checkpoints.full_disk import disk_full_errors
from rope_patch.checkpoints.tokenizer_window import widen_tokenizer_of
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import CopiedTeacher
from rope_patch.methods import resolve_view
from rope_patch.rope.rotary import find_decoder
from rope_patch.views.base import TRUE_POSITIONS

from ..config import RopeSFTConfig
from ..data.repeated_rows import without_repeated
from ..engines.saves_in_parts import remove_weights, saves_in_parts, weights_gathered
from ..engines.sequence_ranks import SequenceRanks, gradient_factor
from ..engines.weights import forget_unfinished_forwards, hold_like_student, require_unharmed_codes
from ..memory.long_rows import LongRowTraining, plan_long_rows
from ..memory.plan import MemoryPlan
from ..objectives import Objective, objective_of
from ..objectives.step_means import StepMeans
from ..runs.checkpoint import require_no_adapter
from ..runs.folder import last_checkpoint
from ..runs.method_record import require_same_method, training_method
from ..runs.model_card import DatasetFacts, SavedRun
from ..runs.record import RunRecord
from ..runs.same_adapters import require_same_adapters
from ..runs.same_rows import require_same_data
from .dataset_checks import named_sets, require_kept_borders, require_known_tokens, require_text
from .finite_losses import FiniteLosses, log_broken_evaluation, require_finite_weights
from .length_checks import check_evaluation_lengths, check_lengths
from .model_loading import loading_options, warn_of_idle_gpus
from .model_setup import (
    forget_earlier_trainer,
    has_rope,
    is_patched,
    keep_quantised_weights,
    patch_by_config,
    train_qkv_only,
    with_base_revision,
)
from .objective_checks import check_next_token, check_objective, check_shared_sequences
from .small_steps import warn_of_lost_steps
from .step_batches import (
    FIRST_SAMPLE,
    WHOLE_ROWS,
    cut_documents,
    number_documents,
    require_borders,
    total_counts,
)
from .token_count import counts_of_all_ranks, keep_count, tokens_until
from .training_set import prepare_rows, require_taught, with_masked_loss
from .training_text import prepare_text
from .view import TrainerView

logger = logging.get_logger(__name__)


class RopeSFTTrainer(SFTTrainer):
    """Replaces [`~trl.SFTTrainer`]: the same arguments, datasets and callbacks, on a model with rescaled RoPE.

    The model is rescaled and gets its view after TRL has loaded it and added adapters. Training forwards run under the
    view. Its draws depend on (seed, optimizer step, document) alone, so that resuming, gradient accumulation and more
    ranks change none of them. Evaluation runs at true positions, so that `eval_loss` is plain cross-entropy. With
    `view="standard"` and no rescaling, losses are SFTTrainer's own, bit for bit.

    An evaluation draws for the KL of self-distillation, and for a view that is always on. These draws depend on the
    seed and on the document's place in the evaluation set, so that every evaluation draws the same, at any batch size
    and on any number of ranks. Documents are counted in the order in which they are read, which
    `train_sampling_strategy` may change.

    Logged besides TRL's metrics: `view/NAME`, the mean of each drawn parameter over the documents of the step, and
    `tokens_per_second`. Parts of an objective's loss, such as `ce` and `kl`, are sums over all batches and ranks of an
    optimizer step, or of an evaluation, divided by the counts of that step, so that they add up to the logged loss.
    `eval_loss` is Trainer's mean over batches and `eval_ce` a mean over labels: they differ where batches have
    different numbers of labels. Under "native-distill" `eval_loss` is made of the means of its parts, as a batch may
    have no label. With several ranks, documents that are repeated to fill the last batches count once in both; with
    `compute_metrics`, in `predict`, with images, and where rows hold several documents, they count twice. In
    evaluations of several datasets the parts are called eval_NAME_ce, as the losses are.

    The view is in force while `train`, `evaluate` or `predict` run, and off the model afterwards. One that
    `patch_model` had put on before stays.

    Args:
        model: as in TRL. The folder of an adapter is refused, as its rescaling would not be applied:
            `rope_patch.load_adapter` gives a model that has both. A model by name is refused if its weights are
            missing, misshapen or damaged, as Transformers would draw them at random. A model that `patch_model` has
            patched keeps its patches unless `args` names others, and loses the view of an earlier trainer. A model
            without RoPE trains as with SFTTrainer, if `args` asks for nothing that needs RoPE.
        args: a [`RopeSFTConfig`]; an `SFTConfig` or `TrainingArguments`, which `RopeSFTConfig.of` converts; or None.
        data_collator, train_dataset, eval_dataset, processing_class, compute_loss_func, compute_metrics, callbacks,
        optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics, quantization_config, peft_config,
        formatting_func: as in TRL, in its order.
        **kwargs: arguments of later versions of TRL.
    """

    _tag_names = ["trl", "sft", "rope-patch"]
    _name = "RoPE-SFT"
    sets_clock = True  # of its view; for other trainers rope_patch sets it

    args: RopeSFTConfig
    model: Any  # TRL allows None during __init__
    base_revision: str | None
    """Revision of the base model on the hub, for the model card. Set it if you pass a loaded model."""
    hub_model: dict[str, Any] | None = None
    """Name, revision and commit of the base model, recorded beside checkpoints and used again by resumed runs."""

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
        # 1. Before TRL: the model, the configuration, and what a view or the loss needs of the texts.
        if isinstance(model, str):
            require_no_adapter(model, "model")
        if args is None:  # as TRL names the folder
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
        loading: Any = config.model_init_kwargs or {}  # parsed from JSON by now
        self.base_revision = loading.get("revision") if isinstance(model, str) else None
        peft_config = with_base_revision(peft_config, self.base_revision)
        dataset_facts = DatasetFacts.of(train_dataset)
        if formatting_func is None:
            require_text(train_dataset, "train_dataset", config)  # before a view reads the texts
        config, train_dataset = prepare_text(model, config, train_dataset, processing_class, formatting_func)
        if formatting_func is None:
            config = with_masked_loss(config, train_dataset, eval_dataset)
            require_text(eval_dataset, "eval_dataset", config)
        checkpointing: Any = config.gradient_checkpointing_kwargs or {}
        asked_reentrant = bool(checkpointing.get("use_reentrant"))  # now, as TRL sets it for adapters under ZeRO-3
        self._has_own_collator = data_collator is not None

        # 2. TRL loads the model, adds adapters, tokenizes (`_prepare_dataset` below) and makes the accelerator.
        with loading_options(model, config):
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
        self._check_datasets()
        if not self.is_model_parallel:
            warn_of_idle_gpus(config)

        # 3. The model is patched. Under the engine it is wrapped later, in `train`.
        came_patched = is_patched(self.model)
        if config.needs_rope or has_rope(self.model):
            patch_by_config(self.model, config, self.train_dataset)
        keep_quantised_weights(self.model)
        require_unharmed_codes(self.model, self.accelerator)
        if config.trainable == "qkv":
            train_qkv_only(self.model)
        self._view = TrainerView(self.model)
        source = self._view.source
        view = resolve_view(TRUE_POSITIONS) if source is None else source.view
        method = training_method(config, view, config.seed if source is None else source.clock.seed)
        self._record = RunRecord(self.model, config.output_dir, source, method, dataset_facts)

        # 4. Ranks that share each sequence: in a ring, or by Ulysses, whose batches come split.
        self._ranks = SequenceRanks.of(self.accelerator)
        self._ring = self._ranks if self._ranks is not None and self._ranks.engine == "cp" else None
        self._ulysses = self._ranks if self._ranks is not None and self._ranks.engine == "sp" else None
        if self._ranks is not None:
            check_shared_sequences(self.model, config, self._ranks, self._is_vision_dataset)
            if not self._has_own_collator:
                self._ranks.pad_collator(self.data_collator)

        # 5. The loss of a step, and what is counted for its log.
        self._objective = self._make_objective(asked_reentrant)
        group = config.shifted_group
        self._shifted = None if group is None else ShiftedAttention(self.model, group)
        self._step_counts: dict[str, int] = {}  # divisors of the losses of an optimizer step
        self._means = {mode: self._new_means() for mode in ("train", "eval")}
        self._last_log = (0.0, 0.0)  # tokens and seconds
        self._finite_losses = FiniteLosses(self.accelerator)
        self._batches_left = 0  # of the optimizer step
        self._whole: dict[str, Any] | None = None  # rows of the current batch, where ranks share them
        self._evaluated = 0  # documents of the evaluation so far
        self._only_repeated = False  # whether all rows of the current evaluation batch repeat others

        # 6. Checks that need the rows as well as the model, and the memory that a step will take.
        self.memory_plan: MemoryPlan | None = None
        self._long_rows: LongRowTraining | None = None
        if source is None:
            return
        try:
            check_lengths(self.model, config, source, self._objective, self.train_dataset)
            check_evaluation_lengths(self.model, source, self._objective, self.eval_dataset)
        except ValueError:
            if not came_patched:
                unpatch_model(self.model)
            raise
        teacher = None if self._objective is None else self._objective.teacher
        self.memory_plan, self._long_rows = plan_long_rows(
            self.model,
            config,
            self.train_dataset,
            self.accelerator,
            ranks=self._ranks,
            teacher_copy=teacher if isinstance(teacher, CopiedTeacher) else None,
            has_optimizer=self.optimizer is not None or self.optimizer_cls_and_kwargs is not None,
        )

    def _check_datasets(self) -> None:
        """Refuse token IDs that the model lacks; of sets that TRL does not prepare, also what preparation refuses."""
        vocab_size = getattr(self.model.config.get_text_config(), "vocab_size", None)
        sets = [("train_dataset", self.train_dataset), *named_sets(self.eval_dataset, "eval_dataset")]
        for name, dataset in sets:
            require_known_tokens(dataset, name, vocab_size)
        if self._skip_prepare_dataset and not self._is_vision_dataset:
            require_taught(self.train_dataset, "train_dataset", self.args, self._tokenizer)
            for name, dataset in sets:
                self._require_kept_borders(dataset, name, self.args, packing=False)

    def _make_objective(self, asked_reentrant: bool) -> Objective | None:
        """The objective, None for TRL's own loss."""
        # Under Ulysses TRL's loss is a mean of each micro-batch, however many labels it has: "clm" takes its place.
        if not self.args.has_own_loss and self._ulysses is None:
            check_next_token(self.model, self.args.device)
            return None
        options = self.args.checkpointing_options
        if options.get("use_reentrant") and not asked_reentrant:
            # TRL sets it for adapters under ZeRO-3, where DeepSpeed once failed without (0.19.8 does not:
            # https://github.com/deepspeedai/DeepSpeed/pull/8130): an
            # objective would lose its gradient
            options["use_reentrant"] = False
        check_objective(
            self.model,
            self.args,
            self.accelerator,
            compute_loss_func=self.compute_loss_func,
            aux_loss_coef=self.router_aux_loss_coef if self.aux_loss_enabled else 0.0,
            has_images=self._is_vision_dataset,
        )
        objective = objective_of(self.args).build(self.model, self.args, self.accelerator)
        self.model_accepts_loss_kwargs = True  # also for families whose own loss takes no count of the step
        if isinstance(objective.teacher, CopiedTeacher):
            hold_like_student(objective.teacher, self.accelerator)
        return objective

    # Rows. SFTTrainer.__init__ calls `_prepare_dataset` once for each set, and `evaluate` for sets that it is given.

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """TRL's preparation, which also logs in one line what is left out."""

        def prepare(documents: Any, args: RopeSFTConfig, packing: bool) -> Any:
            formatting = formatting_func if documents is dataset else None  # which makes text, once
            return super(RopeSFTTrainer, self)._prepare_dataset(
                documents, processing_class, args, packing, formatting, dataset_name
            )

        is_one = dataset_name in ("train", "eval")
        name = f"{dataset_name}_dataset" if is_one else f"eval_dataset[{dataset_name!r}]"
        self._require_kept_borders(dataset, name, args, packing)
        return prepare_rows(dataset, name, args, self._tokenizer, packing, prepare)

    def _require_kept_borders(self, dataset: Any, name: str, args: RopeSFTConfig, packing: bool) -> None:
        if not self._has_own_collator:  # which may know of seq_lengths
            require_kept_borders(dataset, name, args, packing)

    # A run. `train` calls `_inner_training_loop`, which calls `get_batch_samples` once an optimizer step.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; a checkpoint of another RoPE or another method is refused.

        Args:
            resume_from_checkpoint: a checkpoint to resume from; True takes the newest whole one in `output_dir`.
            *args: as in TRL.
            **kwargs: as in TRL.

        Raises:
            ValueError: the checkpoint was trained with other RoPE frequencies, another view, objective or option of
                theirs, other adapters, or other rows or another order of rows (unless `ignore_data_skip` begins with
                the first row again); no checkpoint is whole; or `output_dir` holds an adapter, and this run trains
                none.
        """
        require_no_adapter_beside(self.model, str(self.args.output_dir))  # not only when it saves, after the training
        output_dir = Path(str(self.args.output_dir))
        if resume_from_checkpoint is True:
            # Trainer would take the newest, which is incomplete if a run was killed while it saved
            newest = last_checkpoint(output_dir)
            if newest is None and any(output_dir.glob("checkpoint-*")):
                raise ValueError(
                    f"{output_dir} has no whole checkpoint: a run that is killed while it saves its first leaves a "
                    "part of one. Leave resume_from_checkpoint out, which begins anew."
                )
            resume_from_checkpoint = True if newest is None else str(newest)  # Trainer refuses True here
        if resume_from_checkpoint and not isinstance(resume_from_checkpoint, bool):
            if self._view.source is not None:
                require_same_rope(self.model, resume_from_checkpoint)
            require_same_method(self._record.method, resume_from_checkpoint)
            require_same_adapters(self.model, resume_from_checkpoint)
            require_same_data(self.train_dataset, self.args, resume_from_checkpoint)
            self._total_train_tokens = tokens_until(resume_from_checkpoint)
        if self.accelerator.is_main_process:
            warn_of_lost_steps(self.model, self.args.learning_rate)
        with self._view.in_force(self.model):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop, which `auto_find_batch_size` may begin several times in one `train`."""
        self._metrics["train"].clear()  # discard metrics of an interrupted loop
        return super()._inner_training_loop(*args, **kwargs)

    # An optimizer step. `get_batch_samples` reads all of its batches, `training_step` runs each of them, `compute_loss`
    # inside it gives the loss, `_get_grad_norm` comes before the optimizer, and `log` writes the means of the step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """All micro-batches of an optimizer step, and the count by which TRL divides its loss.

        Each batch carries the ordinal of its first document within the step, and whole rows where ranks share them.
        """
        if 0 < self.state.max_steps <= self.state.global_step:
            # Trainer looks for the end only after a step: resumed from its last checkpoint it would take one more
            self.control.should_training_stop = True
            return [], None
        self._means["train"] = self._new_means()  # discard sums of an interrupted step
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._ulysses is not None and not batches:
            # DeepSpeed 0.19 reports the end of an epoch at the start of the next one, which would lose a step
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches_left = len(batches)
        if self._objective is not None:
            self._objective.begin(self.state.global_step)
        if not batches:
            return batches, num_items
        # under Ulysses batches come split, and documents and labels are counted in whole rows
        rows = batches if self._ulysses is None else [self._ulysses.whole_rows(batch) for batch in batches]
        firsts = [0] * len(batches)
        if self._view.perturbs:
            require_borders(batches, self.args)
            firsts, _ = number_documents(rows, self.accelerator, device, self._ranks)
            for batch, first in zip(batches, firsts, strict=True):
                batch[FIRST_SAMPLE] = first
            # before rows are padded for a ring, and before their tokens are counted
            if cut_documents(batches, self._view, self.state):
                num_items = self._get_num_items_in_batch(batches, device)
        if self._ring is not None:  # which splits a batch in place, in its step
            rows = [self._ring.whole_rows(batch) for batch in batches]
        if self._ranks is not None:
            for batch, whole in zip(batches, rows, strict=True):
                batch[WHOLE_ROWS] = whole
        if self._objective is not None:
            counts = []
            for batch, first in zip(rows, firsts, strict=True):
                self._view.set_clock(self.state, first)  # counts may depend on draws
                counts.append(self._objective.counts(self._objective.read(batch)))
            over_all_ranks = self.args.average_tokens_across_devices
            self._step_counts = total_counts(
                counts, self.accelerator, device, self._ranks, over_all_ranks=over_all_ranks
            )
            # a non-None num_items stops Trainer from dividing again by gradient_accumulation_steps
            num_items = self._step_counts["tokens"]
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch, whose draws are keyed by optimizer step and document."""
        model.train()  # Trainer does so later: an objective patches other things in training than in evaluation
        self._view.set_clock(self.state, inputs.pop(FIRST_SAMPLE, 0))  # here, for a user's own compute_loss too
        self._whole = inputs.pop(WHOLE_ROWS, None)
        with ExitStack() as stack:
            for part in (self._long_rows, self._objective, self._shifted):  # the last one sees attention calls first
                if part is not None:
                    stack.enter_context(part.active())
            loss = super().training_step(model, inputs, *args, **kwargs)
        self._whole = None
        if self._ulysses is not None:
            # for the log: the mean over ranks need not be what DeepSpeed makes of their gradients
            over_all_ranks = self.args.average_tokens_across_devices
            n_parts = self.accelerator.num_processes if over_all_ranks else self._ulysses.size
            loss = loss * (n_parts / gradient_factor(self.accelerator, over_all_ranks=over_all_ranks))
        if getattr(self.compute_loss, "__func__", None) is not RopeSFTTrainer.compute_loss:
            # a user's own compute_loss, which has not checked; each check waits for the GPU
            self._finite_losses.require(loss, self.state.global_step)
        if self._view.perturbs and (self._objective is None or self._objective.draws):
            self._means["train"].add(self._view.drawn())
        self._batches_left -= 1
        if self._batches_left == 0:  # reduced over ranks once a step: they wait for each other there
            for name, mean in self._means["train"].take().items():
                self._metrics["train"][name].append(mean)
        return loss

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Trainer's splitting of a batch inside the step, which changes the batch's tensors in place."""
        if self._ring is not None:
            inputs = self._ring.ring_inputs(inputs)
        return super()._prepare_context_parallel_inputs(model, inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch: TRL's own, or the objective's."""
        with ExitStack() as stack:
            if self._ranks is not None and self._whole is not None and self._view.source is not None:
                stack.enter_context(self._ranks.shard_in_force(self.model, self._whole, inputs))
            if self._objective is None:
                with counts_of_all_ranks(self.accelerator):
                    result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            else:
                result = self._objective_loss(model, inputs)
        if self.model.training:  # before backward, in which DeepSpeed takes its step
            loss = result[0] if isinstance(result, tuple) else result
            self._finite_losses.require(loss, self.state.global_step)
        return result

    def _objective_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """The objective's loss of a batch; its parts are added to the means that are logged."""
        assert self._objective is not None
        mode = "train" if self.model.training else "eval"
        shard = self._objective.shard
        read = self._objective.read(inputs if shard is None else shard.batch)
        batch_counts = self._objective.counts(read)
        counts = self._step_counts if mode == "train" else {name: max(value, 1) for name, value in batch_counts.items()}
        loss, parts = self._objective.loss(model, inputs, read, counts, batch_counts)
        if mode == "eval" and self._only_repeated:
            parts = {name: (torch.zeros_like(total), 0.0) for name, (total, _) in parts.items()}
        # sums are over the rank's own tokens; counts are of whole rows, which each rank that shares them adds
        n_sharing = 1 if shard is None else shard.size
        self._means[mode].add({name: (total, count / n_sharing) for name, (total, count) in parts.items()})
        if mode == "train":
            tokens = torch.tensor(batch_counts["tokens"], device=loss.device)
            self._total_train_tokens += self.accelerator.gather(tokens).sum().item() // n_sharing
            # engines average gradients over ranks, and the loss is already divided by counts of all of them
            loss = loss * gradient_factor(self.accelerator, over_all_ranks=self.args.average_tokens_across_devices)
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's norm of the gradients, which it computes before each optimizer step, with and without clipping."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self._finite_losses.require_gradient(norm, self.state.global_step)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, with tokens per second since the last one."""
        if self.model.training and "loss" in logs:
            (before, then), now = self._last_log, (float(self._total_train_tokens), time.perf_counter())
            self._last_log = now
            if then and now[0] > before:  # not in the first log, whose beginning is not known
                self._metrics["train"]["tokens_per_second"].append((now[0] - before) / (now[1] - then))
        super().log(logs, start_time)

    def _new_means(self) -> StepMeans:
        return StepMeans(self.accelerator, ranks_alike=not self.args.average_tokens_across_devices)

    # An evaluation. `evaluate` and `predict` call `evaluation_loop`, which calls `prediction_step` for each batch.

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's evaluation under the view of this trainer, also after training."""
        with self._view.in_force(self.model):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's prediction under the view of this trainer, also after training."""
        with self._view.in_force(self.model):
            return super().predict(*args, **kwargs)

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
        self._means["eval"] = self._new_means()  # discard sums of an interrupted loop
        if self._ring is not None:
            self.gather_function = self._ring.gather_of_rings  # Trainer sets its own again for the next loop
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        forget_unfinished_forwards(self.model)
        metrics = cast(dict[str, float], output.metrics)
        means = self._means["eval"].take()
        metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        loss = None if self._objective is None else self._objective.evaluation_loss(means)
        if loss is not None:
            metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """TRL's step, with the objective's loss. Ulysses is off here: each rank has rows of its own."""
        inputs = self._prepare_inputs(inputs)
        # with logits the repeated rows stay, as those of all ranks are gathered; an image is not a row of a tensor
        self._only_repeated = False
        if prediction_loss_only and not self._is_vision_dataset:
            reader = self.args.process_index // (1 if self._ring is None else self._ring.size)
            state, batch_size = self.accelerator.gradient_state, self.args.eval_batch_size
            inputs, self._only_repeated = without_repeated(inputs, state, batch_size, reader)
        first_sample = 0  # ordinal of the batch's first document, by which it draws
        if self._view.perturbs or self._objective is not None:
            (before,), n_documents = number_documents([inputs], self.accelerator, self.args.device, self._ring)
            first_sample = self._evaluated + before
            self._evaluated += n_documents
        self._view.set_evaluation_clock(first_sample)
        with ExitStack() as stack:
            if self._long_rows is not None:
                stack.enter_context(self._long_rows.active())
            if self._objective is not None:
                self._objective.begin(None, first_sample)
            if self._ring is not None:
                result = self._predict_in_ring(model, inputs, prediction_loss_only)
            elif self._objective is None:
                result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            else:
                stack.enter_context(torch.no_grad())
                stack.enter_context(self.compute_loss_context_manager())
                with self._objective.active():
                    loss = self.compute_loss(model, inputs)
                logits = labels = None
                if not prediction_loss_only:  # the objective's forward makes no logits
                    labels = inputs.pop("labels", None)
                    logits = model(**inputs, use_cache=False).logits
                result = loss, logits, labels
        log_broken_evaluation(result[0])
        return result

    def _predict_in_ring(self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool) -> Any:
        """An evaluation step whose rows are split as in training; Trainer runs whole rows on every rank."""
        assert self._ring is not None
        if not prediction_loss_only:
            raise ValueError(
                "predictions and compute_metrics are given logits of whole rows, of which each rank of a ring "
                "(cp_size) has a part: leave compute_metrics out and set prediction_loss_only=True."
            )
        self._whole = self._ring.whole_rows(inputs)
        n_labels = torch.tensor(Labelled.of(self._whole).n_labels, device=self.args.device)
        split, inputs = self._prepare_context_parallel_inputs(model, inputs)
        try:
            with torch.no_grad(), self.compute_loss_context_manager(), split():
                if self._objective is not None:
                    with self._objective.active():
                        loss = self.compute_loss(model, inputs)
                else:
                    loss = self.compute_loss(model, inputs, num_items_in_batch=n_labels)
                    if self.args.average_tokens_across_devices:  # undo TRL's factor for an average over ranks
                        loss = loss / self.accelerator.num_processes
        finally:
            self._whole = None
        return self._ring.sum_over(loss), None, None

    # Files. Trainer calls `save_model` at the end and in `_save_checkpoint`, and pushes to the hub from either.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's saving, also of checkpoints, with a record of what was trained with and a model card.

        Under FSDP the final model is one plain checkpoint, whatever `fsdp_state_dict_type` is. Under SHARDED_STATE_DICT
        the checkpoints of training have weights in parts, and beside them config, tokenizer and the files of an
        adapter, so that the merged weights load.

        Raises:
            FloatingPointError: a weight that is trained is not finite.
        """
        require_finite_weights(self.model)
        folder = Path(output_dir or str(self.args.output_dir))
        with disk_full_errors(folder, self._how_to_go_on):
            if self.args.should_save:
                self._record.write_before_weights(self._saved_run(), folder)
                keep_count(self.state, self._total_train_tokens)
            with nullcontext() if _internal_call else weights_gathered(self.accelerator):
                if saves_in_parts(self.accelerator):
                    self._save(str(folder), state_dict={})
                    if self.args.should_save:
                        remove_weights(folder)
                super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                if is_patched(self.model):
                    widen_tokenizer_of(folder, self.model)
                self._record.write_after_weights(self._saved_run(), folder)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """TRL's saving of weights, optimizer and states; the error of a full disk says how to go on."""
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        with disk_full_errors(folder, self._how_to_go_on):
            super()._save_checkpoint(*args, **kwargs)

    def _how_to_go_on(self) -> str:
        checkpoint = last_checkpoint(Path(str(self.args.output_dir)))
        if checkpoint is None:
            return "Free some space, and run the same again: no checkpoint is whole yet."
        return (
            "Free some space, and run the same again: `rope-patch extend` and recipes with stages go on from "
            f"{checkpoint}, the newest that is whole, and other recipes and scripts with "
            f"resume_from_checkpoint={str(checkpoint)!r}."
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer's push of a checkpoint during training, with the record and the RoPE of its adapter.

        Trainer copies files to `output_dir` by a list of names that has none of ours.
        """
        earlier: Any = self.push_in_progress
        busy = earlier is not None and not earlier.is_done()
        if self.args.hub_strategy == HubStrategy.END or (busy and not self.args.hub_always_push):
            return  # as Trainer does: files that lie beside other weights would not belong to them
        if self.is_world_process_zero():
            self._record.copy(Path(checkpoint_folder), Path(str(self.args.output_dir)))
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(  # type: ignore[override]  # TRL's arguments differ from Trainer's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card into `output_dir`, as TRL does; a README.md that somebody wrote or edited is kept.

        Args:
            model_name: title of the card.
            dataset_name: of the training set, if it has none itself.
            tags: for the hub, besides those of TRL and of this package.
        """
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir))
            run = self._saved_run()
            self._record.write_card(run, folder, title=model_name, dataset_name=dataset_name, tags=tags)

    def _saved_run(self) -> SavedRun:
        return SavedRun(
            model=self.model,
            args=self.args,
            train_dataset=self.train_dataset,
            processing_class=self.processing_class,
            lr_scheduler=self.lr_scheduler,
            steps=self.state.global_step,
            tokens=int(self._total_train_tokens),
            base_revision=self.base_revision,
            hub_model=self.hub_model,
            hub_model_id=self.hub_model_id,
            tags=self._tag_names,
        )
