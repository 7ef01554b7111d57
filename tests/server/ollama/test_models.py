"""What clients are told about models: /api/tags, /api/show, /api/ps."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slotpy import budget
from slotpy.demo import demo_directory
from slotpy.doctor import published
from slotpy.engine import device
from slotpy.engine.worker import LoadedStatus, WorkerStatus
from slotpy.machine.machines import NAMED
from slotpy.server.library.library import Library
from slotpy.server.library.modelfile import modelfile_text, parameters_text
from slotpy.server.library.names import parse_served
from slotpy.server.library.records import Record
from slotpy.server.ollama.models import ROUTES
from tests.server.fakes import FakeServer

PLAN = budget.plan(NAMED["mac-48"], published.find("qwen3.8-flash-next").sizes)
MESSAGES = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": 'say "x"\nand more'})


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    server = FakeServer(ROUTES)
    server.service.library = Library(tmp_path / "models", tmp_path / "home")
    return server


def load(server: FakeServer, **changes: object) -> None:
    """Make the worker say that the demo is loaded."""
    status = LoadedStatus(
        name="demo:latest",
        directory=demo_directory(),
        expires_at=datetime.now(UTC) + timedelta(minutes=5),
        forever=False,
        context_tokens=2048,
        plan=PLAN,
        governor={"state": "steady"},
        slots={"num_slots": 64, "hits": 5, "misses": 6},
    )
    server.worker.status = lambda: WorkerStatus(loaded=replace(status, **changes), num_queued=0, running=False)


def save(server: FakeServer, name: str, **fields: object) -> None:
    server.service.library.save(Record(parse_served(name), base="demo:latest", **fields))


def parse_time(text: str) -> datetime:
    """Read a time as Go does: RFC 3339 with a zone, T between date and time."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", text)
    return datetime.fromisoformat(text)


def test_tags_lists_each_model_with_the_fields_that_clients_read(server):
    save(server, "mine", system="s")
    answer = server.get("/api/tags")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    mine, demo = answer.json["models"]
    assert set(demo) == {"name", "model", "modified_at", "size", "digest", "details", "capabilities"}
    assert set(demo["details"]) == {
        *("parent_model", "format", "family", "families", "parameter_size", "quantization_level"),
        *("context_length", "embedding_length"),
    }
    assert (demo["name"], demo["model"]) == ("demo:latest", "demo:latest")
    assert demo["capabilities"] == ["completion", "thinking", "tools"]
    assert type(demo["size"]) is int and re.fullmatch("[0-9a-f]{64}", demo["digest"])
    assert demo["details"]["format"] == "safetensors" and type(demo["details"]["parameter_size"]) is str
    assert mine["name"] == "mine:latest" and mine["details"]["parent_model"] == "demo:latest"
    assert parse_time(mine["modified_at"]) > parse_time(demo["modified_at"])


def test_head_of_tags_has_the_headers_only(server):
    answer = server.ask("HEAD", "/api/tags")
    assert (answer.status, answer.raw) == (200, b"")


@pytest.mark.parametrize("field", ["model", "name"])
def test_show_tells_all_about_a_model(server, field):
    shown = server.post("/api/show", {field: "Demo"}).json
    assert shown["model_info"]["general.architecture"] == "qwen4_exp"
    assert shown["model_info"]["qwen4_exp.context_length"] == 4096
    assert shown["model_info"]["qwen4_exp.embedding_length"] == 256
    assert type(shown["model_info"]["general.parameter_count"]) is int
    assert "{%- for tool in tools %}" in shown["template"]
    assert "WordNet" in shown["license"]
    assert parse_time(shown["modified_at"])
    assert not {"parameters", "system", "messages", "tensors", "slotpy"} & set(shown)


def test_show_tells_what_a_record_added(server):
    save(server, "mine", system="s", parameters={"temperature": 0.1, "stop": ["a", "b"]}, messages=MESSAGES)
    shown = server.post("/api/show", {"model": "mine"}).json
    assert (shown["system"], shown["messages"]) == ("s", list(MESSAGES))
    assert shown["parameters"].split("\n") == [
        f'{"stop":<30} "a"',
        f'{"stop":<30} "b"',
        f"{'temperature':<30} 0.1",
    ]


def test_show_takes_a_system_message_and_options_into_account(server):
    shown = server.post("/api/show", {"model": "demo", "system": "other", "options": {"top_k": 5}}).json
    assert shown["system"] == "other" and shown["parameters"] == f"{'top_k':<30} 5"


def test_show_lists_the_tensors_when_asked(server):
    tensors = server.post("/api/show", {"model": "demo", "verbose": True}).json["tensors"]
    [head] = [tensor for tensor in tensors if tensor["name"] == "language_model.lm_head.weight"]
    assert head == {"name": "language_model.lm_head.weight", "type": "U32", "shape": [4096, 32]}


def test_copilot_gets_the_name_it_asked_for(server):
    agent = {"User-Agent": "GitHubCopilotChat/0.30"}
    assert server.post("/api/show", {"model": "DEMO"}, **agent).json["model_info"]["general.basename"] == "DEMO"
    assert "general.basename" not in server.post("/api/show", {"model": "DEMO"}).json["model_info"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "nosuch"}, 404, "model 'nosuch' not found"),
        ({}, 400, "model is required"),
        ({"model": "", "name": ""}, 400, "model is required"),
        ({"model": "a b"}, 400, "invalid model name"),
        ({"model": "nosuch:cloud"}, 403, "ollama cloud is disabled: remote model is unavailable"),
        ({"model": 5}, 400, "json: cannot unmarshal number into Go struct field ShowRequest.model of type string"),
    ],
)
def test_show_refuses_in_ollamas_words(server, body, status, text):
    answer = server.post("/api/show", body)
    assert (answer.status, answer.json) == (status, {"error": text})


def test_nothing_runs_where_nothing_is_loaded(server):
    assert server.get("/api/ps").json == {"models": []}


def test_ps_tells_the_size_and_the_end_and_the_plan(server, monkeypatch):
    monkeypatch.setattr(device, "backend", lambda: "metal")
    load(server)
    [running] = server.get("/api/ps").json["models"]
    [listed] = server.get("/api/tags").json["models"]
    assert (running["name"], running["model"], running["context_length"]) == ("demo:latest", "demo:latest", 2048)
    assert running["digest"] == listed["digest"] and running["details"] == listed["details"]
    assert running["size"] == running["size_vram"] == PLAN.expected_peak_bytes
    left = parse_time(running["expires_at"]) - datetime.now(UTC)
    assert timedelta(minutes=4) < left <= timedelta(minutes=5)
    assert running["slotpy"]["plan"]["num_slots"] == PLAN.num_slots
    assert running["slotpy"]["governor"] == {"state": "steady"} and running["slotpy"]["slots"]["hits"] == 5
    assert "modified_at" not in running


def test_ps_says_that_nothing_lies_in_gpu_memory_on_a_cpu(server, monkeypatch):
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    load(server)
    assert server.get("/api/ps").json["models"][0]["size_vram"] == 0


def test_for_ever_is_more_than_twenty_years_and_a_running_model_does_not_end_now(server):
    load(server, expires_at=None, forever=True)
    assert parse_time(server.get("/api/ps").json["models"][0]["expires_at"]).year > 2100
    load(server, expires_at=None)
    assert parse_time(server.get("/api/ps").json["models"][0]["expires_at"]) > datetime.now(UTC)


def test_a_model_runs_under_the_name_it_was_loaded_by(server):
    save(server, "mine")
    load(server, name="mine:latest")
    digests = {model["name"]: model["digest"] for model in server.get("/api/tags").json["models"]}
    assert server.get("/api/ps").json["models"][0]["digest"] == digests["mine:latest"]
    load(server)
    assert server.get("/api/ps").json["models"][0]["digest"] == digests["demo:latest"]


def test_a_loaded_model_keeps_a_digest_when_its_name_is_gone(server):
    load(server, name="gone:latest")
    assert server.get("/api/ps").json["models"][0]["digest"] == server.get("/api/tags").json["models"][0]["digest"]
    load(server, name="gone:latest", directory=Path("/nowhere"))
    assert re.fullmatch("[0-9a-f]{64}", server.get("/api/ps").json["models"][0]["digest"])


def test_show_tells_the_plan_of_a_loaded_model(server):
    load(server)
    shown = server.post("/api/show", {"model": "demo"}).json
    assert shown["slotpy"] == server.get("/api/ps").json["models"][0]["slotpy"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, "0.1"), (4096, "4096"), (1.0, "1"), (True, "true"), ("<x>\n", '"<x>\\n"'), (1e-05, "1e-05")],
)
def test_parameters_are_written_as_go_writes_them(value, text):
    assert parameters_text({"name": value}) == "name" + 27 * " " + text


def test_a_modelfile_names_the_base_and_all_that_was_added(server):
    save(server, "mine", system="one\ntwo", parameters={"stop": ["a"], "top_k": 5}, messages=MESSAGES, license="MIT")
    lines = modelfile_text(server.service.library.find("mine")).split("\n")
    assert lines[1:] == [
        "FROM demo:latest",
        'SYSTEM """one',
        'two"""',
        "PARAMETER stop a",
        "PARAMETER top_k 5",
        "MESSAGE user hi",
        'MESSAGE assistant """say "x"',
        'and more"""',
        "LICENSE MIT",
        "",
    ]
