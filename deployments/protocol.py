"""Request bodies of the two generation routes, in OpenAI's shapes.

Every field is honoured or refused by name, never dropped: a field of OpenAI's that Eyas does not implement passes only
with a value that asks for nothing, an unknown one not at all. Types are strict: "1", 1.0 and true are no integers.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json

from eyas.deployments.api_error import ApiError
from eyas.deployments.errors import from_validation_problems
from eyas.deployments.fields import MessageText, Prompt, StopStrings, TokenId, only
from eyas.workers.sampling import SamplingParams

MAX_STOP_TOKENS = 64

BodyT = TypeVar("BodyT", bound="GenerationBody")

NO_PENALTIES = "tokens are drawn from the target's own distribution; leave it out"
NO_LOGPROBS = "log-probabilities are not returned; leave it out"
NO_TOOLS = "tool calling is not available; describe the tool in a message and parse the answer"
NO_STORAGE = "nothing is stored; leave it out"
TEXT_ONLY = "this endpoint reads and writes text only; leave it out"
ONE_CHOICE = "one choice is generated per request; send several requests with different seeds"


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False, remedy="streams are not padded; leave it out")] = None


class GenerationBody(StrictModel):
    """What both routes share. `stop_token_ids` and `ignore_eos` are Eyas's extensions; null means the default."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Annotated[Any, only(1, remedy=ONE_CHOICE)] = None
    presence_penalty: Annotated[Any, only(0, 0.0, remedy=NO_PENALTIES)] = None
    frequency_penalty: Annotated[Any, only(0, 0.0, remedy=NO_PENALTIES)] = None
    logit_bias: Annotated[Any, only({}, remedy=NO_PENALTIES)] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_tokens"

    def sampling_params(self) -> SamplingParams:
        """OpenAI's defaults (temperature 1, all of the nucleus); a sampled request without a seed gets a random one."""
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = self.seed
        if seed is None:
            # 53 bits: JavaScript clients read the seed back from the usage block as a double.
            seed = secrets.randbits(53) if temperature > 0 else 0
        return SamplingParams(temperature, 1.0 if self.top_p is None else self.top_p, seed)


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText
    name: str | None = None

    # A client may send an earlier answer back as it came, with these set to null.
    refusal: Annotated[Any, only(remedy=TEXT_ONLY)] = None
    annotations: Annotated[Any, only([], remedy=TEXT_ONLY)] = None
    audio: Annotated[Any, only(remedy=TEXT_ONLY)] = None
    function_call: Annotated[Any, only(remedy=NO_TOOLS)] = None
    tool_calls: Annotated[Any, only([], remedy=NO_TOOLS)] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it; none of them knows OpenAI's newer name for the system role."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    logprobs: Annotated[Any, only(False, remedy=NO_LOGPROBS)] = None
    top_logprobs: Annotated[Any, only(0, remedy=NO_LOGPROBS)] = None
    tools: Annotated[Any, only([], remedy=NO_TOOLS)] = None
    tool_choice: Annotated[Any, only("none", "auto", remedy=NO_TOOLS)] = None
    parallel_tool_calls: Annotated[Any, only(True, False, remedy=NO_TOOLS)] = None
    functions: Annotated[Any, only([], remedy=NO_TOOLS)] = None
    function_call: Annotated[Any, only("none", "auto", remedy=NO_TOOLS)] = None
    response_format: Annotated[
        Any,
        only({"type": "text"}, remedy="answers are plain text; ask for the format in a message and check the answer"),
    ] = None
    modalities: Annotated[Any, only(["text"], remedy=TEXT_ONLY)] = None
    audio: Annotated[Any, only(remedy=TEXT_ONLY)] = None
    prediction: Annotated[Any, only(remedy="Eyas drafts its own predictions; leave it out")] = None
    reasoning_effort: Annotated[Any, only("none", remedy="the model has no reasoning mode to set; leave it out")] = None
    verbosity: Annotated[Any, only("medium", remedy="ask for a short or long answer in a message")] = None
    web_search_options: Annotated[Any, only(remedy="there is no web search; leave it out")] = None
    store: Annotated[Any, only(False, remedy=NO_STORAGE)] = None
    metadata: Annotated[Any, only({}, remedy=NO_STORAGE)] = None
    service_tier: Annotated[Any, only("auto", "default", remedy="there is one tier; leave it out")] = None

    # Neither changes an answer: they tell a provider who asks and where the prompt may be cached.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("token_limits", "is another name of max_tokens; send one of them")
        return value

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is OpenAI's newer name of `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerationBody):
    prompt: Prompt

    logprobs: Annotated[Any, only(remedy=NO_LOGPROBS)] = None
    best_of: Annotated[Any, only(1, remedy=ONE_CHOICE)] = None
    echo: Annotated[Any, only(False, remedy="the prompt is not repeated; put it before the answer yourself")] = None
    suffix: Annotated[Any, only("", remedy="text is only continued, not filled in; leave it out")] = None


def parse_body(body_type: type[BodyT], raw: bytes, content_type: str | None) -> BodyT:
    """The request in `raw`; anything wrong with it is an `ApiError` naming the field."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        given = f"not {media_type!r}" if media_type else "and it is missing"
        raise ApiError(
            415, f"content-type: must be application/json, {given}", "content-type", "unsupported_media_type"
        )
    try:
        fields = from_json(raw)
    except ValueError as error:
        raise ApiError(400, f"body: is not valid JSON: {error}", "body", "malformed_json") from None
    try:
        body = body_type.model_validate(fields)
    except ValidationError as error:
        raise from_validation_problems(error.errors(include_url=False), body_type.model_fields) from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "stream_options: is only for requests with stream set to true", "stream_options", "invalid_value"
        )
    return body


def openapi_body(body_type: type[GenerationBody], path: str) -> dict[str, Any]:
    """The body's schema for the OpenAPI page, hidden from FastAPI because the route at `path` parses it itself."""
    pointer = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = body_type.model_json_schema(ref_template=pointer)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
