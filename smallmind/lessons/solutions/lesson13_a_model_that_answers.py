"""Solutions of "A model that answers"."""

import numpy as np


# %% Exercise 1
def render(turns, begins_answer):
    """[(role, text), ...] -> the text of the conversation."""
    parts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
    return "".join(parts) + "<|im_start|>assistant\n" * begins_answer


# %% Exercise 2
def target_weights(is_learned):
    """is_learned (n,), bool -> (n - 1,) float32."""
    return is_learned[1:].astype(np.float32)  # a target is the token after its input


# %% Exercise 3
def update_loss(parts):
    """[(losses, weights), ...] -> the mean loss of all targets that count."""
    total = sum((losses * weights).sum() for losses, weights in parts)
    return total / sum(weights.sum() for _, weights in parts)
