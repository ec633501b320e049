from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npufleet_pod.errors import InvalidRequestError, ModelError
from npufleet_pod.server.chat_template import load_chat_template

HELLO = [{"role": "user", "content": "hello"}]


def render(folder: Path, template: Any, messages: list[dict[str, Any]] = HELLO, **fields: Any) -> str:
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_chat_template(folder).render(messages, add_generation_prompt=True)


def test_the_models_template_equals_transformers(tiny_model: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    messages = [{"role": "system", "content": "be brief"}, *HELLO, {"role": "assistant", "content": "日本 "}, *HELLO]
    for prompt in (True, False):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert load_chat_template(tiny_model).render(messages, prompt) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{% for m in messages %}\n{{ m.role }}\n{% break %}\n{% endfor %}", "user\n"),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "other", "template": "o"}], "o"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_have_what_the_hubs_expect(tmp_path: Path, template: Any, expected: str) -> None:
    assert render(tmp_path, template) == expected


def test_a_template_file_wins_over_the_tokenizers_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert render(tmp_path, "from config") == "from file"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9].content.x }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        (None, "has no chat template: use /v1/completions"),
    ],
)
def test_what_a_template_refuses_is_the_clients_to_mend(tmp_path: Path, template: str | None, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        render(tmp_path, template)


def test_a_template_that_does_not_parse_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config.json: chat_template: "):
        render(tmp_path, "{% if %}")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: chat_template"):
        render(tmp_path, 7)
