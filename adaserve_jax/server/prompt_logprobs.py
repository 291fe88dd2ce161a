"""Log probabilities of prompts: what a request asks for, and how they stand in the response.

With `echo`, those of completions begin with the prompt's. `prompt_logprobs` lists them apart, by token id, as vLLM
does. Neither has any for the first token, which nothing precedes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.schema import LEAST_LOGPROB, CompletionBody, GenerationBody, PromptLogprob
from adaserve_jax.types import TokenLogprob

MAX_ENTRIES = 2**17
"""Most log probabilities of prompts in one response, so that writing it holds up other requests for 0.2 s at most."""


@dataclass(frozen=True)
class PromptReport:
    """Log probabilities of prompts that a request asks for.

    echoed: number of likeliest tokens shown beside each echoed token; listed: the same in `prompt_logprobs`; None: not
    asked for.
    """

    echoed: int | None = None
    listed: int | None = None

    @classmethod
    def of(cls, body: GenerationBody) -> PromptReport:
        """Return what a body asks for."""
        echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
        return cls(echoed, body.prompt_logprobs)

    @property
    def top(self) -> int | None:
        """Number of likeliest tokens that the engine must report; None: nothing is asked of prompts."""
        asked = [count for count in (self.listed, self.echoed) if count is not None]
        wrong = [count for count in asked if count < 0]  # for `SamplingParams` to refuse
        return min(wrong) if wrong else max(asked, default=None)

    def check(self, requests: Sequence[GenerateRequest], *, stream: bool) -> None:
        """Raise ApiError unless the response can hold them: in no stream `prompt_logprobs`, in all MAX_ENTRIES."""
        if self.listed is not None and stream:
            raise invalid(
                "prompt_logprobs must be left out of a stream, which has no place for them; leave out stream, or use "
                "echo with logprobs",
                "prompt_logprobs",
            )
        tokens = sum(len(request.prompt_ids) * request.sampling.n for request in requests)
        entries = sum(tokens * (1 + count) for count in (self.echoed, self.listed) if count is not None)
        if entries > MAX_ENTRIES:
            field = "logprobs" if self.listed is None else "prompt_logprobs"
            raise invalid(
                f"{field} must ask for at most {MAX_ENTRIES} log probabilities of the prompts' tokens, got {entries}: "
                "tokens times n, times one more than the likeliest that are asked for; send fewer prompts at once, or "
                "ask for fewer",
                field,
            )

    def entry(self, item: TokenLogprob, spell: Callable[[int], str]) -> dict[str, PromptLogprob]:
        """Return what `prompt_logprobs` has in one place: the prompt's own token, then the likeliest by rank."""
        told = [(item.token_id, item.logprob, item.rank)]
        told += [(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top[: self.listed], 1)]
        return {
            str(token): PromptLogprob(logprob=max(logprob, LEAST_LOGPROB), rank=rank, decoded_token=spell(token))
            for token, logprob, rank in told
        }


def is_prompt_only(body: GenerationBody) -> bool:
    """Return whether a body asks for its prompt back and no output."""
    if not isinstance(body, CompletionBody) or not body.echo:
        return False
    return body.max_tokens == 0 and body.max_completion_tokens is None
