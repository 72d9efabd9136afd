"""Random orders of everything that is done to a model, against one to which only what should be in force is done once.

The twin is never patched. It is wrapped, merged and trained by the same calls, and for each comparison it gets the
rotary module that Transformers builds from the config that should be in force, and positions that should be RoPE's.
"""

import copy
import inspect
import io
import logging
import pickle
import re
import tempfile
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from peft import LoraConfig, PeftModel, get_peft_model
from support.tiny import gemma3, tiny, tokens
from transformers import AutoModelForCausalLM

from rope_patch import describe, load_adapter, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.patch import view_source
from rope_patch.rescalings import ABF, NTK, PI, Llama3, Yarn
from rope_patch.views import PosAug, Skip, Standard, Uniform

LENGTH = 24
NEW = 3
FAMILIES = {"llama": tiny, "gemma3": gemma3}
RESCALINGS = [PI(factor=2.0), Yarn(factor=4.0), NTK(factor=2.0), Llama3(factor=4.0), ABF(theta=1e6)]
VIEWS = [Skip(skip=Uniform(1, 40)), Skip(split=7, skip=30), PosAug(), Standard()]
TABLE = "a table of indices"

# refusals that the docstrings of `patch_model`, `unpatch_model` and `native_rope` name
INSIDE_NATIVE = "inside native_rope: leave the block first"  # its end puts back the RoPE parameters that it found
INSIDE_VIEW = "called inside rope_view: leave the block first"  # which would be left without a model
COPIED_NATIVE = "copying or pickling the model was called inside native_rope"  # the copy's block would never end

NO_START = "starts from RoPE parameters of type .*; this model was trained with"  # which would be lost


@cache
def ids():
    torch.manual_seed(5)
    return tokens(2, LENGTH)


@cache
def table():
    return torch.arange(LENGTH)[None] * 3 % 61


@cache
def config_of(family, rescalings):
    """The config that Transformers needs for `rescalings` one after the other, each on the merged checkpoint."""
    if not rescalings:
        return FAMILIES[family]().config
    before = config_of(family, rescalings[:-1])
    model = type(FAMILIES[family]())(copy.deepcopy(before))
    return patch_model(model, rescalings[-1]).config


@cache
def index_of(view, seed, step):
    """RoPE indices of the token positions, [2 or 1, LENGTH], of the forward number `step` under a view."""
    model = patch_model(tiny(), view, seed=seed, when="always")
    source = view_source(model)
    source.clock.step.fill_(step)
    model(ids(), use_cache=False)
    return source.last(torch.arange(LENGTH)[None]).expand(2, -1)


def decoder_of(model):
    return model.get_base_model().get_decoder() if isinstance(model, PeftModel) else model.get_decoder()


def core_of(model):
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _moved_to(index):
    """A hook that gives a rotary module other indices, but for sliding layers."""

    def move(module, args, kwargs):
        called = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if called.get("layer_type") != "sliding_attention":
            called["position_ids"] = index
        return (), called

    return move


def lora(seed):
    torch.manual_seed(seed)
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


class Sampled:
    """A view in force: of the model, or of a block."""

    def __init__(self, view, seed, when="always", step=0):
        self.view, self.seed, self.when, self.step = view, seed, when, step

    def take(self):
        """The indices of the next forward, which moves it on."""
        if self.view is TABLE:
            return table().expand(2, -1)
        self.step += 1
        return index_of(self.view, self.seed, self.step - 1)


class Orders(RuleBasedStateMachine):
    family = "llama"

    @initialize()
    def load(self):
        self.ids = ids()
        self.model, self.twin = FAMILIES[self.family](), FAMILIES[self.family]()
        self.base_weights = copy.deepcopy(self.twin.state_dict())
        self.baked = ()  # rescalings of the checkpoint that was loaded
        self.settled = ()  # of the adapter that was loaded
        self.rescaling = None
        self.sampled = None  # the view of patch_model
        self.blocks = []  # open ones: context manager, the view or None for native_rope, whether there were hooks
        self.checkpointing = False
        self.adapters = 0

    # what should be in force

    @property
    def native(self):
        return any(sampled is None for _, sampled, _ in self.blocks)

    @property
    def held(self):
        """Whether there is a native_rope with other RoPE parameters to put back."""
        return any(sampled is None and hooked for _, sampled, hooked in self.blocks)

    @property
    def views(self):
        return [sampled for _, sampled, _ in self.blocks if sampled is not None]

    @property
    def rescalings(self):
        return (*self.baked, *self.settled, *([] if self.rescaling is None else [self.rescaling]))

    @property
    def patched(self):
        return bool(self.settled) or self.rescaling is not None or self.sampled is not None

    def active(self, training):
        if self.views:
            return self.views[-1]
        if self.sampled is not None and (training or self.sampled.when == "always"):
            return self.sampled
        return None

    def twin_with(self, rescalings):
        twin = copy.deepcopy(self.twin)
        config = copy.deepcopy(config_of(self.family, rescalings))
        decoder = decoder_of(twin)
        decoder.rotary_emb = type(decoder.rotary_emb)(config)
        return twin

    def expected(self, training, native=None, active="own"):
        """Twin and positions of the next forward."""
        native = self.native if native is None else native
        twin = self.twin_with(self.baked if native else self.rescalings)
        active = self.active(training) if active == "own" else active
        return twin, None if active is None else active.take()

    def same(self, model, twin, index, training):
        """Logits, and in training a gradient, of a model and of the twin at RoPE indices, bit for bit at true ones."""
        model.train(training), twin.train(training)
        results, gradients = [], []
        if index is not None:
            decoder_of(twin).rotary_emb.register_forward_pre_hook(_moved_to(index), with_kwargs=True)
        for each in (model, twin):
            each.zero_grad()
            logits = each(self.ids, use_cache=False).logits
            if training:
                logits.square().mean().backward()
                gradients.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
            results.append(logits.detach())
        tolerance = {"rtol": 0, "atol": 0} if index is None else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(*results, **tolerance)
        if training:
            assert gradients[0].keys() == gradients[1].keys() and gradients[0]
            for name, gradient in gradients[0].items():
                torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5)

    @invariant()
    def runs_as_it_should(self):
        training = self.model.training
        self.same(self.model, *self.expected(training), training)
        expected = config_of(self.family, self.rescalings)
        for config in (core_of(self.model).config, decoder_of(self.model).config):
            assert config.rope_parameters == expected.rope_parameters
            assert config.max_position_embeddings == expected.max_position_embeddings
        assert describe(self.model).patched == (self.patched or bool(self.blocks and self.hooked))

    @property
    def hooked(self):
        """Whether a block has put hooks on; native_rope alone leaves an unpatched model as it is."""
        return hasattr(decoder_of(self.model), "_rope_patch")

    # patches

    def target(self, inner):
        return core_of(self.model) if inner else self.model

    @rule(rescaling=st.sampled_from(RESCALINGS), inner=st.booleans())
    def rescale(self, rescaling, inner):
        if self.native:
            with pytest.raises(ValueError, match=INSIDE_NATIVE):
                patch_model(self.target(inner), rescaling)
            return
        try:
            config_of(self.family, (*self.baked, *self.settled, rescaling))
        except ValueError as refusal:
            assert re.search(NO_START, str(refusal))
            with pytest.raises(ValueError, match=NO_START):
                patch_model(self.target(inner), rescaling)
            return
        assert patch_model(self.target(inner), rescaling) is self.target(inner)
        self.rescaling = rescaling

    @rule(
        view=st.sampled_from(VIEWS),
        when=st.sampled_from(["train", "always"]),
        seed=st.integers(0, 1),
        inner=st.booleans(),
    )
    def sample(self, view, when, seed, inner):
        if self.native:
            with pytest.raises(ValueError, match=INSIDE_NATIVE):
                patch_model(self.target(inner), view, when=when, seed=seed)
            return
        patch_model(self.target(inner), view, when=when, seed=seed)
        self.sampled = Sampled(view, seed, when)

    @rule(inner=st.booleans())
    def unpatch(self, inner):
        if self.blocks and self.hooked:
            with pytest.raises(ValueError, match=INSIDE_NATIVE if self.held else INSIDE_VIEW):
                unpatch_model(self.target(inner))
            return
        unpatch_model(self.target(inner))
        self.settled, self.rescaling, self.sampled = (), None, None
        if not self.blocks:
            assert not self.hooked
            self.same(self.model.eval(), self.twin_with(self.baked), None, False)

    # blocks, which may end in any order

    @rule(view=st.sampled_from([*VIEWS, TABLE]), seed=st.integers(0, 1), inner=st.booleans())
    @precondition(lambda self: len(self.blocks) < 3)
    def open_view(self, view, seed, inner):
        if view is TABLE:
            self.enter(rope_view(self.target(inner), index=table()), Sampled(TABLE, 0))
        else:
            self.enter(rope_view(self.target(inner), view, seed=seed), Sampled(view, seed))

    @rule(inner=st.booleans())
    @precondition(lambda self: len(self.blocks) < 3)
    def open_native(self, inner):
        self.enter(native_rope(self.target(inner)), None)

    def enter(self, block, sampled):
        hooked = self.hooked
        block.__enter__()
        self.blocks.append((block, sampled, hooked))

    @rule(which=st.integers(0, 2), raises=st.booleans())
    @precondition(lambda self: self.blocks)
    def close(self, which, raises):
        block, *_ = self.blocks.pop(which % len(self.blocks))
        error = RuntimeError("stop") if raises else None
        assert not block.__exit__(error and RuntimeError, error, None)
        if not self.blocks and not self.patched:
            assert not self.hooked

    # saving, copying

    @rule(gathered=st.booleans())
    def save_and_reload(self, gathered):
        weights = self.twin.state_dict() if gathered else None  # equal ones, as DeepSpeed ZeRO-3 hands them over
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder, state_dict=weights)
            if isinstance(self.model, PeftModel):
                hooked = self.hooked
                base = type(core_of(self.model))(copy.deepcopy(config_of(self.family, self.baked)))
                base.load_state_dict(self.base_weights)
                loaded = (load_adapter if hooked else PeftModel.from_pretrained)(base, folder, is_trainable=True)
                if self.adapters == 2:
                    loaded.load_adapter(f"{folder}/other", "other", is_trainable=True)
                    loaded.set_adapter(self.model.active_adapter)
                always = self.sampled is not None and self.sampled.when == "always"
                sampled = Sampled(self.sampled.view, self.sampled.seed) if always else None
            else:
                loaded, sampled = AutoModelForCausalLM.from_pretrained(folder), None
        twin = self.twin_with(self.rescalings)
        self.same(loaded.eval(), twin, None if sampled is None else sampled.take(), False)
        if self.blocks:
            return
        loaded.train(self.model.training)
        if isinstance(self.model, PeftModel):
            self.settled, self.rescaling = (*self.settled, *([self.rescaling] if self.rescaling else [])), None
        else:
            self.baked, self.settled, self.rescaling = self.rescalings, (), None
            self.twin.config = decoder_of(self.twin).config = copy.deepcopy(config_of(self.family, self.baked))
        self.model, self.sampled, self.checkpointing = loaded, sampled, False
        core_of(self.twin).gradient_checkpointing_disable()

    @rule(how=st.sampled_from(["deepcopy", "pickle", "torch.save"]))
    def make_a_copy(self, how):
        if self.checkpointing:
            how = "deepcopy"  # Transformers hangs a local function on such a model, which cannot be pickled
        if self.held:
            with pytest.raises(ValueError, match=COPIED_NATIVE):
                self.copied(how)
            return
        twin = self.copied(how)
        sampled = copy.copy(self.sampled)
        training = self.model.training
        active = sampled if sampled is not None and (training or sampled.when == "always") else None
        self.same(twin, *self.expected(training, native=False, active=active), training)
        if self.blocks:
            unpatch_model(twin)
            self.same(twin, self.twin_with(self.baked), None, False)
        else:
            self.model, self.sampled = twin, sampled

    def copied(self, how):
        if how == "deepcopy":
            return copy.deepcopy(self.model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(self.model))
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    # adapters

    @rule(seed=st.integers(0, 3))
    @precondition(lambda self: not isinstance(self.model, PeftModel))
    def wrap(self, seed):
        training = self.model.training
        self.model = get_peft_model(self.model, lora(seed))
        self.twin = get_peft_model(self.twin, lora(seed))
        self.model.train(training)
        self.adapters = 1

    @rule()
    @precondition(lambda self: isinstance(self.model, PeftModel))
    def merge(self):
        training = self.model.training
        self.model, self.twin = self.model.merge_and_unload(), self.twin.merge_and_unload()
        self.model.requires_grad_(True), self.twin.requires_grad_(True)  # PEFT leaves them frozen
        self.model.train(training)
        self.base_weights = copy.deepcopy(self.twin.state_dict())

    @rule(seed=st.integers(0, 3))
    @precondition(lambda self: isinstance(self.model, PeftModel) and self.adapters < 2)
    def add(self, seed):
        for model in (self.model, self.twin):
            model.add_adapter("other", lora(seed))
        self.adapters = 2

    @rule(name=st.sampled_from(["default", "other"]))
    @precondition(lambda self: isinstance(self.model, PeftModel) and self.adapters == 2)
    def choose(self, name):
        for model in (self.model, self.twin):
            model.set_adapter(name)

    # modes

    @rule(training=st.booleans())
    def switch(self, training):
        self.model.train(training)

    @rule()
    @precondition(lambda self: not self.checkpointing)
    def checkpoint(self):
        for model in (self.model, self.twin):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.checkpointing = True

    @rule()
    @precondition(lambda self: not (self.checkpointing and self.model.training))
    def generate(self):
        active = self.active(training=False)
        if active is not None and active.view is TABLE:
            with pytest.raises(ValueError, match="index must be"):  # a table of the prompt alone
                self.replies(self.model)
            return
        twin, _ = self.expected(False, active=None)
        twin.train(self.model.training)
        if active is not None:
            core_of(twin).config = decoder_of(twin).config = decoder_of(twin).rotary_emb.config
            source = view_source(patch_model(twin, active.view, seed=active.seed, when="always"))
            source.clock.step.fill_(active.step)
            active.take()
        assert torch.equal(self.replies(self.model), self.replies(twin))

    def replies(self, model):
        return model.generate(
            input_ids=self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=NEW,
            min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    def teardown(self):
        for block, *_ in self.blocks:
            block.__exit__(None, None, None)


def run(family, examples, steps, **how):
    machine = type(f"Orders_{family}", (Orders,), {"family": family})
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, **how,
    )  # fmt: skip
    logging.getLogger("transformers").setLevel(logging.ERROR)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_orders(family):
    run(family, examples=3, steps=8, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_orders(family):
    run(family, examples=20, steps=25, derandomize=True)
