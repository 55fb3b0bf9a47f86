"""The settings of learning from better and worse answers."""

from dataclasses import dataclass
from typing import ClassVar

from smallmind.checks import check_all, setting, suggesting

METHODS = ("dpo", "ipo", "orpo", "kto")
PLAIN = "cross-entropy"


@suggesting()
@dataclass(frozen=True)
class PreferencesConfig:
    """Preferences: answers that are better or worse than others."""

    chosen_by: ClassVar = "loss"
    paths: ClassVar = ()
    creates: ClassVar = ()
    records: ClassVar = {"margin": ("margin", ".3f"), "won": ("pairs won", ".1%")}

    loss: str | None = setting(
        None,
        "how to learn from better and worse answers; default: dpo, for pairs with --init-from. "
        "kto takes single labelled answers; cross-entropy learns only the better ones",
        choices=(*METHODS, PLAIN),
    )
    dpo_beta: float = setting(
        0.1, "cost of moving away from the starting model; orpo: weight of the pairs", low=1e-6
    )

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def models(self) -> dict[str, str]:
        """The paths of the models that the loss needs: none, as it starts from its reference."""
        return {}
