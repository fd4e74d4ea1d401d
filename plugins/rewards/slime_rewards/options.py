"""Options of the rewards. Imported whenever slime starts, so it must stay light."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slime.plugin import Options


class AnswerOptions(Options):
    """Where the answer is in the response. Options that are set apply one after the other, in this order."""

    after: str | None = Field(
        default=None,
        min_length=1,
        description="the answer is the text after the last occurrence of this; reward 0 if there is none",
    )
    tag: str | None = Field(
        default=None,
        pattern=r"^[\w-]+$",
        description="the answer is the content of the last <TAG>...</TAG>; reward 0 if there is none",
    )
    boxed: bool = Field(
        default=False, description="the answer is the content of the last \\boxed{...}; reward 0 if there is none"
    )


class ExactMatchOptions(AnswerOptions):
    """Options of `exact_match`."""

    extract: Literal["text", "last_number"] = Field(
        default="text", description="compare the whole text, or the value of the last number in it (1,200 = 1200.0)"
    )
    ignore_case: bool = Field(default=False, description="ignore upper and lower case when comparing text")


class MathOptions(AnswerOptions):
    """Options of `math`."""

    tail_chars: int = Field(
        default=2000, ge=1, description="characters at the end of the answer that are searched for a box or expression"
    )
    strict: bool = Field(
        default=True,
        description="names of variables matter; false: x+1 equals y+1, and (x,y) equals (a,b), in alphabetical order",
    )
    digits: int = Field(default=6, ge=0, le=15, description="decimal places to which numbers must agree")


class MultipleChoiceOptions(AnswerOptions):
    """Options of `multiple_choice`."""

    bare: bool = Field(default=True, description="accept a last line that consists of a choice, such as `B` or `(b).`")


class F1Options(AnswerOptions):
    """Options of `f1`."""

    measure: Literal["f1", "exact", "contains"] = Field(
        default="f1",
        description="token F1, equality (1 or 0), or whether the answer contains the label (1 or 0), all after"
        " normalization",
    )


class FormatOptions(Options):
    """Options of `format`."""

    tags: list[str] = Field(
        default=["think", "answer"],
        description="the response must be <A>...</A> for each of these tags, once, in this order, and nothing else",
    )
    pattern: str | None = Field(
        default=None, description="regular expression that the whole response must match; replaces `tags`"
    )
    hit: float = Field(default=1.0, description="reward of a response in the format")
    miss: float = Field(default=0.0, description="reward of any other")


class LengthOptions(Options):
    """Options of `length`."""

    shape: Literal["linear", "cosine", "overlong"] = Field(
        default="linear",
        description="linear, cosine: from 1 down to 0; overlong: from 0 down to -1, a penalty to add to other rewards",
    )
    free: int = Field(default=512, ge=0, description="response tokens up to which the reward is highest")
    limit: int = Field(default=1024, gt=0, description="response tokens from which on the reward is lowest")

    @model_validator(mode="after")
    def _free_is_below_limit(self) -> Self:
        if self.free >= self.limit:
            raise ValueError(f"free is {self.free} and limit {self.limit}; expected free below limit")
        return self


class JsonSchemaOptions(Options):
    """Options of `json_schema`."""

    path: str | None = Field(default=None, description="file with the schema; default: each sample's own schema")
    metadata_key: str = Field(default="json_schema", description="key in Sample.metadata of the sample's schema")
    fenced: bool = Field(
        default=True, description="the document is the last ``` block, if there is one; false: the whole response"
    )
    parses: float = Field(default=0.0, description="reward of a response that is JSON, but violates the schema")


class CodeOptions(Options):
    """Options of `code`."""

    metadata_key: str = Field(
        default="tests", description="key in Sample.metadata of the tests; samples without it have them in the label"
    )
    score: Literal["all", "share"] = Field(
        default="all", description="1 if all tests pass, else 0; or the share of tests that pass"
    )
    python_tests: Literal["compare", "run"] = Field(
        default="compare",
        description="tests that are Python code: compare: evaluate what they assert about and compare it outside the"
        " sandbox, and refuse tests for which this is impossible; run: run them with the response's code, which can"
        " then cheat",
    )
    wall_s: float = Field(default=6.0, gt=0, description="seconds for one run of the program")
    cpu_s: float = Field(default=5.0, gt=0, description="CPU seconds for one run of the program")
    total_s: float = Field(
        default=30.0, gt=0, description="seconds for all tests of a sample; tests that did not finish by then fail"
    )
    memory_mb: int = Field(default=512, ge=64, description="MiB of memory the program may use")
    file_mb: int = Field(default=16, ge=1, description="MiB of files the program may write")
    processes: int = Field(default=16, ge=1, description="processes and threads the program may have")
    output_kb: int = Field(default=256, ge=1, description="KiB the program may print")
    require_isolation: Literal["namespaces", "filter", "limits"] = Field(
        default="filter",
        description="weakest isolation to accept (see SECURITY.md); a machine that permits less is refused",
    )


class ServiceOptions(Options):
    """Options of rewards that use a service over HTTP."""

    retries: int = Field(
        default=4, ge=0, description="retries of a request that gets 429, 5xx, no connection or no response"
    )
    backoff_s: float = Field(default=0.5, ge=0, description="seconds before the first retry; doubled each time")
    request_timeout_s: float = Field(default=60.0, gt=0, description="deadline of one request in seconds")
    token_env: str | None = Field(
        default=None, description="environment variable with a token, sent as `Authorization: Bearer TOKEN`"
    )


class RemoteOptions(ServiceOptions):
    """Options of `remote`."""

    url: str = Field(pattern=r"^https?://", description="address that samples are posted to")
    protocol: Literal["batch", "single"] = Field(
        default="batch",
        description='batch: {"samples": [...]} and {"rewards": [...]}; single: one sample and one reward per request',
    )
    reward_key: str = Field(default="score", description="key of the reward, if rewards are objects")
    batch_size: int = Field(default=32, ge=1, description="maximum number of samples in one request")
    batch_wait_s: float = Field(default=0.02, ge=0, description="seconds that a sample waits for others")
    concurrency: int = Field(default=32, ge=1, description="concurrent requests from each worker process")


class LLMJudgeOptions(ServiceOptions):
    """Options of `llm_judge`."""

    url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="base address, to which /v1/chat/completions is added; default: the run's own engines",
    )
    model: str = Field(default="default", description="name of the model, if the endpoint serves several")
    template: str = Field(
        default=(
            "Question:\n{question}\n\nReference answer:\n{label}\n\nAnswer to judge:\n{response}\n\n"
            "Rate the answer from 0 (wrong) to 10 (right). End with a line `Score: N`."
        ),
        description="prompt template of the judge, with {question}, {response} and {label}",
    )
    template_path: str | None = Field(default=None, description="file with the template; replaces `template`")
    system: str | None = Field(default=None, description="system message before the prompt")
    pattern: str = Field(
        default=r"(?i)score\s*[:=][\s*]*(-?\d+(?:\.\d+)?)",
        description="regular expression for the score; the first group of its last match counts",
    )
    lowest: float = Field(default=0.0, description="score that becomes reward 0")
    highest: float = Field(default=10.0, description="score that becomes reward 1")
    attempts: int = Field(default=2, ge=1, description="how often to ask a judge that gives no score in that range")
    no_score: float | None = Field(
        default=None, description="reward of a sample that gets no score; default: the sample fails"
    )
    temperature: float = Field(default=0.0, ge=0, description="sampling temperature of the judge")
    max_tokens: int = Field(default=256, ge=1, description="tokens that the judge may generate")
    concurrency: int = Field(default=32, ge=1, description="concurrent requests from each worker process")

    @model_validator(mode="after")
    def _scale_has_two_ends(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}; expected lowest below highest")
        return self


class GivenOptions(Options):
    """Options of `given`."""

    missing: float | None = Field(
        default=None, description="reward of a sample without one; default: such a sample fails"
    )


class RewardModelOptions(Options):
    """Options of `reward_model`."""

    model_path: str = Field(description="folder of a Hugging Face sequence-classification model with its tokenizer")
    output: Literal["logit", "sigmoid"] = Field(default="logit", description="the raw output, or its sigmoid")
    index: int = Field(default=0, ge=0, description="index of the output that is the reward")
    max_tokens: int = Field(default=4096, ge=1, description="tokens the model reads; longer texts lose their beginning")
    batch_size: int = Field(default=8, ge=1, description="maximum number of samples in one forward pass")
    batch_wait_s: float = Field(default=0.02, ge=0, description="seconds that a sample waits for others")
    threads: int = Field(default=1, ge=1, description="CPU threads of each worker process")
    device: str = Field(default="cpu", description="torch device")
