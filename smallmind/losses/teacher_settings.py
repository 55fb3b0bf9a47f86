"""The settings of a student and its teacher."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from smallmind.checks import InputError, check_all, setting, shown_value, suggesting

LEARNT_TEMPERATURES = (1.0, 10.0)  # the range of a learned temperature


@suggesting()
@dataclass(frozen=True)
class DistillationConfig:
    """Distillation: a student learns from a teacher (Hinton et al. 2015)."""

    chosen_by: ClassVar = "teacher"
    paths: ClassVar = ("teacher", "teacher_cache")
    creates: ClassVar = ("teacher_cache",)
    records: ClassVar = {"teacher_correlation": ("correlation with the teacher", ".3f")}

    teacher: str | None = setting(
        None, "a run or a model file with the same vocabulary", metavar="RUN_OR_MODEL"
    )
    temperature: float = setting(
        2.0, "divides the logits of teacher and student", low=0.1, high=100.0
    )
    alpha: float = setting(
        0.5, "weight of the teacher's loss; the loss on the text gets the rest", low=0.0, high=1.0
    )
    learn_temperature: bool = setting(False, "learn the temperature too, between 1 and 10")
    teacher_cache: str | None = setting(
        None,
        "file of the teacher's logits, read instead of running it; created if missing",
        metavar="FILE",
    )
    teacher_top_k: int = setting(16, "logits per token kept in the cache", low=1)

    def __post_init__(self) -> None:
        check_all(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if self.teacher is None and value != field.default:
                raise InputError(f"{field.name}={shown_value(value)} needs a teacher")
        low, high = LEARNT_TEMPERATURES
        if self.learn_temperature and not low < self.temperature < high:
            raise InputError(
                f"temperature={self.temperature} must be above {low:g} and below {high:g} "
                "with learn_temperature"
            )

    @property
    def models(self) -> dict[str, str]:
        """The paths of the models that the loss needs, by their roles."""
        return {"teacher": self.teacher} if self.teacher else {}
