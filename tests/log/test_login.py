from pathlib import Path

import pytest

from parallel3d.log.login import check_wandb, logged_in


@pytest.fixture
def nobody(tmp_path: Path) -> dict[str, str]:
    return {"NETRC": str(tmp_path / "netrc")}


def write_netrc(env: dict[str, str], host: str, password: str) -> None:
    Path(env["NETRC"]).write_text(f"machine {host} login user password {password}\n")


def test_without_a_login_the_default_is_offline(nobody: dict[str, str]) -> None:
    assert check_wandb(None, nobody) == "offline"


def test_with_a_key_the_default_is_online(nobody: dict[str, str]) -> None:
    assert check_wandb(None, nobody | {"WANDB_API_KEY": "k"}) == "online"


def test_a_login_is_read_from_netrc_for_the_server_in_use(nobody: dict[str, str]) -> None:
    write_netrc(nobody, "api.wandb.ai", "k" * 40)
    assert check_wandb(None, nobody) == "online"
    assert not logged_in(nobody | {"WANDB_BASE_URL": "https://wandb.example.org"})
    write_netrc(nobody, "wandb.example.org", "k" * 40)
    assert logged_in(nobody | {"WANDB_BASE_URL": "https://wandb.example.org"})


def test_a_netrc_that_cannot_be_read_is_no_login(nobody: dict[str, str]) -> None:
    Path(nobody["NETRC"]).write_text("machine\n")
    assert not logged_in(nobody)


@pytest.mark.parametrize(
    ("variable", "mode"),
    [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled"), ("run", "online")],
)
def test_the_environment_decides_where_the_configuration_does_not(
    nobody: dict[str, str], variable: str, mode: str
) -> None:
    env = nobody | {"WANDB_API_KEY": "k", "WANDB_MODE": variable}
    assert check_wandb(None, env) == mode
    assert check_wandb("disabled", env) == "disabled"


def test_online_without_a_login_is_an_error_with_a_way_out(nobody: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match=r"log\.wandb\.mode = online, .*`wandb login`"):
        check_wandb("online", nobody)
    with pytest.raises(RuntimeError, match="WANDB_MODE = online, "):
        check_wandb(None, nobody | {"WANDB_MODE": "online"})


@pytest.mark.parametrize("mode", ["onlin", "shared"])
def test_an_unknown_mode_is_an_error_that_names_the_known(
    nobody: dict[str, str], mode: str
) -> None:
    with pytest.raises(ValueError, match=rf"log\.wandb\.mode = {mode} .*online, offline or"):
        check_wandb(mode, nobody)
