"""Tests of TRL's that `RopeSFTTrainer` refuses on purpose, each with its error and the reason."""

from peers.outcomes import Refusal

OF_EVERY_TRAINING = [
    Refusal(
        error="the loss became nan",
        reason="weights in float16 at learning rate 0.1 overflow: TRL trains on with NaN, ours stops",
        tests=("test_train_model_dtype",),
    ),
]

OF_EVERY_VIEW = [
    *OF_EVERY_TRAINING,
    Refusal(
        error="has no RoPE that can be patched",
        reason="a view moves RoPE indices, and this model has none",
        tests=("test_train[trl-internal-testing/tiny-NemotronHForCausalLM-nano]",),
    ),
    Refusal(
        error="views are not defined for positions with several axes (mRoPE)",
        reason="positions of images have three axes, and a view is a rule for one",
        tests=(
            *(
                f"{test}[trl-internal-testing/tiny-{model}]"
                for test in ("test_train_nll_loss_vlm", "test_train_vlm")
                for model in (
                    "Qwen2VLForConditionalGeneration",
                    "Qwen2_5_VLForConditionalGeneration",
                    "Qwen3VLForConditionalGeneration",
                    "Qwen3_5ForConditionalGeneration-NoThink",
                    "Qwen3_5MoeForConditionalGeneration-3.6",
                )
            ),
            "test_train_vlm_multi_image[trl-internal-testing/tiny-Qwen2_5_VLForConditionalGeneration]",
            "test_train_vlm_prompt_completion[trl-internal-testing/tiny-Qwen2_5_VLForConditionalGeneration]",
        ),
    ),
]

OF_SELF_DISTILLATION = [
    *OF_EVERY_VIEW,
    Refusal(
        error="leaves out the loss that balances experts",
        reason="the loss is made of states of the decoder, and the balance of experts is no part of it",
        tests=(
            "test_train[trl-internal-testing/tiny-GptOssForCausalLM]",
            "test_train[trl-internal-testing/tiny-Qwen3MoeForCausalLM]",
            "test_train_gpt_oss",
            "test_train_moe_with_peft_config",
            "test_train_completion_only_harmony",
            # the balance of its experts is looked at before the positions of its images
            "test_train_nll_loss_vlm[trl-internal-testing/tiny-Qwen3_5MoeForConditionalGeneration-3.6]",
        ),
    ),
    Refusal(
        error="learns prompts",
        reason="virtual tokens before the row shift the states that the loss reads",
        tests=(
            "test_train_with_peft_config_prompt_tuning[prompt_tuning]",
            "test_train_with_peft_config_prompt_tuning[prefix_tuning]",
            "test_train_with_peft_config_prompt_tuning[prompt_encoder]",
            "test_prompt_tuning",
            "test_prompt_tuning_peft_model",
        ),
    ),
    Refusal(
        error="loses its gradient without an error under reentrant checkpointing",
        reason="the states that the loss reads come from a forward that reentrant checkpointing runs without gradients",
        tests=(
            "test_train_with_peft_config_and_gradient_checkpointing_reentrant[True]",
            "test_train_with_gradient_checkpointing_reentrant[True]",
        ),
    ),
]
