"""What is refused of a trainer by where its model lies; refusals of options are tested beside what they are of."""

from types import SimpleNamespace

import pytest
import torch
from support.tiny import tiny

from trl_ext.trainer.objective_checks import check_next_token


def with_head_on(device):
    model = tiny()
    model.get_output_embeddings = lambda: SimpleNamespace(weight=SimpleNamespace(device=torch.device(device)))
    return model


@pytest.mark.parametrize("here", ["cuda", "cuda:0"])
def test_a_head_on_another_gpu_than_the_loss_is_refused(here):
    with pytest.raises(
        ValueError, match=r"output head on cuda:1, and TRL computes the loss on cuda.*device_map=\{'': 0\}"
    ):
        check_next_token(with_head_on("cuda:1"), torch.device(here))


@pytest.mark.parametrize(
    ("there", "here"), [("cuda:0", "cuda"), ("cuda:1", "cuda:1"), ("meta", "cuda:0"), ("cpu", "cpu")]
)
def test_a_head_beside_the_loss_is_taken(there, here):
    check_next_token(with_head_on(there), torch.device(here))


def test_a_model_without_a_head_is_left_to_trl():
    model = tiny()
    model.get_output_embeddings = lambda: None
    check_next_token(model, torch.device("cuda:0"))
