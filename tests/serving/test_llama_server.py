"""An exported GGUF in llama.cpp's own server."""

import json
import socket
import subprocess
import time
from contextlib import contextmanager
from random import Random
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from serving.programs import PROGRAMS, converter_packages, llama_cpp_sources
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import export, patch_model
from rope_patch.prompts.needles import make_prompt
from rope_patch.prompts.wordings import PASSKEY_WORDINGS
from trl_ext.demo.model import embedded_file, unpack_embedded

SERVED_LENGTH = 2048
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WORDING = 2  # of passkeys: this model answers it with the number first
WRITTEN = 12  # tokens


@pytest.mark.slow
@torch.no_grad()
def test_a_gguf_of_an_extended_smollm2_answers_in_llama_server(tmp_path, monkeypatch):
    if PROGRAMS["llama.cpp"].missing or not (server := llama_cpp_sources() / "build" / "bin" / "llama-server").exists():
        pytest.skip('llama-server is not compiled: run python tests/serving/programs.py "llama.cpp"')
    try:
        embedded_file()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("PYTHONPATH", str(converter_packages()))
    monkeypatch.syspath_prepend(converter_packages())
    unpack_embedded(tmp_path / "native")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "native", dtype=torch.float32)
    patch_model(model, "yarn", factor=8.0)
    converter = llama_cpp_sources() / "convert_hf_to_gguf.py"
    done = export(model, tmp_path / "yarn", target="llama.cpp", converter=converter)
    assert done.difference == 0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "yarn")
    filler = tokenizer(PASSKEY_WORDINGS[WORDING].filler, add_special_tokens=False)["input_ids"] * 100
    hidden = {"n_tokens": 512, "depth": 0.4, "n_needles": 1, "rng": Random(0), "wording": WORDING}
    passkey = make_prompt("passkey", tokenizer, filler, **hidden)
    with serving(server, tmp_path / "yarn" / "model.gguf") as ask:
        text = ask("/completion", prompt=passkey.ids, n_predict=WRITTEN, temperature=0)["content"]
        assert passkey.answers[0] in text
        reply = ask("/v1/chat/completions", messages=QUESTION, max_tokens=WRITTEN, temperature=0)
    written = reply["choices"][0]["message"]["content"]
    assert "Paris" in written
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ours = model.generate(**asked, max_new_tokens=WRITTEN, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(ours, skip_special_tokens=True).strip() == written.strip()


@contextmanager
def serving(server, gguf):
    """Start the server, and give what posts JSON to one of its paths."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-m", gguf, "-c", SERVED_LENGTH, "--host", "127.0.0.1", "--port", port, "-t", 1, "-np", 1]
    process = subprocess.Popen([server, *map(str, options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path, **fields):
        request = Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=600) as answer:
            return json.load(answer)

    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address, process, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, f"llama-server ended with {process.returncode}"
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"llama-server does not answer within {seconds} s")
