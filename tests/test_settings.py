"""The settings tree: where values come from, and what is refused."""

from pathlib import Path

import pytest

from app.cli import main
from app.settings import Section, Settings, SettingsError, dump_settings, load_settings

POOL = '[[pools]]\nname = "demo"\nengine = "scripted"\n'


def load(tmp_path: Path, text: str, preset: str | None = None, **env: str) -> Settings:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return load_settings(file, preset, {"HEADRACE__AUTH__MODE": "off", **env})


def test_environment_wins_over_file_and_file_over_preset(tmp_path: Path) -> None:
    file = "[server]\nport = 9000\nmax_choices = 5\n"
    settings = load(tmp_path, file, "development", HEADRACE__SERVER__PORT="9001")
    assert (settings.server.port, settings.server.max_choices, settings.server.drain.drain_s) == (9001, 5, 5)
    assert settings.monitoring.log_format == "console"
    assert settings.pools[0].vllm == {"model": "builtin"}


def test_another_model_is_one_setting(tmp_path: Path) -> None:
    settings = load(tmp_path, "", "development", HEADRACE__POOLS__0__VLLM__MODEL="org/other")
    assert settings.pools[0].vllm == {"model": "org/other"}
    assert [model.name for model in settings.offered_models()] == ["org/other"]


def test_preset_of_the_file_wins_over_the_commands_and_the_environments_over_both(tmp_path: Path) -> None:
    assert load(tmp_path, f'preset = "production"\n{POOL}', "development").monitoring.log_format == "json"
    settings = load(tmp_path, 'preset = "production"\n', None, HEADRACE__PRESET="development")
    assert (settings.preset, settings.monitoring.log_format) == ("development", "console")


def test_environment_reaches_into_lists_and_takes_json(tmp_path: Path) -> None:
    env = {"HEADRACE__POOLS__0__SCRIPTED__TEXT": "hello", "HEADRACE__POOLS__1": '{"name": "b", "engine": "scripted"}'}
    settings = load(tmp_path, POOL, None, **env)
    assert settings.pools[0].scripted.text == "hello"
    assert [model.name for model in settings.offered_models()] == ["demo", "b"]


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("[server]\nprot = 1\n" + POOL, {}, r"server\.prot: unknown key \(did you mean 'port'\?\)"),
        ("[sever]\n" + POOL, {}, r"sever: unknown key \(did you mean 'server'\?\)"),
        (POOL + "scriptd = {}\n", {}, r"pools\.0\.scriptd: unknown key \(did you mean 'scripted'\?\)"),
        (POOL, {"HEADRACE__SERVER__PROT": "1"}, r"server\.prot: unknown key"),
        (POOL, {"HEADRACE__SEVER": "1"}, r"sever: unknown key"),
        (POOL, {"HEADRACE__POOLS__5__NAME": "x"}, r"HEADRACE__POOLS__5__NAME"),
        (POOL, {"HEADRACE__POOLS__1": "{"}, r"HEADRACE__POOLS__1"),
        (POOL, {"HEADRACE__PRESET": "prod"}, r"preset: Input should be"),
        (f"preset = [1]\n{POOL}", {}, r"preset: Input should be"),
        ("[server]\nport = 70000\n" + POOL, {}, r"server\.port: .* less than or equal to 65535"),
        ('[server]\nport = "many"\n' + POOL, {}, r"server\.port: "),
        ('[server]\ntls_cert_file = "x"\n' + POOL, {}, r"go together"),
        ("", {}, r"pools: at least one is needed"),
        (POOL + POOL, {}, r"pools: 'demo' is there twice"),
        (POOL + '[[models]]\nname = "m"\npool = "nope"\n', {}, r"names the pool 'nope'"),
        (
            POOL + '[[pools]]\nname = "b"\nengine = "scripted"\n[[models]]\nname = "m"\npool = "b"\n',
            {},
            r"no model uses 'demo'",
        ),
        ('[[pools]]\nname = "x"\nengine = "vllm"\n', {}, r"needs vllm\.model"),
        (POOL + "vllm = {model = 1}\n", {}, r"vllm: not for a pool"),
        ("not toml", {}, r"not TOML"),
        (POOL + '[cache.redis]\nurl = "http://x"\n', {}, r"begins with one of redis://"),
        (POOL + '[cache.redis]\nurl = "redis+sentinel://a:1,b:2"\n', {}, r"name of the service"),
        (POOL + '[cache.redis]\nurl = "redis://x"\nca_file = "c"\n', {}, r"are for TLS"),
        (POOL + '[cache.redis]\nurl = "rediss://x"\ncert_file = "c"\n', {}, r"go together"),
        (POOL + '[singleflight]\nscope = "cluster"\n', {}, r"needs cache\.redis\.url"),
        (POOL + '[cache]\nenabled = false\nwarm_file = "w"\n', {}, r"a cache that is enabled"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, text: str, env: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load(tmp_path, text, None, **env)
    assert "\n" not in str(caught.value)


def test_settings_that_are_shown_can_be_loaded_and_hide_secrets(tmp_path: Path) -> None:
    pool = '[[pools]]\nname = "x"\nengine = "vllm"\nvllm = {model = "m", hf_token = "canary", tokenizer = "seen"}\n'
    shown = dump_settings(load(tmp_path, pool))
    assert "canary" not in shown
    assert 'tokenizer = "seen"' in shown
    assert dump_settings(load(tmp_path, shown)) == shown


def test_commands_check_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[auth]\nmode = "off"\n' + POOL)
    assert main(["config", "check", "--config", str(file)]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["config", "show", "--config", str(file)]) == 0
    assert "[server]" in capsys.readouterr().out
    file.write_text("[sever]\n" + POOL)
    assert main(["config", "check", "--config", str(file)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["config", "check", "--config", str(tmp_path / "none.toml")]) == 1
    assert "none.toml" in capsys.readouterr().err


def test_every_setting_says_what_it_is_and_is_documented() -> None:
    documented = (Path(__file__).parent.parent / "README.md").read_text()

    def walk(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
            if below:
                walk(below[0], f"{prefix}{name}.")
            else:
                assert field.description, f"{prefix}{name} has no docstring"
                assert f"| `{prefix}{name}` |" in documented, f"README.md lacks {prefix}{name}; run `make docs`"
                assert " ".join(field.description.split()) in documented, "README.md is old; run `make docs`"

    walk(Settings, "")
