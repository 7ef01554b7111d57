"""GET /v1/models and /v1/models/{id}."""

from slotpy.server.openai.models import ROUTES
from tests.server.fakes import FakeServer, model

HUB = model("org/repo:latest")


def test_the_list_has_the_recorded_shape():
    answer = FakeServer(ROUTES, models=[model("tiny:latest"), HUB]).get("/v1/models")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == {
        "object": "list",
        "data": [
            {"id": "tiny:latest", "object": "model", "created": 1767312000, "owned_by": "library"},
            {"id": "org/repo:latest", "object": "model", "created": 1767312000, "owned_by": "org"},
        ],
    }


def test_no_models_are_an_empty_list():
    assert FakeServer(ROUTES, models=[]).get("/v1/models").json == {"object": "list", "data": []}


def test_a_model_is_shown_under_the_name_asked_for():
    assert FakeServer(ROUTES).get("/v1/models/TinyChat").json["id"] == "TinyChat"


def test_a_name_may_have_slashes():
    server = FakeServer(ROUTES, models=[HUB])
    assert server.get("/v1/models/org/repo").json["id"] == "org/repo"
    assert server.get("/v1/models/org%2Frepo").json["id"] == "org/repo"


def test_an_unknown_model_is_named_with_its_tag():
    answer = FakeServer(ROUTES).get("/v1/models/nosuch")
    assert (answer.status, answer.json["error"]["message"]) == (404, "model 'nosuch:latest' not found")
    answer = FakeServer(ROUTES).get("/v1/models/org/nosuch:4bit")
    assert answer.json["error"]["message"] == "model 'org/nosuch:4bit' not found"
