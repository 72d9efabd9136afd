"""One small vocabulary for all stand-ins, with the special tokens of each family and TRL's chat templates."""

import re
from dataclasses import dataclass
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SIZE = 1200

# what a model, a processor or a test asks for by name; templates name the rest
NAMED = (
    *("<|endoftext|>", "<|startoftext|>", "<|finetune_right_pad_id|>", "<pad>", "<PAD>", "<s>", "</s>", "<unk>"),
    *("<|im_start|>", "<|im_end|>", "<|return|>", "<|eot_id|>", "<|begin_of_text|>", "<bos>", "<eos>", "<BOS_TOKEN>"),
    *("<|END_OF_TURN_TOKEN|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<image>"),
    *("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"),
)


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE; `tokenizer` makes a tokenizer of it."""

    core: str  # as JSON, since a Tokenizer is changed by what is made of it

    @classmethod
    def trained_on(cls, scripts: list[Path]) -> "Vocabulary":
        """Train on the scripts that hold the texts of TRL's datasets, so that rows are as short as TRL's."""
        of_templates = set()
        for template in TEMPLATES.glob("*.jinja"):
            of_templates |= set(re.findall(r"<\|[A-Za-z_]+\|>", template.read_text()))
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=[*NAMED, *sorted(of_templates - set(NAMED))],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train([str(script) for script in scripts], trainer)
        return cls(core.to_str())

    def tokenizer(
        self,
        template: str | None,
        *,
        eos: str = "<|im_end|>",
        pad: str = "<|endoftext|>",
        bos: str | None = None,
        adds_bos: bool = False,
        **named: object,
    ) -> PreTrainedTokenizerFast:
        """A tokenizer with a chat template of TRL's by name; `adds_bos`: texts begin with `bos`, as Llama's do."""
        core = Tokenizer.from_str(self.core)
        if adds_bos:
            core.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, core.token_to_id(bos))]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=pad, bos_token=bos, **named)
        if template is not None:
            tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        return tokenizer
