"""Writes docs/configuration.md from the fields of all sections: `python -m adaserve_jax.cli.config_reference`."""

from __future__ import annotations

from dataclasses import MISSING
from typing import get_type_hints

from adaserve_jax.cli.options import ENV_PREFIX
from adaserve_jax.server.config_file import HELP, SECTIONS, TABLES, default_of, fields_of, toml_value, type_words
from adaserve_jax.server.settings import digest_of

HEAD = f"""# Configuration file

Made by `python -m adaserve_jax.cli.config_reference`; a test fails when it differs from the code.

`adaserve serve --config FILE` takes its options from a [TOML](https://toml.io) file. A value comes from the first of
these that has it: the command line (`--port 9000`), the environment (`{ENV_PREFIX}PORT=9000`), the file, the default.

```console
adaserve config --example > adaserve.toml    # every key, its meaning and its default, commented out
adaserve config --check adaserve.toml        # is it valid? nothing is loaded, no secret is looked up
adaserve serve --config adaserve.toml
```

```toml
[engine]
target = "models/my-8b"
draft = "models/my-draft"

[learn]
learn = true
learn_folder = "learned"

[server]
host = "0.0.0.0"
tls_cert = "server.pem"
tls_key = "server.key"

[[classes]]
name = "interactive"
tpot_ms = 40
ttft_ms = 500
service_tiers = ["priority"]

[[classes]]
name = "batch"
priority = 10
service_tiers = ["flex"]

[[keys]]
name = "team-a"
key_sha256 = "{digest_of("sesame").hex()}"   # printf %s sesame | sha256sum
requests_per_minute = 600
tokens_per_minute = 200000
max_inflight = 32
learn = false          # nothing is learned from what this team asks

[[keys]]
name = "batch-jobs"
key_env = "BATCH_KEY"
slo_classes = ["batch"]
min_priority = 10
```

A file must be valid by itself. An unknown key, a wrong type or a value out of range ends the program with one line
that names file, section and key. TOML has no null: `"none"` stands for no value. Paths are relative to the working
directory.
"""
ABOUT = {
    "engine": "What the engine is built from; also options of `adaserve serve` ([cli.md](cli.md)).",
    "learn": "Whether and how drafts learn from what is served; also options of `adaserve serve` and `adaserve bench`. "
    "Without `learn = true` the others have no effect. What is kept of requests, and where, is in "
    "[security.md](security.md).",
    "drafter": "Which draft services draft, instead of a draft of this engine; also options of `adaserve serve`, "
    "`generate` and `bench`. Without `drafter` the others have no effect. [star.md](star.md) says more.",
    "server": "How the HTTP server behaves; also options of `adaserve serve`. [http.md](http.md) says more.",
    "classes": "A class of targets, one table for each. With any of them the default of `slo_classes` is gone; those "
    "of `slo_classes`, in the file, the environment or on the command line, are added to them, and one of the same "
    "name takes the place of the table",
    "keys": "An API key, one table for each; its secret is given by one of `key`, `key_env` and `key_sha256`. With any "
    "of them, or with `api_key`, whose keys are operators' and have no limits, the server asks for a "
    "key. What is over a limit is answered 429 `rate_limited`, with the seconds until there is room in "
    "`Retry-After`. A request that needs more "
    "tokens than the bucket ever holds goes on when the bucket is full, and the next ones wait for its debt. On SIGHUP "
    "the server reads the keys and `api_key` again and leaves everything else as it is "
    "([security.md](security.md)).",
}


def render() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for name, kind in (SECTIONS | TABLES).items():
        title = f"[{name}]" if name in SECTIONS else f"[[{name}]]"
        parts += [f"## `{title}`", "", ABOUT[name], "", "| key | must be | default | meaning |", "|---|---|---|---|"]
        hints = get_type_hints(kind)
        parts += [f"| `{key}` | {type_words(hints[key])} | {_default(kind, key)} | {_cell(HELP[name][key])} |"
                  for key in fields_of(kind)]  # fmt: skip
        parts.append("")
    return "\n".join(parts)


def _default(kind: type, key: str) -> str:
    default = default_of(kind, key)
    return "required" if default is MISSING else f"`{toml_value(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(render(), end="")
