from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import altay_kvfix
from altay_kvfix import settings as settings_module
from altay_kvfix.layout import make_layout_plan
from altay_kvfix.settings import Mode, Settings

REPOSITORY = Path(altay_kvfix.__file__).parent.parent


def read(**environ: str) -> Settings:
    return Settings.from_environ(environ)


def test_defaults():
    settings = read()
    assert settings == Settings()
    assert settings.mode is Mode.ATTENTION_EXACT
    assert settings.certified_plan == altay_kvfix.COMPACT_PLAN
    assert (settings.search, settings.max_groups, settings.group_cost) == (True, 24, 0.005)
    assert settings.errors == ()


@pytest.mark.parametrize("name", [n for n in vars(settings_module) if n.endswith("_ENV_NAME")])
@pytest.mark.parametrize("value", ["", "  "])
def test_empty_means_unset(name, value):
    assert read(**{getattr(settings_module, name): value}) == Settings()


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("attention_exact", Mode.ATTENTION_EXACT),
        (" Required ", Mode.REQUIRED),
        ("STRICT", Mode.REQUIRED),
        ("legacy", Mode.OFF),
        ("Off", Mode.OFF),
        ("0", Mode.OFF),
        ("FALSE\n", Mode.OFF),
    ],
)
def test_modes(value, mode):
    assert read(ZENIT_ALTAY_KV_LAYOUT=value) == Settings(mode=mode)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7,9,54", make_layout_plan((7, 9, 54), 8)),
        (" 54, 16 ", make_layout_plan((16, 54), 8)),
        ("16,54:4", make_layout_plan((16, 54), 4)),
        ("16,54:10", make_layout_plan((16, 54), 9)),
    ],
)
def test_family_counts(value, expected):
    assert read(ALTAY_KVFIX_FAMILY_COUNTS=value).certified_plan == expected


@pytest.mark.parametrize(
    ("variable", "field", "value", "expected"),
    [
        ("ALTAY_KVFIX_DISABLE", "disabled", "Yes", True),
        ("ALTAY_KVFIX_DISABLE", "disabled", "off", False),
        ("ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH", "trace_path", " /tmp/t ", "/tmp/t"),
        ("RADIANCE_KV_GROUP_OPT", "search", "0", False),
        ("RADIANCE_KV_GROUP_SIZE", "group_size", "8", 8),
        ("RADIANCE_KV_GROUP_MAX_GROUPS", "max_groups", "70", 70),
        ("ALTAY_KVFIX_GROUP_COST", "group_cost", "0", 0.0),
        ("ALTAY_KVFIX_GROUP_COST", "group_cost", "1e-3", 0.001),
        ("ALTAY_KVFIX_PLAN_TOKENS", "plan_tokens", "8192", 8192),
        ("ALTAY_KVFIX_WITH_KV_TRANSFER", "with_kv_transfer", "1", True),
    ],
)
def test_values(variable, field, value, expected):
    settings = read(**{variable: value})
    assert getattr(settings, field) == expected
    assert settings.errors == ()


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("ALTAY_KVFIX_DISABLE", ["maybe", "2"]),
        ("ZENIT_ALTAY_KV_LAYOUT", ["requird", "1", "true", "required,strict"]),
        ("ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH", ["trace.jsonl", "./t", "~/t"]),
        (
            "ALTAY_KVFIX_FAMILY_COUNTS",
            ["16", "16,", "0,54", "16;54", "16,54:", "16,54:0", "a,b", "1_6,54", "-1,3", "٣,٤"],
        ),
        ("RADIANCE_KV_GROUP_OPT", ["always"]),
        ("RADIANCE_KV_GROUP_SIZE", ["0", "-1", "8.0", "eight"]),
        ("RADIANCE_KV_GROUP_MAX_GROUPS", ["0", "inf"]),
        ("ALTAY_KVFIX_GROUP_COST", ["-0.1", "nan", "inf", "1%"]),
        ("ALTAY_KVFIX_PLAN_TOKENS", ["0", "8k", "1e6"]),
        ("ALTAY_KVFIX_WITH_KV_TRANSFER", ["nixl"]),
    ],
)
def test_a_malformed_value_is_named_and_keeps_its_default(variable, values):
    for value in values:
        settings = read(**{variable: value})
        (error,) = settings.errors
        assert (error.variable, error.value) == (variable, value)
        assert str(error).startswith(f"{variable}={value!r} is not valid; allowed: ")
        assert settings == Settings(errors=settings.errors)


def test_expect_family_counts_reaches_this_process_and_its_children(monkeypatch):
    monkeypatch.setenv(settings_module.FAMILY_COUNTS_ENV_NAME, "16,54")
    plan = altay_kvfix.expect_family_counts((54, 9, 7), group_size=9)
    assert plan == make_layout_plan((7, 9, 54), 9)
    assert Settings.from_environ(os.environ).certified_plan == plan


@pytest.mark.parametrize("counts", [(), (16,), (0, 54), (16, -1)])
def test_expect_family_counts_refuses_malformed_counts(monkeypatch, counts):
    monkeypatch.delenv(settings_module.FAMILY_COUNTS_ENV_NAME, raising=False)
    with pytest.raises(ValueError, match="famil"):
        altay_kvfix.expect_family_counts(counts)
    assert settings_module.FAMILY_COUNTS_ENV_NAME not in os.environ


def test_the_start_up_file_knows_the_same_words():
    """sitecustomize.py can't import the settings, so it repeats two lists."""
    tree = ast.parse((REPOSITORY / "sitecustomize.py").read_text())
    words = {
        node.targets[0].id: set(ast.literal_eval(node.value))
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    }
    assert words["_SWITCHED_OFF"] == {k for k, on in settings_module._SWITCH.items() if on}
    assert words["_NOT_REQUIRED"] == {""} | {
        k for k, mode in settings_module._MODES.items() if mode is not Mode.REQUIRED
    }


def test_every_variable_is_in_the_readme():
    readme = (REPOSITORY / "README.md").read_text()
    for name in vars(settings_module):
        if name.endswith("_ENV_NAME"):
            assert f"`{getattr(settings_module, name)}`" in readme
