"""A scripted engine and a byte tokenizer for tests of the process mode and the server: no model, no jax.

The engine answers with its prompt's bytes over and over, `STRIDE` tokens a step, as text that never splits a
character. A prompt that starts with a word below does something else:
"refuse": submit raises RequestError; "full": QueueFullError; "bug": ZeroDivisionError; "late-refuse", "late-full": the
same errors after submit has returned; "fail": an error after one step; "die": the process ends (thread mode: the engine
is dead); "slow": 50 ms a step; "held": no step until the file that `GATE` names is there. Where JSON was asked for, the
answer is the object in the prompt; where there are tools or thinking, what the user said last. Log probabilities
are those of `logprob_of`.
"""

from __future__ import annotations

import codecs
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.adapters import AdapterTable
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk, Sink, check_request
from adaserve_jax.errors import AdaServeError, CheckpointError, EngineDeadError, QueueFullError, RequestError
from adaserve_jax.models.chat_prompt import PLAIN_CHAT, ChatPrompt
from adaserve_jax.models.config import GenerationDefaults
from adaserve_jax.models.thinking_detokenizer import ThinkingDetokenizer
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.stats import StepStats
from adaserve_jax.types import TokenLogprob

STRIDE = 3
CONTEXT = 512
LONG_CONTEXT = 2_000_000
"""Context of the target `long`, whose answers may be long."""
BASELINE_S = 0.010
CACHED = 2
"""Tokens of its prompt that the first choice says it found in the prefix cache; each one after it says one more."""
GATE = "SCRIPTED_GATE"
"""Variable of the environment."""
REFUSALS = {
    "refuse": RequestError("the engine cannot serve this", param="prompt", code="invalid_value"),
    "full": QueueFullError("the queue is full"),
}


def logprob_of(token: int, alternatives: int) -> TokenLogprob:
    """Made up: what the scripted engine says of a token, and of the tokens that follow it in number."""
    near = ((token + j) % 256 for j in range(alternatives))
    return TokenLogprob(token, -(token % 7) / 8 - 0.125, tuple((t, -(t % 7) / 8 - 0.125) for t in near))


class ByteTokenizer:
    """Token id = byte."""

    longest_token = 64  # so that long texts may be tokenised

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def spelled(self, token_id: int) -> bytes:
        return bytes([token_id])

    def has_text(self, token_id: int) -> bool:
        return True

    def id_of(self, text: str) -> int | None:
        return None

    chat_template = "{% if tools %}{% endif %}"

    def apply_chat_template(self, messages: list[dict[str, str]], prompt: ChatPrompt = PLAIN_CHAT) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return self.encode(text + "assistant:" * prompt.add_generation_prompt)


@dataclass
class Choice:
    request: GenerateRequest
    index: int
    sink: Sink
    arrival_s: float
    sent: int = 0
    steps: int = 0
    first_s: float | None = None
    due_s: float = 0.0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.texts = None
        if sampling.thinking is not None:
            prompt, tokenizer = self.request.prompt_ids, ByteTokenizer()
            self.texts = ThinkingDetokenizer(tokenizer, tokenizer, prompt, sampling.stop, sampling.thinking)

    @property
    def word(self) -> str:
        return bytes(b for b in self.request.prompt_ids if b < 256).decode(errors="replace").split(" ")[0]

    @property
    def answer(self) -> list[int]:
        """The tokens to give over and over."""
        prompt = bytes(b for b in self.request.prompt_ids if b < 256)
        if self.request.sampling.tool_calls is not None or self.texts is not None:
            said = prompt.rpartition(b"user: ")[2]
            before, mark, _ = said.rpartition(b"\nassistant:")
            return list(before if mark else said)
        found = prompt[prompt.find(b"{") : prompt.rfind(b"}") + 1]
        return list(found if self.request.sampling.json_schema is not None and found else prompt)

    def thought(self) -> tuple[str, int]:
        return ("", 0) if self.texts is None else self.texts.take()

    def logprobs(self, ids: list[int]) -> list[TokenLogprob]:
        asked = self.request.sampling.logprobs
        return [] if asked is None else [logprob_of(token, asked) for token in ids]

    def prompt_logprobs(self) -> list[TokenLogprob]:
        asked = self.request.sampling.prompt_logprobs
        return [] if asked is None else [logprob_of(token, asked) for token in self.request.prompt_ids[1:]]

    def metrics(self, now: float) -> RequestMetrics:
        slo = self.request.slo
        return RequestMetrics(
            arrival_s=self.arrival_s, first_scheduled_s=self.arrival_s + 0.001, first_token_s=self.first_s,
            last_token_s=now, prompt_tokens=len(self.request.prompt_ids), output_tokens=self.sent,
            verify_steps=self.steps, drafted_tokens=4 * self.steps, accepted_tokens=self.sent - self.steps,
            cached_tokens=CACHED + self.index,
            tpot_slo_s=slo.tpot_s(BASELINE_S), ttft_slo_s=slo.ttft_s, slo_class=self.request.slo_class,
        )  # fmt: skip


class ScriptedEngine:
    """One thread steps all choices; every public call is thread-safe."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None] | None = None):
        self.config = config
        self.defaults = GenerationDefaults()
        self.vocab_size = 256
        self.kv_tokens: int | None = None
        self.progress = progress
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        self.active: list[Choice] = []
        self.aborted: list[str] = []
        self.submitted: list[GenerateRequest] = []
        self.dead = True
        self.steps = 0
        self.finished: dict[str, int] = {}
        self.adapters = AdapterTable(config.lora_slots)

    @property
    def info(self) -> EngineInfo:
        if self.dead:
            raise EngineDeadError("not started")
        return EngineInfo(
            self.config.target, self.config.draft, "scripted", "cpu", "0",
            LONG_CONTEXT if self.config.target == "long" else CONTEXT, 64, self.vocab_size, BASELINE_S,
            defaults=self.defaults, drafts=self.config.draft_names, adapters=self.adapters.names,
            lora_slots=self.adapters.slots, synthetic_acceptance=self.config.synthetic_acceptance,
            kv_tokens=self.kv_tokens,
        )  # fmt: skip

    def start(self) -> None:
        for done in range(3):
            if self.progress is not None:
                self.progress("programs", done + 1, 3)
        if self.config.target == "missing":
            raise CheckpointError("expected model.safetensors in missing, found nothing")
        if self.config.target == "hang":
            time.sleep(60)
        for name, folder in self.config.lora_folders.items():
            self._put_adapter(name, folder, replace=False)
        self.dead = False
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if self.dead:
            raise EngineDeadError("the engine died")
        check_request(request, self.info)
        word = Choice(request, 0, sink, 0.0).word
        if word in REFUSALS:
            raise REFUSALS[word]
        if word == "bug":
            raise ZeroDivisionError("a bug in submit")
        with self.lock:
            self.submitted.append(request)
            now = time.monotonic()
            self.active += [Choice(request, i, sink, now) for i in range(request.sampling.n)]
            self.work.notify()

    def abort(self, request_id: str) -> None:
        with self.lock:
            gone = [c for c in self.active if c.request.request_id == request_id]
            self.aborted += [request_id] * bool(gone)
            for choice in gone:
                self.end(choice, "", [], "abort")

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        if self.dead:
            raise EngineDeadError("the engine died")
        with self.lock:
            self._put_adapter(name, folder, replace=replace)

    def _put_adapter(self, name: str, folder: str, *, replace: bool) -> None:
        if not (Path(folder) / "adapter_config.json").exists():
            raise CheckpointError(f"{folder}/adapter_config.json is missing")
        self.adapters.bind(name, self.adapters.free_slot(name, (), replace=replace))

    def unload_adapter(self, name: str) -> None:
        if self.dead:
            raise EngineDeadError("the engine died")
        with self.lock:
            self.adapters.remove(name)

    def stats(self) -> EngineStats:
        steps = StepStats(steps=self.steps, running=len(self.active), pages_used=3, pages_total=12, prompt_tokens=7)
        steps.draft_resident = True
        steps.accepted_per_position = [5, 2]
        steps.finished = dict(self.finished)
        return EngineStats(steps)

    def is_alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        with self.lock:
            self.dead = True
            self.work.notify()
            for choice in list(self.active):
                self.end(choice, "", [], "error", "the engine was closed")

    def end(self, choice: Choice, text: str, ids: list[int], reason: str, error: str | None = None) -> None:
        self.active.remove(choice)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        metrics = choice.metrics(time.monotonic())
        thought, count = choice.thought()
        choice.sink(OutputChunk(
            choice.request.request_id, choice.index, text, ids, reason, metrics, error,
            logprobs=choice.logprobs(ids), reasoning=thought, reasoning_tokens=count,
            stop_reason=None if choice.texts is None else choice.texts.stopped_by,
        ))  # fmt: skip

    def refuse(self, choice: Choice, error: AdaServeError) -> None:
        """As an engine whose queue or cache says no only when it comes to the request."""
        self.active.remove(choice)
        name, index = choice.request.request_id, choice.index
        choice.sink(OutputChunk(name, index, "", [], "error", None, str(error), error.code, error.param))

    def run(self) -> None:
        while not self.dead:
            with self.work:
                self.work.wait_for(lambda: self.active or self.dead)
            time.sleep(0.001)
            with self.lock:
                self.steps += bool(self.active)
                for choice in list(self.active):
                    self.step(choice)

    def step(self, choice: Choice) -> None:
        now = time.monotonic()
        if now < choice.due_s or choice not in self.active:
            return
        if choice.word == "held" and not Path(os.environ[GATE]).exists():
            return
        if choice.word == "slow":
            choice.due_s = now + 0.05
        if choice.word == "die":
            if self.config.policy == "process":
                os._exit(9)
            self.close()
            return
        if choice.word.startswith("late-"):
            self.refuse(choice, REFUSALS[choice.word.removeprefix("late-")])
            return
        answer, sampling = choice.answer, choice.request.sampling
        goes_on = sampling.grammar_source is None and choice.texts is None
        most = sampling.max_tokens if goes_on else min(sampling.max_tokens, len(answer))
        count = min(STRIDE, most - choice.sent)
        ids = [answer[(choice.sent + i) % len(answer)] for i in range(count)]
        if told := choice.prompt_logprobs() if not choice.sent else []:
            for first in range(0, len(told), STRIDE):
                part = told[first : first + STRIDE]
                choice.sink(OutputChunk(choice.request.request_id, choice.index, "", [], prompt_logprobs=part))
        choice.sent += count
        choice.steps += 1
        choice.first_s = choice.first_s or now
        done = choice.sent == most
        if choice.texts is None:
            text, kept = choice.decoder.decode(bytes(ids), final=done), None
        else:
            text, kept = choice.texts.push(ids)
            text += choice.texts.finish() if done and kept is None else ""
        if kept is not None:
            choice.sent += kept - count
            self.end(choice, text, ids[:kept], "stop")
            return
        if choice.word == "fail" and choice.steps == 2:
            self.end(choice, text, ids, "error", "the scripted failure")
        elif done:
            self.end(choice, text, ids, "length" if most == sampling.max_tokens else "stop")
        else:
            name, index = choice.request.request_id, choice.index
            thought, count = choice.thought()
            choice.sink(OutputChunk(
                name, index, text, ids, logprobs=choice.logprobs(ids), reasoning=thought, reasoning_tokens=count
            ))  # fmt: skip
