"""Settings of a distill stage that every loss shares: how long, how fast, on which data, towards which teacher."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# The source of a text that the teacher writes.
SELF = "self"


class Data(BaseModel):
    """Which sequences a student is trained on.

    source: as of a calibration: a text, JSON-lines or Parquet file, a folder of them, a dataset's name, or `self`: text
    that the teacher writes. sequences: of `seqlen` tokens each, packed. held_out: how many of them are kept for the
    held-out divergence. chat: conversations; what the assistant says counts, and nothing else.

    records: the source is JSON lines with `input`, `label` and `rationale` instead (arXiv 2305.02301); sequences and
    held_out count records, and each is trained on as two tasks, which the prefixes tell apart: alpha times the loss of
    its label plus 1 - alpha times that of its rationale. rationales: read from the file, or written by the teacher to
    `template`, where {input} stands for the record's; it is heeded where what follows `answer` is the label.

    temperature: of what the teacher writes; 0, for rationales only, takes the likeliest token. max_new: tokens of a
    written rationale. max_repetition: a written text is dropped if more of its runs of four tokens repeat earlier ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(default=SELF, min_length=1)
    records: bool = False
    sequences: int = Field(default=256, ge=2)
    seqlen: int = Field(default=512, ge=2)
    held_out: int = Field(default=8, ge=1, validate_default=True)
    seed: int = Field(default=0, ge=0)
    chat: bool = False
    alpha: float = Field(default=0.5, ge=0, le=1)
    label_prefix: str = "[label] "
    rationale_prefix: str = "[rationale] "
    rationales: Literal["file", "teacher"] = "file"
    template: str = Field(default="", validate_default=True)
    answer: str = Field(default="The answer is", min_length=1)
    max_new: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    max_repetition: float = Field(default=0.5, gt=0, le=1)

    @field_validator("held_out")
    @classmethod
    def _leaves_some(cls, held_out: int, info: ValidationInfo) -> int:
        if held_out >= info.data.get("sequences", held_out + 1):
            raise ValueError("none of the sequences would be left to train on: give less, or set sequences to more")
        return held_out

    @field_validator("records", "chat")
    @classmethod
    def _of_text(cls, value: bool, info: ValidationInfo) -> bool:
        """Whether the source is one that has records, or conversations."""
        if value and info.data.get("source") == SELF:
            raise ValueError(f"what the teacher writes by itself has no {info.field_name}: name a file in source")
        if value and info.field_name == "chat" and info.data.get("records"):
            raise ValueError("records are no conversations: leave chat or records out")
        return value

    @field_validator("alpha", "label_prefix", "rationale_prefix", "rationales", "template", "answer", "max_new")
    @classmethod
    def _of_records(cls, value: Any, info: ValidationInfo) -> Any:
        """Nothing that would do nothing. A value that is the default says nothing and passes."""
        changed = value != cls.model_fields[str(info.field_name)].default
        if changed and not info.data.get("records", True):
            raise ValueError("it is of records only: set records to true, or leave it out")
        if changed and info.field_name in ("template", "answer", "max_new") and info.data.get("rationales") == "file":
            raise ValueError("it is of rationales that the teacher writes: set rationales to teacher, or leave it out")
        return value

    @field_validator("rationale_prefix")
    @classmethod
    def _tells_apart(cls, prefix: str, info: ValidationInfo) -> str:
        if prefix == info.data.get("label_prefix"):
            raise ValueError("it is label_prefix as well, and nothing else tells the tasks apart: give another")
        return prefix

    @field_validator("template")
    @classmethod
    def _is_filled_in(cls, template: str, info: ValidationInfo) -> str:
        """A template in which {input} stands, and nothing else that would have to be filled in."""
        if info.data.get("rationales", "file") == "file":
            return template
        try:
            fields = {part[1:] for part in Formatter().parse(template) if part[1] is not None}
        except ValueError as error:
            raise ValueError(f"{error}: write braces that are text as {{{{ and }}}}") from None
        if fields != {("input", "", None)}:
            found = ", ".join(sorted(str(name) for name, _, _ in fields)) or "nothing"
            raise ValueError(f"{found!r} is to be filled in: write {{input}} where the record's input belongs, no more")
        return template

    @field_validator("temperature", "max_repetition")
    @classmethod
    def _of_written(cls, value: float, info: ValidationInfo) -> float:
        free = info.data.get("source") == SELF
        if value == 0 and free:
            raise ValueError("all sequences would be the same: give more than 0")
        written = free or (info.field_name == "temperature" and info.data.get("rationales", "teacher") == "teacher")
        if value != cls.model_fields[str(info.field_name)].default and not written:
            raise ValueError("it is of text that the teacher writes, and it writes none: leave it out")
        return value


class Teacher(BaseModel):
    """Where the teacher's signal comes from.

    model: its folder; by default the recipe's own model, before anything was done to it. signal: `online`: it runs
    beside the student; `offline`: the `top_k` largest log-probabilities of each position are written to disk once, into
    `cache` (by default beside the output), and read from there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    signal: Literal["online", "offline"] = "online"
    top_k: int = Field(default=32, ge=1)
    cache: str | None = None


class Training(BaseModel):
    """How the student is trained.

    steps: optimizer steps of `batch` sequences times `accumulation`. learning_rate: its peak; `schedule` cosine, or wsd
    (warm up, stay, decay over the last fifth). train: globs over the parameters that move; the rest is held. refit:
    learn the scales of quantized layers too; otherwise their grids are held as they are. every: steps between held-out
    measurements and saved states; patience: how many of them without a gain end the training (0: none do).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=200, ge=1)
    batch: int = Field(default=4, ge=1)
    accumulation: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    train: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    refit: bool = True
    gradient_checkpointing: bool = False
    every: int = Field(default=50, ge=1)
    patience: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)

    def resolved(self) -> dict[str, Any]:
        """As JSON types."""
        return self.model_dump(mode="json")
