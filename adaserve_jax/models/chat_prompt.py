"""How a conversation becomes a prompt: options of a chat template; templates of clients run in a process apart.

A template is a program. The model's own runs here, in transformers' sandbox; one that a client sends runs in
`template_process.py`, a process with limits of processor time, memory and output, and with nothing to read.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaserve_jax.errors import AdaServeError, QueueFullError, RequestError

_log = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 64 * 1024
MAX_RENDERED_CHARS = 4 * 2**20
CPU_LIMIT_S = 2
WALL_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 512 << 20
AT_ONCE = 2
MAX_REASON_CHARS = 300
_PROGRAM = Path(__file__).with_name("template_process.py")
_END = "\N{END OF TEXT}<end of the final message>"


@dataclass(frozen=True)
class ChatPrompt:
    """Options of one chat template.

    add_generation_prompt: end with what begins an answer. continue_final_message: end within the last message, which
    the answer goes on with. add_special_tokens: put the tokenizer's special tokens around the rendered text. variables:
    what the template may use by name. template: the client's; None: the model's. tools: as OpenAI's API has them, for a
    template that knows tools. asked_s: time.monotonic() from which WALL_LIMIT_S counts; None: when it is rendered.
    Raises RequestError: the template is too long.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    template: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    asked_s: float | None = None

    def __post_init__(self) -> None:
        if self.template is not None and len(self.template) > MAX_TEMPLATE_CHARS:
            raise _refusal(f"at most {MAX_TEMPLATE_CHARS} characters, got {len(self.template)}")


PLAIN_CHAT = ChatPrompt()


class TemplateProcesses:
    """Renders templates of clients, each in a process of its own. Thread-safe."""

    def __init__(self) -> None:
        """Allow AT_ONCE processes; other templates wait for their turn."""
        self._places = threading.Semaphore(AT_ONCE)

    def render(
        self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, Any]
    ) -> str:
        """Render a client's template in a process with limits; block until WALL_LIMIT_S after it was asked for at most.

        Raises RequestError: it fails or exceeds a limit; QueueFullError: too many are being rendered to end in that
        time; AdaServeError: the process itself fails.
        """
        assert prompt.template is not None
        listed = [dict(message) for message in messages]
        if prompt.continue_final_message:
            listed[-1]["content"] = f"{listed[-1].get('content') or ''}{_END}"
        variables = {
            "tools": list(prompt.tools) or None, "documents": None, **special_tokens, **prompt.variables,
            "messages": listed, "add_generation_prompt": prompt.add_generation_prompt,
        }  # fmt: skip
        limits = {"cpu_s": CPU_LIMIT_S, "memory_bytes": MEMORY_LIMIT_BYTES, "chars": MAX_RENDERED_CHARS}
        task = json.dumps({"limits": limits, "template": prompt.template, "variables": variables})
        rendered = self._run(task, prompt.asked_s)
        if not prompt.continue_final_message:
            return rendered
        before, found, _ = rendered.rpartition(_END)
        if not found:
            raise _refusal("it does not show the final message as it is, which continue_final_message needs")
        return before

    def _run(self, task: str, asked_s: float | None) -> str:
        now = time.monotonic()
        until = (now if asked_s is None else asked_s) + WALL_LIMIT_S
        busy = QueueFullError("too many chat templates are being rendered; retry later")
        if until <= now or not self._places.acquire(timeout=until - now):
            raise busy
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-B", str(_PROGRAM)],
                input=task.encode(), capture_output=True, timeout=until - time.monotonic(), env={}, cwd="/",
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # not the template's fault: it only computes, which CPU_LIMIT_S bounds
            raise busy from None
        finally:
            self._places.release()
        if ended.returncode < 0 or b"MemoryError" in ended.stderr:  # killed by a limit, or no memory for the answer
            raise _refusal(f"it takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 20} MiB")
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip()
            _log.error("the process of a chat template ended with status %d: %s", ended.returncode, said)
            raise AdaServeError("the process that renders chat templates failed; the server's log says why")
        answer = json.loads(ended.stdout)
        if "error" in answer:
            raise _refusal(str(answer["error"])[:MAX_REASON_CHARS])
        return answer["text"]


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"chat_template must be a Jinja template that renders these messages: {why}",
        param="chat_template",
        code="invalid_value",
    )
