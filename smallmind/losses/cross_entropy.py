"""The mean of -log p(target) over the tokens of a text."""

import math

from smallmind.losses.loss import Loss
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.text.dataset import Batch

SLACK = 0.2  # nats by which the first loss of a batch may differ by chance


class CrossEntropy(Loss):
    """loss = mean over tokens of -log p(target), in nats; weighted if the targets have weights."""

    def loss_and_gradients(
        self,
        model: TransformerModel,
        batch: Batch,
        scale: float = 1.0,
        _share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Computes the loss; adds scale times its gradient."""
        return model.loss_and_gradients(batch.ids, batch.targets, scale, at, **batch.weighting)

    def first_loss(self, model: TransformerModel, _batch: Batch) -> tuple[float, float, str]:
        """Guesses among all V tokens: ln V.

        Logits are sums of C products with weights of deviation 0.02, which raises the loss above
        ln V by half their variance, C 0.02^2 / 2; twice that is allowed.
        """
        V = model.config.vocab_size
        return math.log(V), slack_of(model), f"ln {V}"


def slack_of(model: TransformerModel) -> float:
    """Returns the nats by which the first cross-entropy of a model may differ from ln V."""
    return SLACK + model.config.n_embd * INITIAL_DEVIATION**2
