"""The scripts say in one line what a user can mend."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("sft.py", ["--config", "nowhere.yaml"], "nowhere.yaml"),
        ("sft.py", ["--config", "typo.yaml"], "Did you mean 'view'?"),
        ("sft.py", ["typo.yaml"], "Did you mean 'view'?"),
    ],
)
def test_a_user_mistake_is_one_line(script, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.yaml").write_text("veiw: skip\n")
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and line.startswith(f"{script}: ") and message in line and "Traceback" not in line
