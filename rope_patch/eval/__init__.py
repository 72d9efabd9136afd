"""Measuring long-context models: where the window ends, what adaptation gained and what it cost."""

from .answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position
from .attention import AttentionDistance, EntropyRatio, attention_distance, entropy_ratio
from .comparisons import in_distribution_penalty, recovery_ratio
from .context_gain import ContextGain, context_gain
from .lm_eval_tasks import LmEval, lm_eval_tasks
from .loss_by_position import LossByPosition, loss_by_position
from .measure import Job, Measure
from .paired import mcnemar, paired_interval
from .probe import ProbeResult, probe
from .regressions import Cell, Regressions, regressions
from .report import write_report
from .result import Pairs, Result
from .retrieval import niah, passkey, retrieval
from .retrieval_grid import RetrievalGrid
from .ruler import Ruler, ruler
from .short_text import ShortText, short_text
from .suite import MEASURES, EvalPlan, run_suite
from .text import read_texts, standard_library_files, text_rows
from .view_kl import ViewKL, view_kl

__all__ = [
    "MEASURES",
    "AnswerPositionAccuracy",
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
    "Regressions",
    "Result",
    "RetrievalGrid",
    "Ruler",
    "ShortText",
    "ViewKL",
    "accuracy_by_answer_position",
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
    "run_suite",
    "short_text",
    "standard_library_files",
    "text_rows",
    "view_kl",
    "write_report",
]
