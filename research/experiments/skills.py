"""What each skill among the training rows does: `rope-patch extend` with none of them, with all, and with all but one.

Run: python research/experiments/skills.py MODEL --output FOLDER --to 65536 --data BOOKS --held-out BOOKS --seed 0

Other options are those of `extend`, which resumes an arm that was stopped and skips one that is done. In every arm a
third of the tokens are texts, a third are chats, and a third are rows that end with questions. Plain ones take the
place of a skill that is left out, and rows of all other kinds are the same token for token. The last line of the
output measures all arms by RULER.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from trl_ext.rows.row import SKILLS, Kind, Skill

ROWS = 288  # 12 of each skill and 24 plain ones, of which a quarter is a whole number too
_PLAIN = 2.0  # weight of plain questions beside all skills, of which each has 1


def shares(skills: tuple[Skill, ...]) -> dict[Kind, float]:
    """Weights of kinds of rows with these skills."""
    asking = _PLAIN + len(SKILLS)
    return {"text": asking, "chats": asking, "questions": asking - len(skills), **dict.fromkeys(skills, 1.0)}


ARMS = {
    "none": shares(()),
    "all": shares(SKILLS),
    **{f"all-but-{left_out}": shares(tuple(skill for skill in SKILLS if skill != left_out)) for left_out in SKILLS},
}


def main() -> None:
    """Extend by each arm, and print the command that measures them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True, help="folder that gets a folder for each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args, options = parser.parse_known_args()
    measured = ["rope-patch", "eval", "--model", f"native={args.model}"]
    for arm in args.arms:
        folder, weights = args.output / arm, ",".join(f"{kind}={weight:g}" for kind, weight in ARMS[arm].items())
        print(f"== {arm}: {weights}", flush=True)
        command = ["extend", args.model, "--output", str(folder), "--shares", weights, "--rows", str(ROWS)]
        subprocess.run([sys.executable, "-m", "trl_ext", *command, *options], check=True)
        measured += ["--model", f"{arm}={folder / 'model'}"]
    print("Measure them:", shlex.join([*measured, "--ruler", "--report", str(args.output / "ruler")]))


if __name__ == "__main__":
    main()
