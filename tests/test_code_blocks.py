"""Every code block of the pages runs, or its commands are checked, or a comment before it has the reason why not.

Python blocks of a page run one after the other, as they stand but for `SHORTER`, in a folder that holds tiny models
under the names of the hub. A command is parsed by the program that it names; `rope-patch new`, and pip and pytest for
what it has written, run. A block that can be neither is preceded by
`<!-- skip: next "the reason" -->`, which no reader of the page sees.
"""

import argparse
import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
import yaml
from datasets import Dataset
from support.characters import CHARACTERS, character_tokenizer
from support.packages import pip_install, run_python
from support.pages import is_made
from support.tiny import tiny
from sybil import Document, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import FENCE, RawFencedCodeBlockLexer
from transformers import AutoModelForCausalLM
from trl import DPOConfig

from rope_patch.eval import MEASURES
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import LAWS, VIEWS
from trl_ext import RopeSFTConfig
from trl_ext.cli.console import _parser
from trl_ext.cli.model_spec import ModelSpec
from trl_ext.objectives import OBJECTIVES
from trl_ext.recipes.launching import Launch, config_names
from trl_ext.recipes.stages import FIELDS

REGISTRIES = VIEWS, LAWS, RESCALINGS, OBJECTIVES, MEASURES
SITE = "site-packages"  # of a workplace: what a notebook installs
ROOT = Path(__file__).parents[1]
FOLDERS = ["benchmarks", "docs", "examples", "kernels", "research", "tests"]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md") if not is_made(page)),
]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCT, LLAMA, QWEN = "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-4B"
WINDOWS = {INSTRUCT: 8192, LLAMA: 8192, QWEN: 40960}
TEXT = "It was a dark night. The wind blew! Who was there? " * 40
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EOS, SPECIAL = 2, [0, 1, 3, 127, 128, 129]

# lengths and numbers that are for a real model, on a real machine
SHORTER = {
    "docs/evaluation.md": {"32768": "600", "4096": "500"},
    "docs/rows.md": {"8192": "4096", "288": "6", "2000": "6"},
}


def model(**config):
    return tiny(vocab_size=CHARACTERS, **config)


def dataset():
    return Dataset.from_list([{"text": TEXT}] * 8)


def model_that_ends_texts(logit, **config):
    """A model that gives the end of a text this much more, and never writes other special tokens."""
    ending, added = model(**config), torch.zeros(CHARACTERS)
    added[EOS], added[SPECIAL] = logit, -1e9
    ending.lm_head.register_forward_hook(lambda _, __, logits: logits + added)
    return ending


def to_evaluate():
    """With models whose replies are short."""
    names = {"tokenizer": character_tokenizer(), "documents": [TEXT] * 8}
    return {**names, "model": model_that_ends_texts(30.0), "tuned": model_that_ends_texts(30.0)}


def to_fine_tune():
    Dataset.from_list([{"text": TEXT}] * 8).to_json("chats.jsonl")
    return {}


def to_move_positions():
    inputs = character_tokenizer()("Who was there?", return_tensors="pt", return_token_type_ids=False)
    return {"model": AutoModelForCausalLM.from_pretrained(LLAMA), "inputs": inputs, "dataset": dataset()}


def to_prefer():
    pair = {"prompt": "Who was there? ", "chosen": "The wind.", "rejected": "A dark night, and nobody."}
    args = DPOConfig(output_dir="out", max_steps=1, use_cpu=True, bf16=False, report_to=[])
    names = {"model": AutoModelForCausalLM.from_pretrained(INSTRUCT), "tokenizer": character_tokenizer(), "args": args}
    batch = character_tokenizer()(TEXT[:60], return_tensors="pt", return_token_type_ids=False)
    return {**names, "dataset": Dataset.from_list([pair] * 8), "steps": [[batch, batch]] * 2}


def to_write_rows():
    """With a model that ends its texts, and a file of rows as the command before the block writes it."""
    chatty, tokenizer = model_that_ends_texts(3.0, max_position_embeddings=1024), character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer(TEXT)["input_ids"]
    rows = [{"input_ids": ids, "completion_mask": [0, 1] * (len(ids) // 2) + [1] * (len(ids) % 2)}] * 8
    Dataset.from_list(rows).to_json("rows.jsonl.xz", compression="xz")
    args = RopeSFTConfig(output_dir="out", max_length=1024)
    return {"model": chatty, "tokenizer": tokenizer, "documents": [TEXT * 4] * 8, "args": args}


def to_distil():
    """With the recipes of a restoration, and books."""
    shutil.copytree(ROOT / "examples/papers", "examples/papers", dirs_exist_ok=True)
    dataset().to_json("books.jsonl")
    return {"dataset": dataset()}


# names that a page uses without making them, made again for each block
GIVEN = {
    "README.md": to_fine_tune,
    "docs/distillation.md": to_distil,
    "docs/evaluation.md": to_evaluate,
    "docs/other_trainers.md": to_prefer,
    "docs/positions.md": to_move_positions,
    "docs/rows.md": to_write_rows,
    "docs/self_distillation.md": lambda: {"dataset": dataset()},
}


class Parsed(BaseException):
    """Thrown when a command has read its arguments, in place of its work."""


def parsed(run):
    """What the first argparse parser that `run` calls makes of its arguments; nothing behind that runs."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        raise Parsed(parse_args(self, args, namespace))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            run()
    return caught.value.args[0]


def check_rope_patch(arguments):
    known = _parser().parse_args(arguments)
    if known.command == "new":
        assert known.run(known) == 0
    if known.command == "train":
        launch, arguments = Launch.take(known.arguments)  # of a launch, as `run_train` takes them
        if launch is not None and not launch.config.endswith(".yaml"):
            assert launch.config in config_names(), f"no config {launch.config}"
        flags = {word[2:].replace("-", "_") for word in arguments if word.startswith("--")}
        check_fields(flags - {"help_all", "dry_run", "demo", "model", "data"})
        for word in known.arguments:
            assert not word.startswith("examples/") or (ROOT / word).is_file(), f"no recipe {word}"
    models = getattr(known, "model", None)
    for spec in models if isinstance(models, list) else []:
        ModelSpec.parse(spec)


def check_fields(names):
    known = {f.name for kind in FIELDS for f in fields(kind)} | {"config", "stages"}
    assert set(names) <= known, f"no fields of a recipe: {set(names) - known}"


def check_accelerate(arguments):
    assert arguments[:3] == ["launch", "-m", "trl_ext"], "only our command is known"
    check_rope_patch(arguments[3:])


def check_git(arguments):
    url = SETTINGS["project"]["urls"]["Homepage"]
    assert arguments == ["clone", url, "&&", "cd", SETTINGS["project"]["name"]], "only a clone of this project is known"


def check_make(arguments):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    named = [argument for argument in arguments if not argument.startswith("PYTEST_ARGS=")]
    assert named and set(named) <= set(targets), f"{arguments}: the targets are {targets}"


def check_python(arguments):
    if arguments[0] == "-m":
        {"pytest": check_pytest, "pip": check_pip, "trl_ext": check_rope_patch}[arguments[1]](arguments[2:])
        return
    if arguments[0] == "-c":
        exec(arguments[1], {})
        return
    script, *arguments = arguments
    assert (ROOT / script).is_file(), f"no script {script}"
    if arguments:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script, *arguments])
            patch.syspath_prepend((ROOT / script).parent)
            parsed(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))


def check_pytest(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="marker")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("paths", nargs="*")
    known = parser.parse_args(arguments)
    written = [path for path in known.paths if Path(path, "pyproject.toml").is_file()]
    for path in written:
        tests = run_python(Path(SITE).resolve(), path, "-m", "pytest")
        assert tests.returncode == 0, tests.stdout
    markers = {line.partition(":")[0] for line in SETTINGS["tool"]["pytest"]["ini_options"]["markers"]}
    assert known.marker is None or known.marker in markers, f"no marker {known.marker}"
    for path in {*known.paths} - {*written}:
        assert (ROOT / path).exists(), f"no tests {path}"


def check_pip(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", dest="constraints")
    parser.add_argument("-e", dest="editable")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("packages", nargs="*")
    known = parser.parse_args(arguments[1:])
    assert arguments[0] == "install" and (known.constraints is None or (ROOT / known.constraints).is_file())
    for package in filter(None, [known.editable, *known.packages]):
        if package.startswith("./"):
            pip_install(package, SITE)
            importlib.invalidate_caches()
            continue
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?", package).groups()
        assert name in {".", SETTINGS["project"]["name"]}, f"not our package: {name}"
        for extra in extras.split(",") if extras else []:
            assert extra in SETTINGS["project"]["optional-dependencies"], f"no extra {extra}"


COMMANDS = {
    "accelerate": check_accelerate,
    "git": check_git,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "rope-patch": check_rope_patch,
}


def check_commands(example):
    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)  # a variable of the environment
        if words:
            program = Path(words[0]).name
            if program not in COMMANDS:
                raise AssertionError(f"`{program}` is none of {', '.join(COMMANDS)}: check it, or skip the block.")
            COMMANDS[program](words[1:])


def run_block(example):
    page = Path(example.path)
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    example.namespace.update(GIVEN.get(name, dict)())
    for long, short in SHORTER.get(name, {}).items():
        line_offset = example.parsed.line_offset
        example.parsed = type(example.parsed)(example.parsed.replace(long, short), example.parsed.offset, line_offset)
    PythonEvaluator()(example)


def check_recipe(example):
    check_fields(yaml.safe_load(example.parsed))


def check_entry_points(example):
    declared = tomllib.loads(example.parsed)["project"]["entry-points"]
    assert declared and set(declared) <= {kind.group for kind in REGISTRIES}


def refuse(example):
    raise AssertionError("a block is ```python, ```sh, ```yaml, ```toml, or is skipped with a reason in a comment.")


LEXER = RawFencedCodeBlockLexer(re.compile(r"(?P<language>.*)$\n", re.MULTILINE))
EVALUATORS = {"python": run_block, "sh": check_commands, "yaml": check_recipe, "toml": check_entry_points}


def blocks(document):
    """Every fenced block of the page, with what judges it."""
    for region in LEXER(document):
        language = region.lexemes["language"].strip()
        if not language.startswith("{"):  # a directive of Sphinx, which `make docs` checks
            region.parsed = region.lexemes["source"]
            region.evaluator = EVALUATORS.get(language, refuse)
            yield region


def judge(document: Document):
    """Run and check the blocks of a page in their order."""
    for example in document.examples():
        if isinstance(example.parsed, tuple):
            action, reason = example.parsed
            assert (action, bool(reason)) == ("next", True), "a block is skipped alone, with a reason"
        try:
            example.evaluate()
        except SkipTest as skipped:
            assert len(str(skipped)) > 10, "the reason is a sentence"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with models under the names of the hub; a training takes one step there, on the CPU, of short rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--model_name_or_path", INSTRUCT])
    for name, window in WINDOWS.items():
        model(max_position_embeddings=window).save_pretrained(name)
        character_tokenizer().save_pretrained(name)
    defaults = RopeSFTConfig.__post_init__

    def short_run(self):
        self.max_steps, self.use_cpu, self.bf16, self.report_to = 1, True, False, []
        self.max_length, self.per_device_train_batch_size = min(self.max_length or 128, 128), 2
        defaults(self)

    monkeypatch.setattr(RopeSFTConfig, "__post_init__", short_run)
    return tmp_path


@pytest.fixture
def registries():
    """Put back after the test, without what a page registers."""
    before = [(registry, dict(registry)) for registry in REGISTRIES]
    yield
    for registry, entries in before:
        for name in set(registry) - set(entries):
            del registry[name]


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(PAGES) if FENCE.search(page.read_text())],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_code_blocks_of_the_page(page, workplace, registries):
    judge(Sybil([blocks, SkipParser()]).parse(page))


def as_page(notebook):
    """A notebook as a page: its cells with commands of a shell, those of Python and those of files are blocks."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if source.startswith("%%writefile "):
                file, code = source.removeprefix("%%writefile ").split("\n", 1)
                source = f"from pathlib import Path\nPath({file!r}).write_text({code!r})"
            language = "sh" if source.startswith("!") else "python"
            source = f"```{language}\n{re.sub('^!', '', source, flags=re.MULTILINE)}\n```"
        parts.append(source)
    return "\n\n".join(parts)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if "!pip" in file.read_text() else [])
        for file in sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
    ],
)
def test_cells_of_the_notebook(notebook, workplace, registries, monkeypatch):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    monkeypatch.syspath_prepend(workplace / SITE)
    page = workplace / f"{notebook.stem}.md"
    page.write_text(as_page(notebook))
    judge(Sybil([blocks, SkipParser()]).parse(page))


SKIPPED = '<!-- skip: next "it needs the network" -->\n\n```sh\ngit pull\n```\n'


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ("```\nmake test\n```\n", AssertionError, "a block is ```python, ```sh"),
        ("```yaml\nveiw: skip\n```\n", AssertionError, "no fields of a recipe: .'veiw'"),
        ("```sh\nrope-patch train r.yaml --veiw skip\n```\n", AssertionError, "no fields of a recipe: .'veiw'"),
        ("```toml\n[project.entry-points.rope_views]\na = 'b:C'\n```\n", AssertionError, ""),
        ("```python\nfrom rope_patch import patch_modell\n```\n", ImportError, "patch_modell"),
        ("```sh\nrope-patch eval --modell x\n```\n", SystemExit, "2"),
        ("```sh\nrope-patch eval --model a=b@yarn:factor\n```\n", ValueError, "yarn:factor"),
        ("```sh\nmake tests\n```\n", AssertionError, "the targets are"),
        ("```sh\npip install -e '.[trll]'\n```\n", AssertionError, "no extra trll"),
        ("```sh\npython examples/check_models.py\n```\n", AssertionError, "no script"),
        ("```sh\nrope-patch train examples/recipes/none.yaml\n```\n", AssertionError, "no recipe"),
        ("```sh\npython -m pytest tests/test_nothing.py\n```\n", AssertionError, "no tests"),
        ("1. A list:\n\n   ```sh\n   git clone somewhere\n   ```\n", AssertionError, "only a clone of this project"),
        ("<!-- skip: next -->\n\n```sh\ngit pull\n```\n", AssertionError, "with a reason"),
        ('<!-- skip: next "because" -->\n\n```sh\ngit pull\n```\n', AssertionError, "a sentence"),
        ('<!-- skip: start "it is not ours" -->\n\n```sh\ngit pull\n```\n', AssertionError, "skipped alone"),
        (f"{SKIPPED}\n```sh\ngit push\n```\n", AssertionError, "only a clone of this project"),
    ],
)
def test_a_block_that_is_wrong_or_of_no_known_kind_fails(block, error, message, tmp_path):
    (tmp_path / "page.md").write_text(block)
    with pytest.raises(error, match=message):
        judge(Sybil([blocks, SkipParser()]).parse(tmp_path / "page.md"))


def test_wrong_arguments_of_a_script_fail(capsys):
    with pytest.raises(SystemExit, match="2"):
        check_python(["benchmarks/relation_kl.py", "--quik"])
    assert "unrecognized arguments: --quik" in capsys.readouterr().err


def test_a_block_is_skipped_with_a_reason(tmp_path):
    (tmp_path / "page.md").write_text(SKIPPED)
    judge(Sybil([blocks, SkipParser()]).parse(tmp_path / "page.md"))
