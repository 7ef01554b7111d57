import pytest

from slotpy.server.ollama.system import ROUTES
from tests.server.fakes import FakeServer

SERVER = FakeServer(ROUTES)


def test_says_that_it_is_there():
    answer = SERVER.get("/")
    assert (answer.status, answer.text) == (200, "Ollama is running")
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(("path", "length"), [("/", 17), ("/api/version", 20)])
def test_head_is_like_get_without_the_body(path, length):
    answer = SERVER.ask("HEAD", path)
    assert (answer.status, answer.raw, answer.headers["Content-Length"]) == (200, b"", str(length))


def test_the_version_is_three_numbers():
    answer = SERVER.get("/api/version")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    major, minor, patch = map(int, answer.json["version"].split("."))
    assert (major, minor, patch) >= (0, 6, 4)  # what GitHub Copilot asks for


def test_there_is_no_cloud():
    assert SERVER.get("/api/status").json == {"cloud": {"disabled": True, "source": "env"}}
    for path in ("/api/me", "/api/signout"):
        answer = SERVER.post(path)
        assert (answer.status, answer.json["error"]) == (401, "unauthorized")
    assert SERVER.get("/api/experimental/model-recommendations").json == {"recommendations": []}
    for path, what in (("web_search", "web search"), ("web_fetch", "web fetch")):
        answer = SERVER.post(f"/api/experimental/{path}", {"query": "x"})
        assert (answer.status, answer.json["error"]) == (403, f"ollama cloud is disabled: {what} is unavailable")
