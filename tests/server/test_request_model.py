"""Wrong members of a list are one error, however many they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from adaserve_jax.server import responses_schema
from adaserve_jax.server.request_model import RequestModel
from adaserve_jax.server.responses_schema import MAX_METADATA, ResponsesBody


def models(model: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    """Every class of request bodies and their parts; those of the Responses API import all others."""
    assert responses_schema
    for each in model.__subclasses__():
        yield each
        yield from models(each)


def errors_of(model: type[RequestModel], name: str, value: object) -> int:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"no such field": 1, name: value})
    return sum(error["loc"][0] == name for error in caught.value.errors())


FIELDS = sorted(
    {
        (model, field.alias or name)
        for model in models()
        for name, field in model.model_fields.items()
        if "list" in str(field.annotation)
    },
    key=str,
)


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_wrong_members_of_a_list_are_one_error(model: type[RequestModel], name: str):
    one, many = [object()], [object()] * 9
    assert errors_of(model, name, many) == errors_of(model, name, one) > 0
    assert errors_of(model, name, [many] * 9) == errors_of(model, name, [one])


def test_pairs_of_metadata_are_counted_before_they_are_looked_at():
    assert errors_of(ResponsesBody, "metadata", dict.fromkeys(map(str, range(MAX_METADATA)))) == MAX_METADATA
    assert errors_of(ResponsesBody, "metadata", dict.fromkeys(map(str, range(MAX_METADATA + 1)))) == 1
