"""Documents that do not fill the batches, steps and epochs of ranks evenly: trained and evaluated like on one rank.

Where each rank has sequences of its own, accelerate repeats the first documents of an epoch to fill its last batches:
one rank trains the same on a set that ends with these. Evaluations leave them out.
"""

import pytest
from support.marks import needs_deepspeed, needs_ranks
from support.ranks import PI, RELATION, SELF, require_alike, run_on_ranks

pytestmark = [pytest.mark.slow, needs_ranks]
RUN = {"max_steps": 6, "learning_rate": 1e-3}  # two epochs, each with fewer micro-batches in its last step
NATIVE = {"objective": "native-distill", **PI, "view": "skip"}

IN_A_RING = {
    "short last batch": {"view": "skip", "per_device_train_batch_size": 3, "documents": {"n": 25}},
    "one at a time": {"view": "skip", "per_device_train_batch_size": 1, "documents": {"n": 11}},
    "each rank's own mean": {
        "view": "skip",
        "per_device_train_batch_size": 3,
        "documents": {"n": 25},
        "average_tokens_across_devices": False,
    },
    "self-distill": {**SELF, "documents": {"n": 22}, "evaluated": {"n": 5}},
    "relations": {**RELATION, "per_device_train_batch_size": 3, "documents": {"n": 22}, "evaluated": {"n": 5}},
    "native": {**NATIVE, "per_device_train_batch_size": 3, "documents": {"n": 25}},
}
OF_TWO_READERS = {  # and how many documents fill the last batches of two, of two documents each
    "skip": ({"view": "skip", "documents": {"n": 21}}, 3),
    "posaug": ({"view": "posaug", "documents": {"n": 18}, "evaluated": {"n": 6}}, 2),
    "self-distill": ({**SELF, "documents": {"n": 21}, "evaluated": {"n": 5}}, 3),
    "self-distill, view": (
        {**SELF, "objective_args": {"view_clm": 0.5}, "documents": {"n": 18}, "evaluated": {"n": 5}},
        2,
    ),
    "relations": ({**RELATION, "documents": {"n": 20}, "evaluated": {"n": 9}}, 0),
}


def options(case, **more):
    return {**RUN, "evaluated": {"n": 7}, **case, **more}


def test_a_ring_trains_and_evaluates_like_one_rank(tmp_path):
    cases = {name: options(case) for name, case in IN_A_RING.items()}
    require_alike(run_on_ranks(tmp_path, cases, 1), run_on_ranks(tmp_path, cases, 2, "fsdp2", shared=2))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {
        name: options(case, documents={**case["documents"], "repeated": repeated}, train_sampling_strategy="sequential")
        for name, (case, repeated) in OF_TWO_READERS.items()
    }
    return run_on_ranks(tmp_path_factory.mktemp("alone"), cases, 1)


@pytest.mark.parametrize(
    ("engine", "world", "shared"),
    [
        pytest.param("ddp", 2, 1, id="ddp"),
        pytest.param("fsdp2", 4, 2, id="two-rings"),
        pytest.param("zero3", 2, 2, id="ulysses", marks=needs_deepspeed),
    ],
)
def test_the_first_documents_fill_the_last_batches(tmp_path, alone, engine, world, shared):
    cases = {name: options(case, train_sampling_strategy="sequential") for name, (case, _) in OF_TWO_READERS.items()}
    padding = {"pad_to_multiple_of": 24} if engine == "zero3" else {}  # gloo gathers rows of one length
    require_alike(alone, run_on_ranks(tmp_path, cases, world, engine, shared, **padding))
