"""A checkpoint with custom modeling code (`trust_remote_code`)."""

import json
from pathlib import Path

from .tiny import tiny

MODEL_TYPE = "llama_of_its_own"
CONFIG = f"""from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "{MODEL_TYPE}"
"""
MODEL = """from transformers import LlamaForCausalLM

from .configuration import OwnConfig


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def save_with_own_code(folder: Path, **options) -> None:
    """Save a tiny Llama in `folder` as a model of a type that Transformers does not know.

    Args:
        folder: gets config, weights and code.
        **options: of the tiny model.
    """
    tiny(**options).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration.OwnConfig", "AutoModelForCausalLM": "modeling.OwnModel"}
    config |= {"model_type": MODEL_TYPE, "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration.py").write_text(CONFIG)
    (folder / "modeling.py").write_text(MODEL)
