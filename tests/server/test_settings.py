import math

import pytest

from slotpy import config
from slotpy.errors import UsageError
from slotpy.server.settings import Settings, is_loopback, parse_host


# What Ollama makes of the same texts.
@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", 11434), ("1.2.3.4", "1.2.3.4", 11434), ("1.2.3.4:1234", "1.2.3.4", 1234),
        (":1234", "", 1234), ("example.com", "example.com", 11434), ("example.com:1234/", "example.com", 1234),
        ("http://1.2.3.4", "1.2.3.4", 80), ("https://1.2.3.4", "1.2.3.4", 443),
        ("http://localhost:11434/", "localhost", 11434),
        ("https://example.com:4000/ollama", "example.com", 4000), ("[::1]", "::1", 11434), ("[::1]:1337", "::1", 1337),
        ("::1", "::1", 11434), ("http://[::]:9", "::", 9), (" 0.0.0.0 ", "0.0.0.0", 11434), ("1.2.3.4:0", "1.2.3.4", 0),
    ],
)  # fmt: skip
def test_addresses_are_read_as_ollama_reads_them(text, host, port):
    assert parse_host(text, "OLLAMA_HOST") == (host, port)


@pytest.mark.parametrize("text", ["localhost:65536", "localhost:-1", "localhost:abc", "[::1]:x", ":\u0661"])
def test_a_port_that_is_none_is_named(text):
    with pytest.raises(UsageError, match=r"OLLAMA_HOST .*is no port"):
        parse_host(text, "OLLAMA_HOST")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("LocalHost", True), ("0.0.0.0", False), ("", False),
     ("::", False), ("192.168.1.2", False), ("example.com", False), ("localhost.example.com", False)],
)  # fmt: skip
def test_listening_beyond_this_machine_needs_a_key_or_a_word(host, loopback):
    assert is_loopback(host) == loopback
    Settings(host=host, api_key="k").check_exposure()
    Settings(host=host, insecure=True).check_exposure()
    if loopback:
        Settings(host=host).check_exposure()
        return
    with pytest.raises(UsageError, match=r"--api-key KEY .*--insecure") as caught:
        Settings(host=host).check_exposure()
    assert caught.value.exit_code == 2


def test_nothing_said_means_ollamas_defaults():
    settings = Settings.read({})
    assert settings == Settings()
    assert (settings.url, settings.keep_alive_s, settings.max_queue) == ("http://127.0.0.1:11434", 300.0, 512)
    assert settings.context_tokens is None and not settings.debug


def test_variables_are_honoured_and_options_win():
    variables = {
        "OLLAMA_HOST": "0.0.0.0:8000", "OLLAMA_ORIGINS": " https://a.b , http://c:*,,", "OLLAMA_KEEP_ALIVE": "24h",
        "OLLAMA_CONTEXT_LENGTH": "8192", "OLLAMA_MAX_QUEUE": "3", "OLLAMA_DEBUG": "1", "SLOTPY_API_KEY": "secret",
    }  # fmt: skip
    settings = Settings.read(variables)
    assert settings == Settings(
        "0.0.0.0", 8000, ("https://a.b", "http://c:*"), "secret", False, 86400.0, 3, 8192, True,
    )  # fmt: skip
    settings = Settings.read(
        variables, host="[::1]", port=9, origins="*", api_key="other", keep_alive="0", context_tokens=77
    )
    assert (settings.url, settings.origins, settings.api_key) == ("http://[::1]:9", ("*",), "other")
    assert (settings.keep_alive_s, settings.context_tokens) == (0.0, 77)
    assert Settings.read(variables, host="h").port == 11434, "the variable's port goes with its host"
    assert Settings.read(variables, port=0).url == "http://0.0.0.0:0"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("90", 90.0), ("0", 0.0), ("-1", math.inf), ("-1s", math.inf), ("1.5s", 1.5)],
)
def test_keep_alive_is_a_duration_or_seconds(text, seconds):
    assert Settings.read({"OLLAMA_KEEP_ALIVE": text}).keep_alive_s == seconds


@pytest.mark.parametrize(
    ("variables", "named"),
    [({"OLLAMA_KEEP_ALIVE": "soon"}, "OLLAMA_KEEP_ALIVE soon"), ({"OLLAMA_MAX_QUEUE": "many"}, "OLLAMA_MAX_QUEUE=many"),
     ({"OLLAMA_CONTEXT_LENGTH": "-5"}, "OLLAMA_CONTEXT_LENGTH=-5"), ({"OLLAMA_HOST": "a:b"}, "OLLAMA_HOST a:b")],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(variables, named):
    with pytest.raises(UsageError, match=named):
        Settings.read(variables)


def test_variables_without_effect_are_told_when_they_were_to_have_one():
    assert (
        Settings.read({"OLLAMA_NUM_PARALLEL": "1", "OLLAMA_MAX_LOADED_MODELS": "0", "OLLAMA_NO_CLOUD": "1"}).notes == ()
    )
    notes = Settings.read({"OLLAMA_NUM_PARALLEL": "4", "OLLAMA_LOAD_TIMEOUT": "5m"}).notes
    assert notes == (
        "OLLAMA_NUM_PARALLEL=4 has no effect: one reply is generated at a time",
        "OLLAMA_LOAD_TIMEOUT=5m has no effect: loading is not given up",
    )


def test_the_environment_is_read_as_ollama_reads_it(monkeypatch):
    for name in config.SERVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OLLAMA_HOST", " '0.0.0.0' ")
    monkeypatch.setenv("OLLAMA_ORIGINS", '""')
    monkeypatch.setenv("OLLAMA_FLASH_ATTENTION", "1")
    assert config.server_variables() == {"OLLAMA_HOST": "0.0.0.0"}


def test_pulled_models_lie_where_ollamas_variable_says_unless_our_own_does(monkeypatch, tmp_path):
    monkeypatch.delenv("SLOTPY_MODELS", raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "a"))
    assert config.models_dir() == tmp_path / "a"
    monkeypatch.setenv("SLOTPY_MODELS", str(tmp_path / "b"))
    assert config.models_dir() == tmp_path / "b"
