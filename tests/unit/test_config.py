"""Settings: defaults, file, environment, and every way in which an admin can go wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from crater_slurm.config import Settings, load
from crater_slurm.config.load import known_keys
from crater_slurm.config.sample import sample
from crater_slurm.errors import ConfigError

SAMPLE = Path(__file__).resolve().parents[2] / "etc" / "crater.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "crater.yaml"


def wrong(file: Path, text: str, environment: dict[str, str] | None = None) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(file, environment or {})
    return str(raised.value)


def test_an_empty_file_gives_the_defaults(file: Path) -> None:
    file.write_text("")
    assert load(file, {}).settings == Settings()
    assert load(file, {}).origins == {}


def test_a_new_installation_changes_nothing() -> None:
    assert Settings().filter.mode == "observe"
    assert Settings().node.drain_on == ()


def test_the_file_wins_over_the_default_and_the_environment_over_the_file(file: Path) -> None:
    file.write_text("filter: {mode: enforce}\nscheduler: {refresh_seconds: 5}\n")
    found = load(file, {"CRATER_FILTER__MODE": "advise", "CRATER_STORE__KEEP_DECISIONS_DAYS": "7"})
    assert found.settings.filter.mode == "advise"
    assert found.settings.scheduler.refresh_seconds == 5
    assert found.settings.store.keep_decisions_days == 7
    assert found.origins == {
        "filter.mode": "$CRATER_FILTER__MODE",
        "scheduler.refresh_seconds": str(file),
        "store.keep_decisions_days": "$CRATER_STORE__KEEP_DECISIONS_DAYS",
    }


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text("filter: {mode: advise}")
    assert load(None, {"CRATER_CONFIG": str(file)}).settings.filter.mode == "advise"


def test_other_crater_variables_are_no_settings(file: Path) -> None:
    file.write_text("")
    environment = {"CRATER_CHECK": "x", "CRATER_NUMA_NODE": "0", "CRATER_CONFIG": str(file)}
    assert load(None, environment).settings == Settings()


@pytest.mark.parametrize("written", ["off", "'off'", "OFF", "Off", "no"])
def test_mode_off_is_a_word_though_yaml_reads_false(file: Path, written: str) -> None:
    file.write_text(f"filter: {{mode: {written}}}")
    assert load(file, {}).settings.filter.mode == "off"


def test_off_works_from_the_environment_and_for_memory_binding_too(file: Path) -> None:
    file.write_text("node: {memory_binding: off}\nsharing: {allow: off}")
    found = load(file, {"CRATER_FILTER__MODE": "off"}).settings
    assert found.filter.mode == "off"
    assert found.node.memory_binding == "off"
    assert found.sharing.allow == "off"


def test_an_unknown_key_names_file_key_and_the_nearest_known_one(file: Path) -> None:
    text = wrong(file, "filter: {mod: observe}")
    assert text.startswith(f"{file}: unknown setting filter.mod; did you mean mode?")
    assert "Known here are mode, socket" in text


def test_an_unknown_section_lists_the_sections(file: Path) -> None:
    assert "unknown setting filters; did you mean filter?" in wrong(file, "filters: {}")


def test_a_wrong_type_shows_value_and_origin(file: Path) -> None:
    text = wrong(file, "", {"CRATER_SCHEDULER__REFRESH_SECONDS": "soon"})
    assert text.startswith("$CRATER_SCHEDULER__REFRESH_SECONDS: scheduler.refresh_seconds = 'soon'")


def test_every_mistake_is_reported_at_once(file: Path) -> None:
    text = wrong(file, "filter: {mode: maybe}\nstore: {keep_decisions_days: 0}\nnode: {x: 1}")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("filter: [", "is not YAML"),
        ("- a\n- b", "must hold sections"),
        ("just words", "must hold sections"),
        ("kubernetes: {kubeconfig: x}", "runs on Slurm"),
        ("filter: observe", "filter = 'observe'"),
        ("filter:", "filter = None"),
        ("1: 2", "1"),
        ("node: {cache: {device: /dev/nvme0n1}}", "node.cache.device"),
        ("node: {cache: {min_free_percent: 51}}", "node.cache.min_free_percent"),
        ("filter: {consume: [membw, gpu]}", "filter.consume.1"),
        ("filter: {allowed_users: root}", "filter.allowed_users"),
    ],
)
def test_what_can_t_be_meant_is_refused_in_words(file: Path, text: str, says: str) -> None:
    assert says in wrong(file, text)


def test_a_file_that_is_no_text_is_refused_in_words(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(file, {})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the settings file"):
        load(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="can't read the settings file"):
        load(tmp_path, {})


@pytest.mark.parametrize("value", ["{", "[1", "a: b: c", "\t@"])
def test_a_broken_value_in_the_environment_is_refused_by_name(file: Path, value: str) -> None:
    assert "$CRATER_FILTER__MODE" in wrong(file, "", {"CRATER_FILTER__MODE": value})


def test_a_variable_below_a_value_is_refused(file: Path) -> None:
    text = wrong(file, "filter: observe", {"CRATER_FILTER__MODE": "advise"})
    assert "$CRATER_FILTER__MODE sets a field of 'filter'" in text


def leaves(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, entry in model.model_fields.items():
        annotation = entry.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found += leaves(annotation, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", entry.description or ""))
    return found


@pytest.mark.parametrize(("path", "description"), leaves(Settings))
def test_every_setting_says_what_it_means(path: str, description: str) -> None:
    assert description.endswith("."), path
    assert path.rpartition(".")[2] in known_keys(path.split(".")[:-1])


def test_settings_can_t_be_changed_after_they_were_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().filter.mode = "off"


def test_the_sample_file_is_the_settings_own_text() -> None:
    assert SAMPLE.read_text() == sample()


def test_the_sample_changes_nothing_as_it_is(file: Path) -> None:
    file.write_text(sample())
    assert load(file, {}).settings == Settings()


def test_the_sample_with_every_value_uncommented_is_the_defaults(file: Path) -> None:
    body = sample().partition("\n\n")[2]
    lines = [re.sub(r"^# ", "", line) for line in body.splitlines()]
    file.write_text("\n".join(line for line in lines if not line.lstrip().startswith("#")))
    found = load(file, {})
    assert found.settings == Settings()
    assert len(found.origins) == len(leaves(Settings))


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text_in_the_environment_is_a_value_or_a_config_error(text: str) -> None:
    try:
        load(Path("/dev/null"), {"CRATER_FILTER__MODE": text})
    except ConfigError as error:
        assert "CRATER_FILTER__MODE" in str(error)
