"""What the edge says itself: OpenAI's shape, and nothing that nginx would read otherwise."""

from __future__ import annotations

import json
import re

import pytest

from edge.own_answers import NO_METRICS, NO_PROXY, OF_NGINX, OF_RULES, OwnAnswer, locations, sent_to

ALL = {
    "no proxy": NO_PROXY,
    "no metrics": NO_METRICS,
    **{str(key): value for key, value in OF_NGINX.items()},
    **OF_RULES,
}


@pytest.mark.parametrize("answer", ALL.values(), ids=ALL)
def test_has_openais_shape(answer: OwnAnswer) -> None:
    (said,) = re.findall(r"return (\d+) '([^']*)';", answer.directives)
    assert said == (str(answer.status), answer.body)
    assert "$" not in answer.body, "nginx would take it for a variable"
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and (error["type"] == "server_error") is (
        answer.status >= 500 and answer.status not in (501, 505)
    )


@pytest.mark.parametrize("answer", ALL.values(), ids=ALL)
def test_who_may_come_again_is_told_when(answer: OwnAnswer) -> None:
    told = any(re.fullmatch(r"Retry-After [1-9]\d*", header) for header in answer.headers)
    assert told is (answer.status in (429, 503))


def test_every_error_of_nginx_is_sent_to_an_answer_that_is_there() -> None:
    text = locations()
    places = re.findall(r"location = (\S+) \{ internal; ", text)
    assert len(places) == len(set(places)) == len(OF_NGINX) + len(OF_RULES)
    for status in OF_NGINX:
        ((place),) = re.findall(rf"error_page {status} = (\S+);", text)
        assert place in places
    for name in OF_RULES:
        assert sent_to(name).split()[2] in places
