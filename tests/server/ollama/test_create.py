"""Models made of others and of sent files, second names, and removal: /api/create, /api/copy, /api/delete."""

from pathlib import Path

import pytest

from slotpy.demo import demo_directory
from slotpy.engine.generation import UnloadRequest
from slotpy.server.library.library import Library
from slotpy.server.ollama.models import ROUTES
from tests.server.fakes import UNLOADED, FakeServer
from tests.server.library.test_library import put_demo
from tests.server.ollama.test_blobs import keep
from tests.server.ollama.test_models import load


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    server = FakeServer(ROUTES, [UNLOADED])
    server.service.library = Library(tmp_path / "models", tmp_path / "home")
    return server


def find(server: FakeServer, name: str):
    return server.service.library.find(name)


def statuses(server: FakeServer, body: dict) -> list[str]:
    return [line["status"] for line in server.post("/api/create", body).records]


def delete(server: FakeServer, name: str):
    return server.ask("DELETE", "/api/delete", {"model": "", "name": name})


def send_demo(server: FakeServer, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Have the demo's files as blobs; give their digests by name."""
    paths = [path for path in demo_directory().iterdir() if path.suffix != ".md" and path.name not in without]
    return {path.name: keep(server.service.library.blobs, path.read_bytes()) for path in paths}


def test_a_model_is_made_of_another_in_ollamas_steps(server):
    steps = statuses(server, {"model": "c1", "from": "demo", "system": "s", "parameters": {"temperature": 0.1}})
    assert steps[0] == f"using existing layer sha256:{find(server, 'demo').digest}"
    assert [step.partition("sha256:")[0] for step in steps[1:]] == [
        *("creating new layer ", "creating new layer ", "writing manifest", "success")
    ]
    assert len({*steps}) == 5
    assert (find(server, "c1").system, find(server, "c1").parameters) == ("s", {"temperature": 0.1})


def test_one_object_instead_of_a_stream_is_the_last_line(server):
    answer = server.post("/api/create", {"name": "c2", "from": "demo", "stream": False})
    assert (answer.status, answer.json) == (200, {"status": "success"})
    assert answer.headers["Content-Type"] == "application/json"
    assert find(server, "c2").details["parent_model"] == "demo:latest"


def test_what_a_base_added_is_taken_over_and_may_be_replaced(server):
    messages = [{"role": "user", "content": "hi"}]
    statuses(server, {"model": "one", "from": "demo", "system": "s", "parameters": {"top_k": 1, "top_p": 1}})
    statuses(server, {"model": "two", "from": "one", "parameters": {"top_k": 2}, "messages": messages})
    two = find(server, "two")
    assert (two.system, two.parameters, two.messages) == ("s", {"top_k": 2, "top_p": 1}, tuple(messages))
    assert two.details["parent_model"] == "demo:latest"
    statuses(server, {"model": "two", "from": "two", "system": "t"})
    assert (find(server, "two").system, find(server, "two").parameters) == ("t", {"top_k": 2, "top_p": 1})


def test_a_system_message_that_is_sent_twice_is_kept_once(server):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    statuses(server, {"model": "saved", "from": "demo", "system": "s", "messages": messages})
    assert (find(server, "saved").system, find(server, "saved").messages) == ("s", tuple(messages[1:]))
    statuses(server, {"model": "saved", "from": "saved", "system": "t", "messages": messages})
    assert find(server, "saved").messages == tuple(messages)


def test_several_licences_are_one_text(server):
    statuses(server, {"model": "c1", "from": "demo", "license": ["MIT", "and more"]})
    assert find(server, "c1").license == "MIT\nand more"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "invalid model name"),
        ({"model": "a b", "from": "demo"}, "invalid model name"),
        ({"model": "c3"}, "neither 'from' or 'files' was specified"),
        ({"model": "c3", "from": "demo", "quantize": "q4_0"}, "quantize"),
        ({"model": "c3", "from": "demo", "adapters": {"a": "sha256:0"}}, "adapters"),
        ({"model": "c3", "from": "demo", "parser": "x"}, "parser"),
        ({"model": "c3", "from": "demo", "template": "{{ .Prompt }}"}, "leave TEMPLATE out"),
        ({"model": "c3", "from": "demo", "license": 5}, "license"),
        ({"model": "c3", "files": {"a": 5}}, "json: cannot unmarshal"),
        ({"model": "c3", "from": "demo", "parameters": {"stop": "x"}}, 'option "stop" must be of type array'),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(server, body, text):
    answer = server.post("/api/create", body)
    assert answer.status == 400 and text in answer.json["error"]
    assert [model.name for model in server.service.library.list()] == ["demo:latest"]


def test_the_checkpoints_own_template_may_be_sent_back(server):
    template = find(server, "demo").template
    assert statuses(server, {"model": "c1", "from": "demo", "template": template})[-1] == "success"


def test_a_base_that_nobody_has_fails_as_its_pull_does(server):
    lines = server.post("/api/create", {"model": "new", "from": "nosuch"}).records
    assert lines == [{"status": "pulling manifest"}, {"error": "pull model manifest: file does not exist"}]


def test_a_model_is_made_of_sent_files(server):
    files = send_demo(server)
    steps = statuses(server, {"model": "mine:v1", "files": files, "system": "s"})
    assert steps[: len(files)] == [f"using existing layer {digest}" for digest in files.values()]
    assert steps[-2:] == ["writing manifest", "success"]
    mine = find(server, "mine:v1")
    assert mine.directory != demo_directory() and mine.system == "s"
    assert mine.text.tokenizer.encode("hi") == find(server, "demo").text.tokenizer.encode("hi")
    assert (mine.directory / "config.json").read_bytes() == (demo_directory() / "config.json").read_bytes()


def test_files_without_a_chat_template_make_a_model_and_a_note(server):
    steps = statuses(server, {"model": "mine", "files": send_demo(server, without=("chat_template.jinja",))})
    assert "no chat template" in steps[-3] and steps[-1] == "success"
    assert find(server, "mine").capabilities == {"completion"}


def test_what_a_killed_process_left_is_cleared(server):
    left = server.service.library.created_dir / ".left"
    left.mkdir(parents=True)
    statuses(server, {"model": "mine", "files": send_demo(server)})
    assert not left.exists()


def test_the_files_go_with_the_last_model_that_has_them(server):
    files = send_demo(server)
    home = server.service.library.home
    statuses(server, {"model": "one", "files": files})
    assert server.post("/api/copy", {"source": "one", "destination": "two"}).status == 200
    assert delete(server, "one").status == 200
    assert find(server, "two").directory.is_dir()
    statuses(server, {"model": "two", "from": "demo"})
    assert list((home / "created").iterdir()) == [] and list((home / "blobs").iterdir()) == []


def test_files_that_make_no_model_are_refused_and_say_why(server):
    files = send_demo(server, without=("tokenizer.json",))
    answer = server.post("/api/create", {"model": "mine", "files": files})
    assert answer.status == 400 and "no tokenizer.json" in answer.json["error"]
    del files["config.json"]
    answer = server.post("/api/create", {"model": "mine", "files": files})
    assert answer.status == 400 and "config.json" in answer.json["error"]
    assert str(server.service.library.home) not in answer.json["error"]
    assert list((server.service.library.home / "created").iterdir()) == []


def test_gguf_is_refused_by_its_bytes_and_by_its_name(server):
    blobs = server.service.library.blobs
    for name, digest in (("model.bin", keep(blobs, b"GGUF" + bytes(100))), ("x.gguf", keep(blobs, b"other"))):
        answer = server.post("/api/create", {"model": "g", "files": {name: digest}})
        assert answer.status == 400 and "GGUF" in answer.json["error"] and "safetensors" in answer.json["error"]


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "slotpy-model.json", "", "a" * 256])
def test_a_file_cannot_leave_its_directory(server, name):
    answer = server.post("/api/create", {"model": "g", "files": {name: "sha256:" + 64 * "0"}})
    assert answer.status == 400 and "no name" in answer.json["error"]


def test_a_file_that_was_never_sent_is_named(server):
    digest = "sha256:" + 64 * "0"
    answer = server.post("/api/create", {"model": "g", "files": {"config.json": digest}})
    assert answer.status == 400 and f'blob "{digest}" for config.json not found' in answer.json["error"]


def test_a_copy_has_another_name_and_digest(server):
    answer = server.post("/api/copy", {"source": "demo", "destination": "cp1"})
    assert (answer.status, answer.raw) == (200, b"")
    assert find(server, "cp1").digest != find(server, "demo").digest
    assert server.post("/api/copy", {"source": "demo", "destination": "Demo:latest"}).status == 200


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, 'source "" is invalid'),
        ({"source": "demo", "destination": "a b"}, 400, 'destination "a b" is invalid'),
        ({"source": "nosuch", "destination": "y"}, 404, 'model "nosuch" not found'),
    ],
)
def test_copy_refuses_in_ollamas_words(server, body, status, text):
    answer = server.post("/api/copy", body)
    assert (answer.status, answer.json) == (status, {"error": text})


def test_a_made_model_is_deleted_and_the_loaded_base_stays(server):
    load(server)
    server.post("/api/copy", {"source": "demo", "destination": "cp1"})
    answer = delete(server, "cp1")
    assert (answer.status, answer.raw) == (200, b"")
    assert server.worker.submissions == []
    assert delete(server, "cp1").status == 404


def test_a_pulled_model_is_unloaded_before_its_files_go(server, tmp_path):
    directory = put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo")
    load(server, name="org/repo:latest", directory=directory)
    assert delete(server, "org/repo").status == 200
    [asked] = server.worker.submissions
    assert asked.request == UnloadRequest() and asked.directory == directory
    assert not directory.exists()


def test_a_model_that_must_stay_is_not_even_unloaded(server, tmp_path):
    directory = put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo")
    server.post("/api/copy", {"source": "org/repo", "destination": "cp1"})
    load(server, name="org/repo:latest", directory=directory)
    answer = delete(server, "org/repo")
    assert answer.status == 400 and "cp1:latest" in answer.json["error"]
    assert server.worker.submissions == [] and directory.is_dir()


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("nosuch", 404, "model 'nosuch' not found"),
        ("", 400, 'name "" is invalid'),
        ("demo", 400, "the demo comes with slotpy and cannot be deleted"),
    ],
)
def test_delete_refuses(server, name, status, text):
    answer = delete(server, name)
    assert (answer.status, answer.json) == (status, {"error": text})


def test_a_body_is_needed(server):
    for method, path in (("POST", "/api/create"), ("POST", "/api/copy"), ("DELETE", "/api/delete")):
        answer = server.ask(method, path, b"")
        assert (answer.status, answer.json) == (400, {"error": "missing request body"})
