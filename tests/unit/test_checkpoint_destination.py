"""Destinations: placeholders, URLs, and that no name a user writes leads out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.checkpoint.destination import fill, home, parse, within
from crater_slurm.errors import UsageError

NAMES = {"u": "ada", "j": "4711", "A": "4700", "a": "3", "x": "llama", "c": "c1"}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("/scratch/%u/%j", "/scratch/ada/4711"),
        ("s3://site/%c/%u/%x-%A_%a", "s3://site/c1/ada/llama-4700_3"),
        ("/a/100%%/%j", "/a/100%/4711"),
        ("/plain", "/plain"),
    ],
)
def test_placeholders_are_filled_in(template: str, filled: str) -> None:
    assert fill(template, NAMES) == filled


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../root", "_._.._root"),
        ("..", "_."),
        (".", "_"),
        ("/etc", "_etc"),
        ("a b\n;$(x)", "a_b____x_"),
        ("ümlaut", "_mlaut"),
        ("x" * 300, "x" * 64),
        ("%u", "_u"),
    ],
)
def test_names_of_users_become_one_piece(name: str, safe: str) -> None:
    assert fill("/s/%x/e", {"x": name}) == f"/s/{safe}/e"


@given(st.text(min_size=1, max_size=100))
def test_no_job_name_leads_out_of_its_prefix(name: str) -> None:
    for template in ("/site/%x/end", "s3://bucket/site/%x/end", "/site/a%x"):
        place = parse(fill(template, {"x": name}))
        assert place.pieces[0] == "site"
        assert len(place.pieces) == (2 if template.endswith("a%x") else 3)


@pytest.mark.parametrize("template", ["/a/%z", "/a/%", "/a/%\n", "%U"])
def test_an_unknown_placeholder_names_the_known_ones(template: str) -> None:
    with pytest.raises(UsageError, match="known are %u %j %A %a %x %c %%"):
        fill(template, NAMES)


@pytest.mark.parametrize(
    "text",
    [
        *("", "relative/path", "/", "//", "/a/../b", "/a/./b", "/a//b", "/a\0b", "/a\nb", "~/x"),
        *("s3:/b/x", "s3://", "s3:///x", "s3://b", "s3://bucket/../x", "s3://bucket//x"),
        *("s3://bucket/a b", "s3://bu/ck et/", "ftp://bucket/x", "S3://bucket/x", "s3://bücket/x"),
        *("s3://user:pass@bucket/x", "s3://bucket/x?versionId=1", "/" + "a" * 600),
        "s3://-x/y",
    ],
)
def test_what_is_no_destination_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(UsageError, match="The checkpoint destination"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "bucket", "pieces"),
    [
        ("/scratch/a b/ü", "path", "", ("scratch", "a b", "ü")),
        ("/scratch/x/", "path", "", ("scratch", "x")),
        ("s3://site", "s3", "site", ()),
        ("s3://site/", "s3", "site", ()),
        ("s3://site/a/b.c=1@2+3/", "s3", "site", ("a", "b.c=1@2+3")),
        ("gs://b1/x", "gs", "b1", ("x",)),
        ("az://container/x", "az", "container", ("x",)),
    ],
)
def test_destinations_are_taken_apart_and_put_together(
    text: str, kind: str, bucket: str, pieces: tuple[str, ...]
) -> None:
    place = parse(text)
    assert (place.kind, place.bucket, place.pieces) == (kind, bucket, pieces)
    assert parse(place.url) == place
    assert place.prefix == "".join(f"{piece}/" for piece in pieces)


@pytest.mark.parametrize("values", [{}, {"x": ""}])
def test_a_placeholder_without_a_value_is_no_destination(values: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="'/p/%x' has %x, which is not known here"):
        fill("/p/%x", values)


def test_the_site_s_credentials_are_for_the_user_s_own_part() -> None:
    own = home("s3://site/ckpt", "ada")
    assert within(own, parse("s3://site/ckpt/ada/run"))
    assert within(own, parse("s3://site/ckpt/ada"))
    for other in (
        *("s3://site/ckpt/eve/x", "s3://site/ckpt/ad", "s3://site/ckpt/adam/x", "s3://site/ckpt"),
        *("s3://site/ada/x", "s3://site2/ckpt/ada/x", "gs://site/ckpt/ada/x", "/ckpt/ada/x"),
    ):
        assert not within(own, parse(other))


@pytest.mark.parametrize("user", ["", ".", "..", "a/b", "a b", "x" * 66])
def test_a_user_name_that_is_no_plain_piece_has_no_part(user: str) -> None:
    with pytest.raises(UsageError, match="can't be a folder of s3://site/ckpt"):
        home("s3://site/ckpt", user)
