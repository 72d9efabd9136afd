"""Methods of the field that are not here by name, each with what comes nearest, for the error of an unknown name."""

NOT_HERE = {
    "p-rope proportional": (
        "p-RoPE, which stops the slowest frequencies, comes with a model that was trained with it, and 'abf' keeps it. "
        "For another model 'cope' comes nearest: it fades them out."
    ),
    "ntk-by-parts": "'yarn' with attention_factor=1 is NTK by parts.",
    "longrope2": (
        "'longrope' takes the divisors that LongRoPE2 searches. research/experiments/factor_search.py, in the "
        "repository, searches in its spirit."
    ),
    "self-extend rerope dca dual-chunk-attention dpe lampe": (
        "Of the methods that shorten far distances at inference STRING is here: rope_patch.string_positions(model). "
        "'ntk' needs no training either."
    ),
    "string": "STRING is a block around inference: with rope_patch.string_positions(model).",
    "rope-temperature temperature ssmax scalable-softmax llama4-scaling": (
        "A softmax scale by position comes with a model that was trained with it, and 'abf' keeps it. For other models "
        "the attention_factor of 'yarn' comes nearest, one scale for all positions."
    ),
    "longlora s2-attn shifted-attention": (
        "LongLoRA's attention is an option of training: RopeSFTConfig(shifted_attention=0.25)."
    ),
    "longce": "LongCE is an option of objective 'clm': objective_args={'longce': {'short_context': 4096}}.",
    "dft asft": (
        "DFT is TRL's loss_type='dft', with objective 'clm'. ASFT's KL to the base model is that of 'native-distill', "
        "which does not go with DFT."
    ),
    "sdft sdpo opsd opsdl gkd on-policy-distillation": (
        "Distillation on texts that the student writes while it trains is not here. 'native-distill' on chats that the "
        "model wrote before (`rope-patch rows`) comes nearest."
    ),
}
"""Names that people type, separated by spaces -> the answer, in whole sentences."""
