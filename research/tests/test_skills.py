"""The arms of the ablation of skills: each lacks one, and nothing else changes."""

from skills import ARMS, ROWS
from trl_ext.rows.mix import rows_by_kind
from trl_ext.rows.row import SKILLS


def test_an_arm_without_a_skill_has_plain_questions_in_its_place():
    rows = {arm: rows_by_kind(ROWS, shares) for arm, shares in ARMS.items()}
    assert rows["none"] == rows_by_kind(ROWS), "the default of extend"
    assert {kind for kind in rows["all"] if kind not in rows["none"]} == set(SKILLS)
    for skill in SKILLS:
        without = dict(rows[f"all-but-{skill}"])
        without["questions"] -= rows["all"][skill]
        assert all(0.25 * n == round(0.25 * n) for n in without.values()), "short ones, in exact shares"
        assert {**without, skill: rows["all"][skill]} == rows["all"]
