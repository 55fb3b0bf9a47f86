"""The settings of learning from rewards."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from smallmind import parts
from smallmind.checks import InputError, check_all, setting, shown_value, suggesting

OF_REWARDS = "rewards"  # the loss in `parts.LOSSES`


@suggesting()
@dataclass(frozen=True)
class RewardsConfig:
    """Rewards: answers that the model tries, and what they earn (Shao et al. 2024)."""

    chosen_by: ClassVar = "reward"
    paths: ClassVar = ("reward",)
    creates: ClassVar = ()
    records: ClassVar = {
        "sampled_reward": ("reward of sampled answers", ".3f"),
        "teaching": ("questions that teach", ".1%"),
        "reward": ("held-out reward", ".3f"),
    }

    reward: str | None = setting(
        None,
        f"what an answer earns: {', '.join(parts.REWARDS)}, or a Python file that defines "
        f"reward(question, answer, wanted) and is run",
        metavar="REWARD",
    )
    reward_answers: int = setting(8, "answers sampled per question, and compared", low=2, high=1024)
    reward_tokens: int | None = setting(
        None,
        "maximum tokens per answer; default: a few more than the longest expected answer",
        low=1,
        high=2**20,
    )
    reward_updates: int = setting(1, "updates per round of sampled answers", low=1, high=1024)
    reward_clip: float = setting(
        0.2, "largest relative change of a token's probability per round", above=0, below=1
    )
    reward_beta: float = setting(
        0.0, "cost of moving away from the starting model, per nat and token", low=0.0
    )
    reward_seconds: float = setting(
        10.0, "time limit for the reward of an answer, in seconds", above=0, high=86_400.0
    )

    def __post_init__(self) -> None:
        check_all(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if self.reward is None and value != field.default:
                raise InputError(f"{field.name}={shown_value(value)} needs a reward: add --reward")

    @property
    def models(self) -> dict[str, str]:
        """The paths of the models that the loss needs: none, as it starts from its reference."""
        return {}
