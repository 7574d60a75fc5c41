"""Where checkpoints go and with whose keys: nobody gets below another user's name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from crater_slurm.config.checkpoints import Checkpoints, Remote
from crater_slurm.model.plan import Plan
from crater_slurm.node.destinations import (
    Destination,
    DestinationError,
    needs_slurm,
    read_credentials,
    resolve,
    wish,
)

VALUES = {"u": "alice", "j": "7", "c": "c1", "A": "5", "a": "2", "x": "../my run/1"}
MAIN = Remote(name="main", url="s3://site/ckpt", credentials_file=Path("/etc/crater/keys"))
OPEN = Remote(name="scratch", url="s3://scratch", endpoint="https://s3.site:9000", region="r1")
SITE = Checkpoints(destination="s3://site/ckpt/%u/%j", remotes=(MAIN, OPEN))


def where(
    text: str | None, user: str = "alice", credentials: str | None = None, site: Checkpoints = SITE
) -> Destination:
    plan = Plan(id="p", checkpoint=text, checkpoint_credentials=credentials)
    return resolve(plan, site, user, {**VALUES, "u": user})


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (None, ""),
        ("off", ""),
        ("on", "s3://site/ckpt/alice/7"),
        ("/project/%u/%x-%j/", "/project/alice/_._my_run_1-7"),
        ("/project/100%%/%A_%a", "/project/100%/5_2"),
        ("s3://site/ckpt/alice", "s3://site/ckpt/alice"),
        ("s3://site/ckpt/alice/run/", "s3://site/ckpt/alice/run"),
    ],
)
def test_a_wish_becomes_a_place(text: str | None, url: str) -> None:
    found = where(text)
    assert (found.url, found.problem) == (url, "")


@pytest.mark.parametrize(
    ("text", "user", "reason"),
    [
        ("s3://site/ckpt/bob/run", "alice", "below s3://site/ckpt/alice only"),
        ("s3://site/ckpt", "alice", "below s3://site/ckpt/alice only"),
        ("s3://site/ckpt/alicex/run", "alice", "below s3://site/ckpt/alice only"),
        ("s3://site/ckpt/x/../alice", "alice", "has the part '..'"),
        ("s3://site/ckpt/bob/%z", "alice", "known are %u %j"),
        ("s3://site/ckpts/alice/run", "alice", "none of the site's stores"),
        ("s3://elsewhere/alice", "alice", "checkpoint-credentials=own"),
        ("s3://site/ckpt/.", ".", "has the part '.'"),
        ("s3://site/ckpt/x", "..", "can't be a folder"),
        ("s3://site/ckpt/a/b", "a/b", "can't be a folder"),
        ("s3://scratch/alice/run", "alice", "no credentials for its store scratch"),
    ],
)
def test_the_site_s_keys_open_the_user_s_own_folder_only(text: str, user: str, reason: str) -> None:
    found = where(text, user)
    assert found.url == ""
    assert reason in found.problem


def test_own_keys_go_anywhere_and_know_the_site_s_endpoint() -> None:
    assert where("s3://elsewhere/x", credentials="own").remote().profile == "default"
    remote = where("s3://scratch/bob/x", credentials="own:research").remote()
    assert remote.profile == "research"
    assert remote.options == {
        "endpoint": "https://s3.site:9000", "region": "r1", "addressing": "auto",
    }  # fmt: skip
    assert remote.credentials == {}


def test_without_a_default_place_checkpoints_stay_on_the_node() -> None:
    assert where("on", site=Checkpoints()) == Destination()
    assert wish(None, SITE) == ""
    assert resolve(None, SITE, "alice", VALUES) == Destination()


def test_what_only_slurmctld_knows_is_asked_for_only_then() -> None:
    assert not needs_slurm("/p/%u/%j/%c/100%%A")
    assert all(needs_slurm(text) for text in ("/p/%A", "/p/%a", "/p/x%x"))
    assert "not known here" in resolve(Plan(id="p", checkpoint="/p/%x"), SITE, "a", {}).problem


def keys(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "access_key_id = AK\nsecret_access_key=s3+/cr=t\n",
        "# main\n[default]\naws_access_key_id = AK\naws_secret_access_key = 's3+/cr=t'\n",
        json.dumps({"access_key_id": "AK", "secret_access_key": "s3+/cr=t"}),
    ],
)
def test_credentials_are_read_in_the_forms_that_people_have(tmp_path: Path, text: str) -> None:
    found = read_credentials(keys(tmp_path, text))
    assert found == {"access_key_id": "AK", "secret_access_key": "s3+/cr=t"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_credentials_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(DestinationError, match="others may read it"):
        read_credentials(keys(tmp_path, "a = b\n", mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_credentials_of_another_user_are_refused(tmp_path: Path) -> None:
    file = keys(tmp_path, "a = b\n")
    os.chown(file, 65534, 65534)
    with pytest.raises(DestinationError, match="must be root's"):
        read_credentials(file)


def test_what_is_no_credentials_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="no line reads"):
        read_credentials(keys(tmp_path, "{broken"))
    (tmp_path / "link").symlink_to(tmp_path / "keys")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("link", "symbolic links"), ("pipe", "root's"), ("none", "No such file")):
        with pytest.raises(DestinationError, match=reason):
            read_credentials(tmp_path / name)


def test_secrets_show_up_in_no_text(tmp_path: Path) -> None:
    file = keys(tmp_path, "access_key_id = AK\nsecret_access_key = TOPSECRET\n")
    store = Remote(name="main", url="s3://site", credentials_file=file)
    found = where("s3://site/alice", site=Checkpoints(remotes=(store,)))
    assert found.remote().credentials["secret_access_key"] == "TOPSECRET"
    assert "TOPSECRET" not in repr(found) + repr(found.remote())


@pytest.mark.parametrize(
    "settings",
    [
        {"destination": "relative/path"},
        {"destination": "ftp://x/y"},
        {"destination": "/p/%q"},
        {"destination": "on"},
        {"remotes": [{"name": "a", "url": "s3://b/"}]},
        {"remotes": [{"name": "a", "url": "s3://key:secret@b"}]},
        {"remotes": [{"name": "a", "url": "https://b"}]},
        {"remotes": [{"name": "A b", "url": "s3://b"}]},
        {"remotes": [{"name": "a", "url": "s3://bb", "key": "x"}]},
        {"remotes": [{"name": "a", "url": "s3://bb"}, {"name": "a", "url": "s3://cc"}]},
        {"ring_percent": 95},
        {"engine": "libaio"},
    ],
)
def test_settings_that_can_t_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Checkpoints.model_validate(settings)


def test_off_is_a_word_in_yaml_too() -> None:
    found = Checkpoints.model_validate({"huge_pages": False, "scope": False})
    assert (found.huge_pages, found.scope) == ("off", "off")
