"""Base of request bodies, types of their fields, and makers of fields that are refused or ignored, with the reason."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


def _valid_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer or encoder takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "invalid_text", "valid Unicode without half of a surrogate pair at character {at}", {"at": error.start}
        ) from None
    return text


ValidText = Annotated[str, AfterValidator(_valid_unicode)]
FIRST_ERROR = Field(fail_fast=True)  # a list of a million wrong items is one error, not a million
Ids = Annotated[list[int], FIRST_ERROR]
Texts = Annotated[list[ValidText], FIRST_ERROR]
IGNORED = "x-ignored-unless"


def at_most(most: int, what: str) -> BeforeValidator:
    """Return a validator that refuses a mapping of more entries than `most` before they are validated."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many", "at most {most} {what}", {"most": most, "what": what})
        return value

    return BeforeValidator(check)


class RequestModel(BaseModel):
    """Base of request bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="allow")

    def refused_field(self) -> str | None:
        """Return the first field that is not served and asks for something."""
        return next((name for name, values in not_served(type(self), "enum").items() if self._asks(name, values)), None)

    def ignored_fields(self) -> list[str]:
        """Return the unknown fields, and those that are ignored though they ask for something."""
        known = (name for name, values in not_served(type(self), IGNORED).items() if self._asks(name, values))
        return sorted([*(self.model_extra or ()), *known])

    def _asks(self, name: str, neutral: list[Any]) -> bool:
        value = getattr(self, name)
        return value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        )


def unsupported(shown: str, *neutral: Any, why: str = "") -> Any:
    """Return a field that is refused unless it is null or has a neutral value, which asks for nothing."""
    verb = "are" if " and " in shown else "is"
    description = f"Not implemented: only {shown} {verb} accepted{why and '; '}{why}."
    return Field(None, description=description, json_schema_extra={"enum": [None, *neutral]})


def ignored(why: str, *neutral: Any) -> Any:
    """Return a field that cannot change the text and is ignored; a warning names it unless its value is neutral."""
    return Field(None, description=f"Ignored: {why}.", json_schema_extra={IGNORED: list(neutral)})


def not_served(model: type[BaseModel], mark: str) -> dict[str, list[Any]]:
    """Return the fields that are refused (mark "enum") or IGNORED, and their neutral values."""
    return {name: list(extra[mark]) for name, field in model.model_fields.items() if mark in (extra := _extra(field))}


def _extra(field: FieldInfo) -> dict[str, Any]:
    return cast("dict[str, Any]", field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}
