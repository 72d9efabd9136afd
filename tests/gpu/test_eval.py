"""Evaluation on a GPU: nothing of n x n or n x vocabulary is held, and bf16 reads like float32."""

import pytest
import torch
from support.characters import character_tokenizer
from support.tiny import tiny, tokens

from rope_patch.eval import attention_distance, context_gain, loss_by_position, view_kl
from rope_patch.generation.generation import greedy_answers

pytestmark = pytest.mark.gpu
LENGTH, WIDE = 32768, 32768
MEASURES = {
    "loss_by_position": lambda model, ids: loss_by_position(model, ids, progress=False),
    "context_gain": lambda model, ids: context_gain(model, ids, stride=1024, progress=False),
    "attention_distance": lambda model, ids: attention_distance(model, ids, progress=False),
    "view_kl": lambda model, ids: view_kl(model, ids, [64], progress=False),
    "greedy_answers": lambda model, ids: greedy_answers(model, character_tokenizer(), ids.tolist(), max_new_tokens=4),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_peak_memory_stays_below_one_square_or_one_tensor_of_logits(measure):
    model = tiny(vocab_size=WIDE, max_position_embeddings=2 * LENGTH).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(3, WIDE, (1, LENGTH))
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    MEASURES[measure](model, ids)
    # n x n and n x vocabulary alike would be 2 GiB in bf16
    assert torch.cuda.max_memory_allocated() - at_rest < 2 * LENGTH * WIDE / 2


def test_bf16_on_the_gpu_reads_like_float32_on_the_cpu():
    model = tiny().eval()
    ids = tokens(2, 96)
    expected = loss_by_position(model, ids, progress=False)
    curve = loss_by_position(model.to("cuda", torch.bfloat16), ids, progress=False)
    torch.testing.assert_close(curve.loss, expected.loss, rtol=0.02, atol=0, equal_nan=True)
