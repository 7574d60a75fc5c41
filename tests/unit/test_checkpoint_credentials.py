"""Who a job is at a store: the site's keys, or a profile that the user chose; no secret said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crater_slurm.checkpoint.remote import credentials
from crater_slurm.checkpoint.remote.store import RemoteError
from crater_slurm.checkpoint.spec import Remote

SECRET = "geheim/geheim+0123456789"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        f"[default]\naws_access_key_id = AK1\naws_secret_access_key = {SECRET}\n"
        "[lab]\naws_access_key_id = AK2\naws_secret_access_key = s2\naws_session_token = t2\n"
    )
    (folder / "config").write_text(
        "[default]\nregion = r1\n[profile lab]\nregion = r2\nendpoint_url = https://lab:9000\n"
        "[profile program]\ncredential_process = /bin/touch /tmp/no\n"
        "[profile role]\nrole_arn = arn:x\nsource_profile = lab\n"
    )
    return tmp_path


def test_a_profile_is_read_from_both_files(home: Path) -> None:
    first = credentials.of(Remote(url="s3://b/x", profile="default"), str(home))
    assert (first.key, first.secret, first.region, first.endpoint) == ("AK1", SECRET, "r1", "")
    lab = credentials.of(Remote(url="s3://b/x", profile="lab"), str(home))
    assert (lab.key, lab.secret, lab.token) == ("AK2", "s2", "t2")
    assert (lab.region, lab.endpoint) == ("r2", "https://lab:9000")


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ("nobody", "There is no profile 'nobody'"),
        ("program", "relies on credential_process, which is not followed"),
        ("role", "relies on role_arn, which is not followed"),
    ],
)
def test_a_profile_without_keys_says_why(home: Path, profile: str, reason: str) -> None:
    with pytest.raises(RemoteError, match=reason) as caught:
        credentials.of(Remote(url="s3://b/x", profile=profile), str(home))
    assert caught.value.lasting


def test_a_damaged_file_is_named_but_not_quoted(home: Path) -> None:
    (home / ".aws" / "credentials").write_text(f"aws_secret_access_key = {SECRET}\n[x\n")
    with pytest.raises(RemoteError, match="no file of profiles that can be read") as caught:
        credentials.of(Remote(url="s3://b/x", profile="default"), str(home))
    chain = [caught.value, caught.value.__cause__]
    assert all(SECRET not in str(error) for error in chain)
    assert caught.value.__suppress_context__


def test_a_pipe_in_place_of_the_file_hangs_nothing(home: Path) -> None:
    (home / ".aws" / "credentials").unlink()
    os.mkfifo(home / ".aws" / "credentials")
    with pytest.raises(RemoteError, match="is no plain file"):
        credentials.of(Remote(url="s3://b/x", profile="default"), str(home))


def test_the_site_s_keys_and_a_profile_exclude_each_other(home: Path) -> None:
    both = Remote(url="s3://b/x", profile="lab", credentials={"access_key_id": "a"})
    with pytest.raises(RemoteError, match="both a profile and the site's credentials"):
        credentials.of(both, str(home))
    with pytest.raises(RemoteError, match="needs access_key_id and secret_access_key"):
        credentials.of(Remote(url="s3://b/x"), str(home))


def test_a_secret_is_in_no_representation() -> None:
    keys = {"access_key_id": "AK", "secret_access_key": SECRET, "session_token": SECRET + "t"}
    remote = Remote(url="s3://b/x", credentials=keys)
    access = credentials.of(remote, "")
    assert (access.secret, access.token) == (SECRET, SECRET + "t")
    assert SECRET not in repr(remote) + repr(access) + str(access)


def test_messages_of_servers_lose_secrets_and_control_characters() -> None:
    said = credentials.scrub(f"bad\n\x1b[31m key {SECRET}!" + "x" * 500, (SECRET, ""), 60)
    assert said == "bad [31m key ***!" + "x" * 43 + "..."
