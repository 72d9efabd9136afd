"""Measuring long-context models: where the window ends, what adaptation gained and what it cost.

Import from this package; no other room of `rope_patch` does.
"""

from ..prompts.text import read_texts, standard_library_files, text_rows
from .measures.answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position
from .measures.asking import Answers, Prompt, asking
from .measures.attention import AttentionDistance, EntropyRatio, attention_distance, entropy_ratio
from .measures.base import Job, Measure
from .measures.comparisons import in_distribution_penalty, recovery_ratio
from .measures.context_gain import ContextGain, context_gain
from .measures.lm_eval_tasks import LmEval, lm_eval_tasks
from .measures.loss_by_position import LossByPosition, loss_by_position
from .measures.probe import ProbeResult, probe
from .measures.retrieval import niah, passkey, retrieval
from .measures.retrieval_grid import RetrievalGrid
from .measures.ruler import Ruler, ruler
from .measures.ruler_prompts import ruler_prompts
from .measures.short_text import ShortText, short_text
from .measures.view_kl import ViewKL, view_kl
from .regressions import Cell, Regressions, regressions
from .report import write_report
from .results.paired import mcnemar, paired_interval
from .results.result import Pairs, Result
from .suite import MEASURES, EvalPlan, run_suite
from .verdict import verdict

__all__ = [
    "MEASURES",
    "AnswerPositionAccuracy",
    "Answers",
    "AttentionDistance",
    "Cell",
    "ContextGain",
    "EntropyRatio",
    "EvalPlan",
    "Job",
    "LmEval",
    "LossByPosition",
    "Measure",
    "Pairs",
    "ProbeResult",
    "Prompt",
    "Regressions",
    "Result",
    "RetrievalGrid",
    "Ruler",
    "ShortText",
    "ViewKL",
    "accuracy_by_answer_position",
    "asking",
    "attention_distance",
    "context_gain",
    "entropy_ratio",
    "in_distribution_penalty",
    "lm_eval_tasks",
    "loss_by_position",
    "mcnemar",
    "niah",
    "paired_interval",
    "passkey",
    "probe",
    "read_texts",
    "recovery_ratio",
    "regressions",
    "retrieval",
    "ruler",
    "ruler_prompts",
    "run_suite",
    "short_text",
    "standard_library_files",
    "text_rows",
    "verdict",
    "view_kl",
    "write_report",
]
