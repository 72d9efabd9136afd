"""Losses of next tokens from hidden states and a head, without the logits of all rows at once."""
