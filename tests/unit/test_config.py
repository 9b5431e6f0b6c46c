import pytest

from kvcanary_plugin.config import CHECKS, OPTIONS, Config, read_config, to_environment
from kvcanary_plugin.errors import ConfigError


def test_nothing_given_means_off():
    assert read_config({}) == Config(mode="off")
    assert not read_config({}).is_on


def test_flag_beats_environment():
    assert read_config({"KVCANARY": "log"}, {"mode": "raise"}).mode == "raise"
    assert read_config({"KVCANARY": "log"}, {"mode": "off"}).mode == "off"


def test_environment_alone_is_enough():
    config = read_config({"KVCANARY": "log", "KVCANARY_SCRUB_BUDGET": "0.02", "KVCANARY_ALLOW_UNCOVERED": "1"})

    assert config == Config(mode="log", scrub_budget=0.02, allow_uncovered=True)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(mode="raise", checks=("chain",), content="partial", scrub_budget=1.0, log="a b.jsonl"),
        Config(inject="x@1"),
    ],
)
def test_environment_carries_a_configuration_to_children(config):
    environment = {**to_environment(config), "KVCANARY_ALLOW_INJECT": "1"}

    assert read_config(environment) == config


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mode", "loud", ["--kvcanary='loud'", "off, log, raise"]),
        ("checks", "chain,smell", ["'smell'", "chain, content"]),
        ("checks", ",", ["--kvcanary-checks is empty"]),
        ("content", "some", ["'some'", "none, partial, all"]),
        ("scrub_budget", "0", ["'0'", "above 0 and at most 1"]),
        ("scrub_budget", "1.5", ["'1.5'", "above 0 and at most 1"]),
        ("scrub_budget", "nan", ["'nan'", "above 0"]),
        ("scrub_budget", "lots", ["'lots'"]),
        ("allow_uncovered", "perhaps", ["'perhaps'"]),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(field, value, words):
    with pytest.raises(ConfigError) as error:
        read_config({}, {field: value})
    for word in words:
        assert word in str(error.value)


def test_a_bad_variable_is_named_as_the_variable():
    with pytest.raises(ConfigError, match="KVCANARY='loud'"):
        read_config({"KVCANARY": "loud"})


def test_injection_needs_permission_from_the_environment():
    with pytest.raises(ConfigError, match="KVCANARY_ALLOW_INJECT=1"):
        read_config({}, {"inject": "flip_running@3"})
    assert read_config({"KVCANARY_ALLOW_INJECT": "1"}, {"inject": "flip_running@3"}).inject == "flip_running@3"


def test_every_flag_has_a_variable_of_the_same_name():
    for option in OPTIONS:
        assert option.variable.lower().replace("_", "-") == option.flag.removeprefix("--")


def test_a_configuration_that_checks_nothing_is_refused():
    with pytest.raises(ConfigError, match="checks nothing"):
        read_config({"KVCANARY": "log", "KVCANARY_CHECKS": "content", "KVCANARY_CONTENT": "none"})
    left = read_config({"KVCANARY": "log", "KVCANARY_CONTENT": "none"}).checks
    assert set(CHECKS) - set(left) == {"content", "presence"}


def test_identity_needs_the_chain():
    with pytest.raises(ConfigError, match="identity without chain"):
        read_config({"KVCANARY": "log", "KVCANARY_CHECKS": "identity,content"})
    assert read_config({"KVCANARY": "log", "KVCANARY_CHECKS": "identity,chain"}).checks == ("chain", "identity")
