"""``serve`` as programs see it that read its schema: a fuzzer sends what it allows, and else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from cases import long_cases
from serve_process import Client, Serving
from served_here import ServingHere
from service_streamer.pipelines import SteppedPipeline
from tiny_models import DEFAULT_MODEL, folder

pytestmark = pytest.mark.xdist_group("transformers")

#: A service of each kind.
SERVICES: dict[str, Any] = {
    "custom": lambda: Serving("served_models:kinds"),
    "fill-mask": Serving,
    "text-generation": lambda: ServingHere(str(folder("gpt2")), kind=SteppedPipeline),
    "feature-extraction": lambda: ServingHere(
        str(DEFAULT_MODEL), "--task", "feature-extraction", "--api-key", "secret"
    ),
    "reranking": lambda: Serving(str(folder("cross_encoder"))),
    "image-classification": lambda: Serving(str(folder("pictures"))),
}


@pytest.fixture(scope="module", params=["custom", *long_cases(*[*SERVICES][1:])])
def service(request: pytest.FixtureRequest) -> Iterator[Client]:
    with SERVICES[request.param]() as service:
        yield service


def test_service_survives_requests_that_the_schema_allows_or_not(service: Client) -> None:
    fuzz(service, {"authorization": "Bearer secret"})


def no_500(context: Any, response: Any, case: Any) -> None:
    """503 and 504 are honest: who gives it no time gets no result."""
    assert response.status_code != 500, response.text


#: Of each operation. More are for a night, or for a release.
CASES = int(os.environ.get("TEST_FUZZ_CASES", "15"))


def fuzz(service: Client, headers: dict[str, str], **only: str) -> None:
    """Send what the document allows, and what it does not, to all paths or ``only`` some."""
    import schemathesis  # takes seconds
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi import checks

    conforms = [
        no_500,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_dict(service.client.get("/openapi.json").json())
    schema.config.update(base_url=service.url)
    schema = schema.include(**only) if only else schema
    for result in schema.exclude(path="/events").get_all_operations():

        @given(case=result.ok().as_strategy())
        @settings(
            max_examples=CASES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        def attack(case: Any) -> None:
            case.validate_response(case.call(headers=headers), checks=conforms)

        attack()
