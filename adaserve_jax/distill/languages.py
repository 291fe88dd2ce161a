"""In which language a prompt is, as far as a draft is there for it. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from adaserve_jax.errors import ConfigError

LEAST_CHANCE = 0.2
"""Probability of the likeliest language from which on it is believed."""
MOST_CHARS = 1000
"""The end of a prompt that is looked at: what was asked last, which is in the language of the answer."""
_log = logging.getLogger(__name__)


class LanguageDetector:
    """Finds the draft that is named for a text's language: `zh`, or `pt-BR` for any Portuguese.

    names: of the drafts, in order; the first is the default and stands for no language. Names that are no languages are
    logged: only a tag leads to them. Raises ConfigError when no name is a language, or py3langid is not installed.
    """

    def __init__(self, names: Sequence[str]):
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise ConfigError(
                "route language needs py3langid; install it: pip install 'adaserve-jax[routing]'"
            ) from error
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_CHANCE)
        known = set(self._identifier.labels)
        languages = {name: name.replace("_", "-").partition("-")[0].lower() for name in names[1:]}
        others = [name for name, language in languages.items() if language not in known]
        if len(others) == len(languages):
            raise ConfigError(
                f"with route language, drafts are named by the ISO 639 code of a language, such as de=FOLDER; "
                f"got {', '.join(others) or 'no further draft'}"
            )
        if others:
            _log.warning("drafts whose names are no languages, so that only a tag leads to them: %s", ", ".join(others))
        self._draft_of: dict[str, int] = {}
        for index, name in enumerate(names[1:], 1):
            self._draft_of.setdefault(languages[name], index)

    def route(self, text: str) -> int:
        """The index of the draft for this text; 0 when its language has none or cannot be told."""
        language, _ = self._identifier.classify(text[-MOST_CHARS:])
        return self._draft_of.get(language, 0)
