"""Names as clients send them: which mean the same model, which mean nothing, and what can be pulled under one."""

import pytest

from slotpy.errors import UsageError
from slotpy.server.library.names import InvalidName, parse_served


@pytest.mark.parametrize(
    "text",
    ["demo", "Demo", "demo:latest", "DEMO:Latest", "library/demo", "registry.ollama.ai/library/demo:latest"],
)
def test_equal_names_have_one_key(text):
    assert parse_served(text).key == "demo:latest"


@pytest.mark.parametrize(
    "text",
    ["Org/Repo:v1", "hf.co/org/repo:v1", "huggingface.co/org/repo:V1", "https://hf.co/org/repo:v1", "org/repo@v1"],
)
def test_hub_names_are_the_same_with_and_without_the_host(text):
    assert parse_served(text).key == "org/repo:v1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "::",
        ":x",
        "a:",
        "a:b:c",
        "a//b",
        "/a",
        "a/",
        "../a",
        "a/..",
        "a\n",
        "-a",
        "é",
        "a/b/c/d/e",
        "a%2Fb",
        "a" * 161,
        "a:" + "b" * 61,
    ],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(InvalidName, match=r"^invalid model name$"):
        parse_served(text)


def test_a_name_is_shown_with_its_tag_and_in_its_own_case():
    assert str(parse_served("hf.co/Org/Repo")) == "Org/Repo:latest"
    assert str(parse_served("my_model.v2:4bit")) == "my_model.v2:4bit"


@pytest.mark.parametrize(
    ("text", "is_remote"), [("x:cloud", True), ("x:120b-cloud", True), ("x", False), ("x-cloud", False)]
)
def test_hosted_models_are_told_by_their_tag(text, is_remote):
    assert parse_served(text).is_remote is is_remote


def test_the_tag_of_a_hub_name_is_a_revision():
    assert parse_served("hf.co/Org/Repo:v1").hub_name().text == "Org/Repo@v1"
    assert parse_served("Org/Repo").hub_name().text == "Org/Repo"
    assert parse_served("Org/Repo:latest").hub_name().text == "Org/Repo"


@pytest.mark.parametrize("text", ["qwen3.8-flash-next", "Qwen3.8-Flash-Next:latest", "qwen3.8-flash-next:4BIT"])
def test_pinned_models_are_pulled_in_any_case_and_without_a_tag(text):
    assert parse_served(text).hub_name().text == "qwen3.8-flash-next:4bit"


@pytest.mark.parametrize("text", ["nosuch", "qwen3.8-flash-next:8bit", "localhost:5000/a/b"])
def test_names_that_nobody_has_cannot_be_pulled(text):
    with pytest.raises(UsageError):
        parse_served(text).hub_name()
