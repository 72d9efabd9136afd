"""`rope-patch status`: what it says of folders whose runs stopped, go on, or are finished."""

import json
import subprocess
import sys
import time

from trl_ext import cli
from trl_ext.runs.folder import only_run
from trl_ext.runs.progress import Progress


def said(folder, capsys):
    assert cli.main(["status", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def stands(folder, step, steps=40, first=10, seconds=300.0, ago=60.0):
    """A training that was begun at step `first` and, `ago` seconds ago, was at `step` after `seconds`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = time.time() - ago
    Progress(step, steps, 2.5, first, written - seconds, written).write(folder)


def checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "trainer_state.json").write_text("{}")
    return path


def test_a_training_says_step_loss_time_left_and_checkpoint(tmp_path, capsys):
    stands(tmp_path / "out", 20)
    newest = checkpoint(tmp_path / "out", 20)
    with only_run(tmp_path / "out", "output_dir"):
        first, second, third = said(tmp_path / "out", capsys)
    assert first == f"{tmp_path}/out: training, running"
    # ten steps took 300 seconds, so twenty take 600, of which 60 are over
    assert second.startswith("Step 20 of 40, loss 2.500 at ") and second.endswith(", about 9 minutes left.")
    assert third == f"Last checkpoint: {newest}"
    first, second, _ = said(tmp_path / "out", capsys)
    assert first.endswith("training, stopped") and "left" not in second
    stands(tmp_path / "out", 40)
    assert said(tmp_path / "out", capsys)[0] == f"{tmp_path}/out: training, finished"


def test_of_several_stages_the_one_that_is_not_done_is_told(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(json.dumps({"stages": ["distil", "extend"]}))
    (tmp_path / "distil").mkdir()
    (tmp_path / "distil/stage.json").write_text("{}")
    assert said(tmp_path, capsys)[0].startswith(f"{tmp_path}: training, stage extend of distil, extend, stopped")
    stands(tmp_path / "extend", 12)
    assert said(tmp_path, capsys)[1].startswith("Step 12 of 40, loss 2.500")


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run of rope-patch extend or train" in capsys.readouterr().err


def test_no_torch_is_needed(tmp_path):
    stands(tmp_path, 20)
    code = "import sys; sys.modules['torch'] = None; from trl_ext import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "status", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and "Step 20 of 40" in done.stdout, done.stderr
